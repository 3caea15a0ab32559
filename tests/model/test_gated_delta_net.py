"""Gated DeltaNet, shown in parts in docs/extend.md, computes its recurrence."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forgetting_transformer.model import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from forgetting_transformer.training.config import TrainConfig
from forgetting_transformer.training.optimization.parameter_groups import undecayed_parameters
from tests.docs.commands import blocks, section
from tests.model.small_models import counted_flops_per_token, small
from tests.model.test_delta_net import convolved, relative_error, silu

ROOT = Path(__file__).parents[2]


def one_step_per_token(mixer, hidden_BTE: Tensor) -> Tensor:
    """The mixer as the paper writes it, token by token, in float64."""
    weights = {name: x.double() for name, x in mixer.state_dict().items()}
    x = hidden_BTE.double()
    q, k, v = (
        silu(convolved(x @ weights[f"{name}_proj.weight"].T, weights[f"{name}_conv1d.weight"][:, 0])) for name in "qkv"
    )
    q, k, v = (y.unflatten(-1, (mixer.num_heads, -1)) for y in (q, k, v))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    beta = (x @ weights["b_proj.weight"].T).sigmoid()
    step = (x @ weights["a_proj.weight"].T + weights["dt_bias"]).exp().log1p()
    decay = (-weights["A_log"].exp() * step).exp()
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    S = torch.zeros(x.shape[0], mixer.num_heads, value_dim, key_dim, dtype=torch.float64)  # V × K, as in the paper
    outs = []
    for t in range(x.shape[1]):
        k_t, v_t, b_t = k[:, t, :, :, None], v[:, t, :, :, None], beta[:, t, :, None, None]
        erase = torch.eye(key_dim, dtype=torch.float64) - b_t * (k_t @ k_t.mT)
        S = decay[:, t, :, None, None] * (S @ erase) + b_t * (v_t @ k_t.mT)
        outs.append((S @ q[:, t, :, :, None])[..., 0] / math.sqrt(key_dim))
    out = torch.stack(outs, dim=1)
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights["o_norm.weight"]
    gate = silu(x @ weights["g_proj.weight"].T).unflatten(-1, (mixer.num_heads, -1))
    return (out * gate).flatten(-2) @ weights["o_proj.weight"].T


@pytest.mark.parametrize("fields", [{}, {"expand_k": 1, "expand_v": 1, "conv_size": 2}], ids=str)
def test_the_mixer_is_the_recurrence_of_the_paper(fields):
    mixer = small("gated_delta_net", **fields).model.layers[0].attn
    with torch.no_grad():
        mixer.o_norm.weight.uniform_(0.5, 2)
        hidden = torch.randn(2, 75, 32)
        assert relative_error(mixer(hidden)[0], one_step_per_token(mixer, hidden)) < 2e-5


def test_the_forget_gate_has_an_effect():
    mixer = small("gated_delta_net").model.layers[0].attn
    with torch.no_grad():
        hidden = torch.randn(2, 75, 32)
        before = mixer(hidden)[0]
        mixer.A_log.sub_(20)
        assert relative_error(mixer(hidden)[0], before) > 1e-2


def test_initial_weights_and_weight_decay():
    model = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(vocab_size=500, hidden_size=256, num_hidden_layers=4))
    mixers = [block.attn for block in model.model.layers]
    assert mixers[0].q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    A = torch.cat([mixer.A_log.exp() for mixer in mixers])
    assert A.min() >= 1 and A.max() <= 16 and A.std() > 2
    steps = torch.cat([torch.nn.functional.softplus(mixer.dt_bias) for mixer in mixers])
    assert steps.min() >= 0.99e-3 and steps.max() <= 0.101
    undecayed = undecayed_parameters(model, TrainConfig(max_tokens=1, grad_acc_tokens=1))
    assert {f"model.layers.0.attn.{name}" for name in ("A_log", "dt_bias", "o_norm.weight")} <= undecayed
    assert not any("proj" in name or "conv" in name for name in undecayed)


def test_flops_are_those_pytorch_counts():
    model = small("gated_delta_net")
    # PyTorch does not count the triangular systems: 64 tokens of a chunk times K + V right sides.
    uncounted = 2 * 64 * (model.config.key_size + model.config.value_size)
    assert model.config.flops_per_token(256, training=False) - uncounted == counted_flops_per_token(model)


@pytest.mark.parametrize("fields, key", [({"num_heads": 5}, "expand_k"), ({"expand_v": 0.03125}, "expand_v")])
def test_options_that_do_not_fit_are_refused(fields, key):
    with pytest.raises(ValueError, match=f"{key} · hidden_size is .* must be a multiple of num_heads"):
        small("gated_delta_net", **fields)


def test_the_documentation_shows_the_code_as_it_is():
    page = section((ROOT / "docs/extend.md").read_text(), "The parts of a mixer")
    model = ROOT / "src/forgetting_transformer/model"
    sources = [model / f"mixers/{name}.py" for name in ("delta_net", "gated_delta_net")]
    code = {line.strip() for source in sources for line in source.read_text().splitlines()}
    shown = blocks(page, "python")
    assert len(shown) > 5
    for line in "".join(shown).splitlines():
        assert not line.strip() or line.strip() in code, line
