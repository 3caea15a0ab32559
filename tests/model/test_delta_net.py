"""DeltaNet computes its recurrence with every option, and starts as the paper's models did."""

import math

import pytest
import torch
from torch import Tensor

from forgetting_transformer.model import DeltaNetConfig, DeltaNetForCausalLM
from forgetting_transformer.ops.layers.norm import l2_norm
from forgetting_transformer.training.config import TrainConfig
from forgetting_transformer.training.optimization.parameter_groups import undecayed_parameters
from tests.model.small_models import counted_flops_per_token, small


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def convolved(x_BTC: Tensor, taps_CW: Tensor) -> Tensor:
    width = taps_CW.shape[1]
    padded = torch.cat((torch.zeros_like(x_BTC[:, : width - 1]), x_BTC), dim=1)
    return sum(padded[:, w : w + x_BTC.shape[1]] * taps_CW[:, w] for w in range(width))


def one_step_per_token(mixer, hidden_BTE: Tensor) -> Tensor:
    """The mixer as the paper writes it, head by head and token by token, in float64."""
    weights = {name: x.double() for name, x in mixer.state_dict().items()}
    x = hidden_BTE.double()
    q, k, v = (x @ weights[f"{name}_proj.weight"].T for name in "qkv")
    q, k, v = (
        silu(convolved(y, weights[f"{name}_conv1d.weight"][:, 0])) for name, y in zip("qkv", (q, k, v), strict=True)
    )
    q, k, v = (y.unflatten(-1, (mixer.num_heads, -1)) for y in (q, k, v))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    beta = (x @ weights["b_proj.weight"].T).sigmoid()
    S = torch.zeros(x.shape[0], mixer.num_heads, k.shape[-1], v.shape[-1], dtype=torch.float64)
    outs = []
    for t in range(x.shape[1]):
        old = torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t].double(), k[:, t], v[:, t] - old)
        outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / math.sqrt(k.shape[-1]))
    out = torch.stack(outs, dim=1)
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights["o_norm.weight"]
    if "g_proj.weight" in weights:
        out = out * silu(x @ weights["g_proj.weight"].T).unflatten(-1, (mixer.num_heads, -1))
    return out.flatten(-2) @ weights["o_proj.weight"].T


@pytest.mark.parametrize("fields", [{}, {"use_gate": True}, {"expand_k": 0.5, "expand_v": 2, "conv_size": 2}], ids=str)
def test_the_mixer_is_the_recurrence_of_the_paper(fields):
    mixer = small("delta_net", **fields).model.layers[0].attn
    with torch.no_grad():
        mixer.o_norm.weight.uniform_(0.5, 2)
        mixer.b_proj.weight.mul_(10)
        hidden = torch.randn(2, 75, 32)
        assert relative_error(mixer(hidden)[0], one_step_per_token(mixer, hidden)) < 2e-5


def test_l2_norm_of_zeros_is_zero_and_of_others_has_length_1():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(l2_norm(x), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    assert l2_norm(x.bfloat16()).dtype == torch.bfloat16


def test_initial_weights_follow_the_papers_laws():
    model = DeltaNetForCausalLM(DeltaNetConfig(vocab_size=1000, hidden_size=512, num_heads=64, num_hidden_layers=4))
    block = model.model.layers[1]
    for name in "qkvbo":
        weight = block.attn.get_submodule(f"{name}_proj").weight
        assert weight.std().item() == pytest.approx(2**-2.5 * math.sqrt(2 / sum(weight.shape)), rel=0.03)
    for name in "qkv":
        weight = block.attn.get_submodule(f"{name}_conv1d").weight
        assert weight.shape == (512, 1, 4) and weight.abs().max() <= 0.5
        assert weight.std().item() == pytest.approx(0.289, rel=0.05)
    assert block.mlp.gate_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)


SIZES = {  # hidden, layers, heads: parameters without the input embedding
    (768, 12, 6): 123_718_656,
    (1024, 24, 8): 360_289_280,
    (1536, 24, 12): 757_635_072,
}


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_are_the_papers(size):
    hidden, layers, heads = size
    config = DeltaNetConfig(vocab_size=50257, hidden_size=hidden, num_hidden_layers=layers, num_heads=heads)
    with torch.device("meta"):
        model = DeltaNetForCausalLM(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(sizes.values()) - 50257 * hidden == SIZES[size]
    if hidden == 1536:
        undecayed = undecayed_parameters(model, TrainConfig(max_tokens=1, grad_acc_tokens=1))
        assert sum(sizes[name] for name in undecayed) == 78_336


@pytest.mark.parametrize("fields", [{}, {"use_gate": True, "expand_v": 2}])
def test_flops_are_those_pytorch_counts(fields):
    model = small("delta_net", **fields)
    # PyTorch does not count the triangular systems: 64 tokens of a chunk times K + V right sides.
    uncounted = 2 * 64 * (model.config.key_size + model.config.value_size)
    assert model.config.flops_per_token(256, training=False) - uncounted == counted_flops_per_token(model)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_heads": 3}, r"expand_k · hidden_size is 1 · 32 = 32; it must be a multiple of num_heads = 3"),
        ({"expand_v": 0.03125}, r"expand_v · hidden_size is 0.03125 · 32 = 1"),
        ({"use_short_conv": False}, "use_short_conv is False; True is the one choice"),
        ({"qk_norm": "sum"}, "qk_norm is 'sum'; 'l2' is the one choice"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_options_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        small("delta_net", **fields)
