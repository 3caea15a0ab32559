"""PaTH-FoX computes its attention, and starts as it should."""

import math

import pytest
import torch
from torch import Tensor

from forgetting_transformer.model import PathFoxConfig, PathFoxForCausalLM
from forgetting_transformer.model.mixers import path_fox
from forgetting_transformer.training.config import TrainConfig
from forgetting_transformer.training.optimization.parameter_groups import undecayed_parameters
from tests.model.small_models import counted_flops_per_token, small
from tests.model.test_delta_net import convolved, relative_error, silu


def one_key_per_step(mixer, hidden_BTE: Tensor) -> Tensor:
    """The mixer as the paper writes it, pair by pair from near to far, in float64."""
    weights = {name: x.double() for name, x in mixer.state_dict().items()}
    x = hidden_BTE.double()
    q, k, v = (x @ weights[f"{name}_proj.weight"].T for name in "qkv")
    w = silu(
        convolved(x @ (weights["w_b_proj.weight"] @ weights["w_a_proj.weight"]).T, weights["w_conv1d.weight"][:, 0])
    )
    q, k, v, w = (y.unflatten(-1, (mixer.num_heads, -1)) for y in (q, k, v, w))
    w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta, fgate = (
        (x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]).sigmoid() for name in ("b_proj", "fgate_proj")
    )
    out = torch.zeros_like(v)
    for b in range(x.shape[0]):
        for h in range(mixer.num_heads):
            for i in range(x.shape[1]):
                carried, decay, scores = q[b, i, h], 0.0, []
                for j in range(i, -1, -1):
                    scores.append(carried @ k[b, j, h] / math.sqrt(q.shape[-1]) + decay)
                    carried = carried - 2 * beta[b, j, h] * (carried @ w[b, j, h]) * w[b, j, h]
                    decay = decay + fgate[b, j, h].log()
                out[b, i, h] = torch.stack(scores).softmax(0) @ v[b, : i + 1, h].flip(0)
    return out.flatten(-2) @ weights["o_proj.weight"].T


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"num_heads": 4, "w_rank": 3, "conv_size": 2}], ids=str)
def test_the_mixer_is_the_attention_of_the_paper(fields):
    mixer = small("path_fox", **fields).model.layers[0].attn
    with torch.no_grad():
        mixer.b_proj.bias.uniform_(-1, 1)
        mixer.fgate_proj.bias.uniform_(-1, 1)
        hidden = torch.randn(2, 75, 32)
        want = one_key_per_step(mixer, hidden)
        assert relative_error(mixer(hidden)[0], want) < 2e-5
        assert relative_error(mixer.double()(hidden.double())[0], want) < 1e-7


def test_initial_weights_and_weight_decay():
    model = PathFoxForCausalLM(PathFoxConfig(vocab_size=500, hidden_size=256, num_hidden_layers=2, num_heads=4))
    mixer = model.model.layers[0].attn
    assert mixer.w_a_proj.weight.shape == (32, 256)
    assert mixer.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not mixer.b_proj.bias.any() and not mixer.fgate_proj.bias.any()
    undecayed = undecayed_parameters(model, TrainConfig(max_tokens=1, grad_acc_tokens=1))
    assert {f"model.layers.0.attn.{name}.bias" for name in ("b_proj", "fgate_proj")} <= undecayed
    assert not any("weight" in name and ("proj" in name or "conv" in name) for name in undecayed)


def test_flops_are_those_pytorch_counts():
    model = small("path_fox")
    uncounted = model.config.num_heads * 64**2 * model.config.num_hidden_layers  # the triangular systems
    assert model.config.flops_per_token(256, training=False) - uncounted == counted_flops_per_token(model)


def test_nothing_is_made_for_a_cache_that_is_not_there(monkeypatch):
    """Training would carry every key to the end of the sequence for nothing."""
    asked = []
    original = path_fox.path_attention

    def recorded(*args, **options):
        asked.append(options["returns_past"])
        return original(*args, **options)

    monkeypatch.setattr(path_fox, "path_attention", recorded)
    mixer = small("path_fox").model.layers[0].attn
    mixer(torch.randn(1, 5, 32))
    mixer(torch.randn(1, 5, 32), None, mixer.new_cache())
    assert asked == [False, True]


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="hidden_size is 32; it must be a multiple of num_heads = 5"):
        small("path_fox", num_heads=5)
