"""Kimi Delta Attention computes its recurrence, and starts as Kimi Linear's models do."""

import math

import pytest
import torch
from torch import Tensor

from forgetting_transformer.model import KDAConfig, KDAForCausalLM
from forgetting_transformer.training.config import TrainConfig
from forgetting_transformer.training.optimization.parameter_groups import undecayed_parameters
from tests.model.small_models import counted_flops_per_token, small
from tests.model.test_delta_net import convolved, relative_error, silu


def one_step_per_token(mixer, hidden_BTE: Tensor) -> Tensor:
    """The mixer as the paper writes it, head by head and token by token, in float64."""
    weights = {name: x.double() for name, x in mixer.state_dict().items()}

    def project(x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = x @ weights[f"{name}_proj.weight"].T
        return x

    x = hidden_BTE.double()
    q, k, v = (silu(convolved(project(x, name), weights[f"{name}_conv1d.weight"][:, 0])) for name in "qkv")
    step = (project(x, "f_a", "f_b") + weights["dt_bias"]).exp().log1p()
    gate = project(x, "g_a", "g_b").sigmoid()
    q, k, v, step, gate = (y.unflatten(-1, (mixer.num_heads, -1)) for y in (q, k, v, step, gate))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    beta = project(x, "b").sigmoid()
    out = torch.zeros_like(v)
    key_dim = k.shape[-1]
    for b in range(x.shape[0]):
        for h in range(mixer.num_heads):
            S = torch.zeros(key_dim, v.shape[-1], dtype=torch.float64)
            rate = weights["A_log"][h].exp()
            for t in range(x.shape[1]):
                k_t, v_t, b_t = k[b, t, h], v[b, t, h], beta[b, t, h]
                erase = torch.eye(key_dim, dtype=torch.float64) - b_t * torch.outer(k_t, k_t)
                S = erase @ torch.diag((-rate * step[b, t, h]).exp()) @ S + b_t * torch.outer(k_t, v_t)
                out[b, t, h] = S.T @ q[b, t, h] / math.sqrt(key_dim)
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights["o_norm.weight"]
    return project((out * gate).flatten(-2), "o")


@pytest.mark.parametrize("fields", [{}, {"expand_k": 0.5, "expand_v": 2, "conv_size": 2}], ids=str)
def test_the_mixer_is_the_recurrence_of_the_paper(fields):
    mixer = small("kda", **fields).model.layers[0].attn
    with torch.no_grad():
        mixer.o_norm.weight.uniform_(0.5, 2)
        hidden = torch.randn(2, 75, 32)
        want = one_step_per_token(mixer, hidden)
        assert relative_error(mixer(hidden)[0], want) < 2e-5
        assert relative_error(mixer.double()(hidden.double())[0], want) < 1e-7


def test_gates_differ_from_channel_to_channel():
    """With one decay per head, the mean over its channels, the output is another."""
    mixer = small("kda").model.layers[0].attn
    with torch.no_grad():
        hidden = torch.randn(2, 75, 32)
        before = mixer(hidden)[0]
        bias_HK = mixer.split_heads(mixer.dt_bias)
        mixer.dt_bias.copy_(bias_HK.mean(-1, keepdim=True).expand_as(bias_HK).flatten())
        weight_HKV = mixer.f_b_proj.weight.unflatten(0, (mixer.num_heads, -1))
        mixer.f_b_proj.weight.copy_(weight_HKV.mean(1, keepdim=True).expand_as(weight_HKV).flatten(0, 1))
        assert relative_error(mixer(hidden)[0], before) > 1e-2


def test_initial_weights_and_weight_decay():
    model = KDAForCausalLM(KDAConfig(vocab_size=500, hidden_size=384, num_hidden_layers=4, num_heads=3))
    mixers = [block.attn for block in model.model.layers]
    assert mixers[0].f_b_proj.weight.shape == (384, 128)
    assert mixers[0].q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    A = torch.cat([mixer.A_log.exp() for mixer in mixers])
    assert A.min() >= 1 and A.max() <= 16 and A.std() > 2
    steps = torch.cat([torch.nn.functional.softplus(mixer.dt_bias) for mixer in mixers])
    assert steps.shape == (4 * 384,) and steps.min() >= 0.99e-3 and steps.max() <= 0.101
    undecayed = undecayed_parameters(model, TrainConfig(max_tokens=1, grad_acc_tokens=1))
    assert {f"model.layers.0.attn.{name}" for name in ("A_log", "dt_bias", "o_norm.weight")} <= undecayed
    assert not any("proj" in name or "conv" in name for name in undecayed)


def test_flops_are_those_pytorch_counts():
    config = small("kda").config
    # PyTorch does not count the triangular systems, 64 tokens of a chunk times K + V right sides, nor the products of a
    # token's query with its own key.
    uncounted = 2 * (64 * (config.key_size + config.value_size) + 2 * config.key_size)
    assert config.flops_per_token(256, training=False) - uncounted == counted_flops_per_token(small("kda"))


@pytest.mark.parametrize("fields, key", [({"num_heads": 5}, "expand_k"), ({"expand_v": 0.03125}, "expand_v")])
def test_options_that_do_not_fit_are_refused(fields, key):
    with pytest.raises(ValueError, match=f"{key} · hidden_size is .* must be a multiple of num_heads"):
        small("kda", **fields)
