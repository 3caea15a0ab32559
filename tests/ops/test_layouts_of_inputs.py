"""Operators get their inputs as compiled code lays them out, which pads rows and reorders axes. No GPU is needed.

TorchInductor may do so because the operators say that they read any strides (`ops/compiling.py`); a `.contiguous()`
before the call does not keep it from that. And activation checkpointing hands out each saved tensor once.
"""

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
        "lambda y, s, p, w: shift_norm_triton.shift_and_normalise(y, s, p, starts, w, 3, 1e-6)",
        [(2, 9, 24), (2, 9, 3), (2, 24), (8,)],
    ),
    "residual norm": (
        "lambda x, y, w: residual_norm_triton.ResidualNorm.apply(x, y, w, 1e-6, torch.float32, False)",
        [(2, 7, 24), (2, 7, 24), (24,)],
    ),
    "SwiGLU": ("lambda h: swiglu_triton.gated(h)", [(2, 7, 24)]),
    "short convolution": (
        "lambda x, w, p: short_convolution_triton.convolve(x, w, None, p, position, 0, 1e-6)[0]",
        [(2, 9, 24), (24, 1, 4), (2, 24, 3)],
    ),
    "selective scan": (
        "lambda x, dt, a, b, c, d, h: scan_triton._forward(x, F.softplus(dt), -a.exp(), b, c, d, None, starts.char(),"
        " h)[0]",
        [(2, 9, 8), (2, 9, 8), (8, 16), (2, 9, 16), (2, 9, 16), (8,), (2, 8, 16)],
    ),
    "SSD": (
        "lambda q, k, v, f, s, h: ssd.ssd(q, k, v, F.logsigmoid(f), F.softplus(s), None, h, document, 1.0)[0]",
        [(2, 9, 1, 16), (2, 9, 1, 16), (2, 9, 2, 16), (2, 9, 2), (2, 9, 2), (2, 2, 16, 16)],
    ),
    "convolution and SSD": (
        "lambda x, w, f, s: convolved_ssd.convolved_ssd(x, w, None, None, F.logsigmoid(f), F.softplus(s), None, None,"
        " position, document, 1, 16, 1.0)[0]",
        [(2, 9, 64), (64, 1, 4), (2, 9, 2), (2, 9, 2)],
    ),
    "forgetting attention": (
        "lambda q, k, v, f: attend(q, k, v, F.logsigmoid(f), first_key, 0.25, torch.full((2, 2), -10.0), True)[0]",
        [(2, 2, 9, 16), (2, 1, 9, 16), (2, 1, 9, 16), (2, 2, 9)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_operators_read_inputs_however_they_lie_and_may_be_checkpointed(name):
    """Bitwise the same outputs and gradients. What an operator returned lies as it says, also when another reads it."""
    call, shapes = CALLS[name]
    interpret(
        f"""
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from forgetting_transformer.ops.layers import norm_triton, residual_norm_triton, shift_norm_triton
from forgetting_transformer.ops.layers import short_convolution_triton, swiglu_triton
from forgetting_transformer.ops.recurrence import convolved_ssd, scan_triton, ssd

class Laid(TorchDispatchMode):
    def __init__(self, how):
        super().__init__()
        self.how, self.results, self.count = how, set(), 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        ours = op.namespace == "forgetting_transformer"
        if ours:
            args = [self.lay(x) if isinstance(x, torch.Tensor) and x.dim() > 1 else x for x in args]
        out = op(*args, **(kwargs or {{}}))
        if ours:
            self.results |= {{x.data_ptr() for x in (out if isinstance(out, (tuple, list)) else (out,))}}
        return out

    def lay(self, x):
        if x.data_ptr() in self.results:
            return x
        self.count += 1
        if self.how == "padded":
            return torch.cat((x, x.flip(-1)), -1)[..., : x.shape[-1]]
        axes = list(reversed(range(x.dim())))
        return x.permute(axes).contiguous().permute(axes)

first_key = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5, 8], [0, 1, 1, 1, 1, 5, 5, 7, 7]], dtype=torch.int32)
starts = first_key.diff(prepend=first_key[:, :1]) != 0
document = starts.cumsum(1, dtype=torch.int32)
# The first document goes on from what stood before.
position = torch.where(first_key == 0, torch.arange(9) + 4, torch.arange(9) - first_key).int()
leaves = [torch.randn(shape, requires_grad=True) for shape in {shapes}]
call = {call}

def results(call):
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

want = results(call)
assert all(x.isfinite().all() and x.abs().sum() > 0 for x in want)
for how in ("padded", "reordered"):
    with Laid(how) as laid:
        got = results(call)
    assert laid.count > 1
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b), (how, tuple(a.shape))
got = results(lambda *leaves: checkpoint(call, *leaves, use_reentrant=False))
assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
"""
    )
