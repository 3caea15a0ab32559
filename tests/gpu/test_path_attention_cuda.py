"""PaTH attention on CUDA, in PyTorch and with the kernels of FLA, against float64."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import backends, path_attention_fla
from forgetting_transformer.ops.path_attention import path_attention, path_attention_reference


def make_inputs(seed: int, length: int, dim: int, value_dim: int, dtype: torch.dtype, gate: float) -> list[Tensor]:
    """q, k, v and w in a dtype, β and log gates in float32, and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, length, 3, *shape, generator=generator, device="cuda")

    sequences = [x.to(dtype) for x in (normal(dim), normal(dim), normal(value_dim), F.normalize(normal(dim), dim=-1))]
    return [*sequences, 2 * normal().sigmoid(), F.logsigmoid(normal() + gate), normal(value_dim).bfloat16()]


def results(function, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients."""
    *inputs, d_out = inputs
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def expect(function, inputs: list[Tensor], tolerance: float) -> list[Tensor]:
    got = results(function, inputs)
    scale = inputs[0].shape[-1] ** -0.5
    want = results(lambda *x: path_attention_reference(*x, scale), [x.double() for x in inputs])
    for name, a, b in zip("oqkvwbf", got, want, strict=True):
        error, size = (a - b).norm().item(), b.norm().item()
        assert error <= tolerance * (size + 1e-3), f"{name} of {tuple(inputs[0].shape)}: {error:.1e} of {size:.1e}"
    return got


def test_in_pytorch_it_is_the_definition_and_has_the_same_bits_twice(poisoned):
    for seed in range(12):
        draw = random.Random(seed)
        length, dim, value_dim = draw.choice([1, 63, 64, 130, 300]), draw.choice([32, 64, 128]), draw.choice([64, 96])
        dtype, tolerance = draw.choice([(torch.float32, 5e-5), (torch.bfloat16, 1e-2)])
        inputs = make_inputs(seed, length, dim, value_dim, dtype, draw.choice([0, 5]))
        if draw.random() < 0.5:
            inputs[5] = inputs[5].masked_fill(torch.rand_like(inputs[5]) < 0.02, -torch.inf)

        def attend(*x):
            return path_attention(*x)[0]

        got = expect(attend, inputs, tolerance)
        assert all(torch.equal(a, b) for a, b in zip(got, results(attend, inputs), strict=True))


def test_kernels_of_fla_agree_with_float64(poisoned):
    """Sequences shorter and longer than the 512 tokens that kernels take at a time."""
    pytest.importorskip("fla.ops")
    if not path_attention_fla.serves(64, 64, torch.bfloat16, 0):
        pytest.skip("FLA does not serve this GPU")
    for length in (1, 63, 200, 512, 777, 1160, 2048):
        inputs = make_inputs(length, length, 64, 64, torch.bfloat16, length % 6)
        inputs[3] = inputs[3].float()
        expect(lambda *x: path_attention(*x, has_resets=False)[0], inputs, 2e-2)
    assert backends.is_usable("path_attention", backends.FLA)
