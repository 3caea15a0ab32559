"""Kernels' gradients under activation checkpointing, which hands out each saved tensor once. No GPU is needed."""

import pytest

pytest.importorskip("triton")
from tests.ops.interpreter import interpret

#: How each operator is called, and the shapes of the inputs with gradients.
CALLS = {
    "gated norm": (
        "lambda x, g, w: norm_triton.normalise(x, g, w, 3, False, True, 1e-6)",
        [(2, 7, 24), (2, 7, 24), (24,)],
    ),
    "norm": ("lambda x, w: norm_triton.normalise(x, None, w, 3, False, True, 1e-6)", [(2, 7, 24), (24,)]),
    "token shift and norm": (
        "lambda y, s, p, w: shift_norm_triton.shift_and_normalise(y, s, p, None, w, 3, 1e-6)",
        [(2, 7, 24), (2, 7, 3), (2, 24), (8,)],
    ),
    "residual norm": (
        "lambda x, y, w: residual_norm_triton.ResidualNorm.apply(x, y, w, 1e-6, torch.float32, False)",
        [(2, 7, 24), (2, 7, 24), (24,)],
    ),
    "SwiGLU": ("lambda h: swiglu_triton.gated(h)", [(2, 7, 24)]),
    "short convolution": (
        "lambda x, w: short_convolution_triton.convolve(x, w, None, None, None, True, 0, 1e-6)[0]",
        [(2, 7, 24), (24, 1, 4)],
    ),
    "selective scan": (
        "lambda x, dt, a, b, c, d: scan_triton._forward(x, dt, -a.exp(), b, c, d, None, None, None)[0]",
        [(1, 9, 8), (1, 9, 8), (8, 16), (1, 9, 16), (1, 9, 16), (8,)],
    ),
    "SSD": (
        "lambda q, k, v, f, s, d: ssd.ssd(q, k, v, F.logsigmoid(f), F.softplus(s), d, None, None, 1.0)[0]",
        [(1, 9, 1, 16), (1, 9, 1, 16), (1, 9, 2, 16), (1, 9, 2), (1, 9, 2), (2,)],
    ),
    "convolution and SSD": (
        "lambda x, w, f, s: convolved_ssd.convolved_ssd(x, w, None, None, F.logsigmoid(f), F.softplus(s), None, None,"
        " None, None, 1, 16, 1.0)[0]",
        [(1, 9, 64), (64, 1, 4), (1, 9, 2), (1, 9, 2)],
    ),
    "forgetting attention": (
        "lambda q, k, v, f: kernel.attend(q, k, v, F.logsigmoid(f), None, None, False, 0.25, True)[0]",
        [(1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 9)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_checkpointed_gradients_are_the_plain_ones(name):
    call, shapes = CALLS[name]
    interpret(
        f"""
from torch.utils.checkpoint import checkpoint
from forgetting_transformer.ops import norm_triton, residual_norm_triton, shift_norm_triton
from forgetting_transformer.ops import short_convolution_triton, swiglu_triton
from forgetting_transformer.ops.recurrence import convolved_ssd, scan_triton, ssd

leaves = [torch.randn(shape, requires_grad=True) for shape in {shapes}]
call = {call}
want = torch.autograd.grad(call(*leaves).square().sum(), leaves)
got = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False).square().sum(), leaves)
for a, b in zip(got, want, strict=True):
    assert torch.equal(a, b) and a.isfinite().all() and a.abs().sum() > 0
"""
    )
