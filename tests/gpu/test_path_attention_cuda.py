"""PaTH attention on CUDA, in PyTorch and with the kernels of FLA, against float64."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import backends, path_attention_fla
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


@pytest.mark.parametrize("seed", range(8))
def test_kernels_of_fla(seed, poisoned):
    """Outputs and all gradients, of sequences shorter and longer than the 512 tokens that kernels take at a time."""
    pytest.importorskip("fla.ops")
    draw = random.Random(seed)
    length = [1, 63, 200, 512, 777, 1024, 1160, 2048][seed]
    dim, value_dim, dtype, gate = 64, 64, torch.bfloat16, draw.choice([0, 5])
    if not path_attention_fla.serves(dim, value_dim, dtype, 0):
        pytest.skip("FLA does not serve this GPU")
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, length, 3, *shape, generator=generator, device="cuda")

    sequences = [normal(dim).to(dtype), normal(dim).to(dtype), normal(value_dim).to(dtype)]
    gates = [F.normalize(normal(dim), dim=-1), 2 * normal().sigmoid(), F.logsigmoid(normal() + gate)]
    d_out = normal(value_dim).to(dtype)

    def results(inputs: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out, _ = path_attention(*leaves, has_resets=False)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]

    got, want = results([*sequences, *gates]), results([x.double() for x in (*sequences, *gates)])
    assert backends.is_usable("path_attention", backends.FLA)
    for name, a, b in zip("oqkvwbf", got, want, strict=True):
        assert (a - b).norm() <= 2e-2 * (b.norm() + 1e-3), name
