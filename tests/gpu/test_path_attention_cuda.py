"""PaTH attention on CUDA, where PyTorch computes it too, against the definition in float64."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops.path_attention import path_attention, path_attention_reference


@pytest.mark.parametrize("seed", range(12))
def test_path_attention(seed, poisoned):
    """Outputs and all gradients, and the same bits a second time."""
    draw = random.Random(seed)
    length, dim, value_dim = draw.choice([1, 63, 64, 130, 300]), draw.choice([32, 64, 128]), draw.choice([64, 96])
    dtype, tolerance = draw.choice([(torch.float32, 5e-5), (torch.bfloat16, 1e-2)])
    gate, resets = draw.choice([0, 5]), draw.random() < 0.5
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, length, 3, *shape, generator=generator, device="cuda")

    log_fgate = F.logsigmoid(normal() + gate)
    if resets:
        log_fgate = log_fgate.masked_fill(normal() > 2, -torch.inf)
    sequences = [x.to(dtype) for x in (normal(dim), normal(dim), normal(value_dim), F.normalize(normal(dim), dim=-1))]
    inputs = [*sequences, 2 * normal().sigmoid(), log_fgate]
    d_out = normal(value_dim).bfloat16()

    def results(function, inputs: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]

    got = results(lambda *x: path_attention(*x)[0], inputs)
    want = results(lambda *x: path_attention_reference(*x, dim**-0.5), [x.double() for x in inputs])
    for name, a, b in zip("oqkvwbf", got, want, strict=True):
        assert (a - b).norm() <= tolerance * (b.norm() + 1e-3), name
    again = results(lambda *x: path_attention(*x)[0], inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
