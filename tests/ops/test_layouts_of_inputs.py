"""Operators get their inputs as compiled code lays them out: rows padded, axes reordered, 2³¹ elements apart.

TorchInductor may do so because the operators say that they read any strides (`ops/compiling.py`); a `.contiguous()`
before the call does not keep it from that. And activation checkpointing hands out each saved tensor once. No GPU is
needed: kernels run in Triton's interpreter.
"""

import pytest

pytest.importorskip("triton")
from tests.ops.interpreter import interpret

pytestmark = pytest.mark.slow

#: How each operator is called, and the shapes of the inputs with gradients, of B sequences of T tokens.
CALLS = {
    "gated norm": (
        "lambda x, g, w: norm_triton.normalise(x, g, w, 3, False, True, 1e-6)",
        "(B, T, 24), (B, T, 24), (24,)",
    ),
    "token shift and norm": (
        "lambda y, s, p, w: shift_norm_triton.shift_and_normalise(y, s, p, starts, w, 3, 1e-6)",
        "(B, T, 24), (B, T, 3), (B, 24), (8,)",
    ),
    "residual norm": (
        "lambda x, y, w: residual_norm_triton.ResidualNorm.apply(x, y, w, 1e-6, torch.float32, False)",
        "(B, T, 24), (B, T, 24), (24,)",
    ),
    "SwiGLU": ("lambda h: swiglu_triton.gated(h)", "(B, T, 24),"),
    "short convolution": (
        "lambda x, w, b, p: short_convolution_triton.convolve(x, w, b, p, position, 2, 1e-6)[0]",
        "(B, T, 24), (24, 1, 4), (24,), (B, 24, 3)",
    ),
    "selective scan": (
        "lambda x, dt, a, b, c, d, bias, h: scan_triton._forward(x, dt, -a.exp(), b, c, d, bias, starts.char(), h)[0]",
        "(B, T, 8), (B, T, 8), (8, 16), (B, T, 16), (B, T, 16), (8,), (8,), (B, 8, 16)",
    ),
    "SSD": (
        "lambda q, k, v, f, s, d, h: ssd.ssd(q, k, v, F.logsigmoid(f), F.softplus(s), d, h, document, 1.0)[0]",
        "(B, T, 1, 16), (B, T, 1, 16), (B, T, 2, 16), (B, T, 2), (B, T, 2), (2,), (B, 2, 16, 16)",
    ),
    "convolution and SSD": (
        "lambda x, w, f, s: convolved_ssd.convolved_ssd(x, w, None, None, F.logsigmoid(f), F.softplus(s), None, None,"
        " position, document, 1, 16, 1.0)[0]",
        "(B, T, 64), (64, 1, 4), (B, T, 2), (B, T, 2)",
    ),
    "forgetting attention": (
        "lambda q, k, v, f: attend(q, k, v, F.logsigmoid(f), first_key, 0.25, torch.full((B, 2), -10.0), True)[0]",
        "(B, 2, T, 16), (B, 1, T, 16), (B, 1, T, 16), (B, 2, T)",
    ),
    "decoding": (
        "lambda q, k, v, f: torch.ops.forgetting_transformer.forgetting_attention_decode(q, k, v,"
        " F.logsigmoid(f).double().cumsum(-1), torch.full((B, 2), -10.0), None, None, 0.25)[0]",
        "(B, 2, 1, 16), (B, 1, T, 16), (B, 1, T, 16), (B, 2, T)",
    ),
}

LAID = """
import mmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
import forgetting_transformer.ops.forgetting_attention.decode_triton
from forgetting_transformer.ops.layers import norm_triton, residual_norm_triton, shift_norm_triton
from forgetting_transformer.ops.layers import short_convolution_triton, swiglu_triton
from forgetting_transformer.ops.recurrence import convolved_ssd, scan_triton, ssd

def far(x, axis, apart):
    "A copy of x whose parts along an axis are so many elements from each other; only pages that are touched exist."
    size = apart * x.shape[axis] * x.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=x.dtype)
    strides = [*x.movedim(axis, 0)[0].contiguous().stride()]
    strides.insert(axis, apart)
    return memory.as_strided(x.shape, strides).copy_(x)

class Laid(TorchDispatchMode):
    "Lays inputs of operators out; what an operator returned lies as it says, also when another reads it."

    def __init__(self, how):
        super().__init__()
        self.how, self.results, self.calls, self.count = how, set(), {}, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        ours = op.namespace == "forgetting_transformer"
        if ours:
            args = [self.lay(x) if isinstance(x, torch.Tensor) else x for x in args]
            self.calls[op] = args
        out = op(*args, **(kwargs or {}))
        if ours:
            self.results |= {x.data_ptr() for x in (out if isinstance(out, (tuple, list)) else (out,))}
        return out

    def lay(self, x):
        if x.data_ptr() in self.results or x.dim() == 0:
            return x
        self.count += 1
        if self.how == "padded":
            if x.dim() == 1:
                return torch.stack((x, -x), 1)[:, 0]
            wide = torch.cat((x, x.flip(-1)), -1)
            if x.dtype == torch.float32 and x.shape[0] == B:
                wide = far(wide, 0, 2**31 + 8)  # 32 bits hold this in units of 8 elements, not in elements
            return wide[..., : x.shape[-1]]
        if self.how == "reordered":
            axes = list(reversed(range(x.dim())))
            return x.permute(axes).contiguous().permute(axes)
        # Tokens far apart: the last one begins behind 2³¹ elements.
        apart = 2**31 // (T - 1) + 1
        return far(x, x.shape.index(T), apart) if x.is_floating_point() and x.dim() > 1 and T in x.shape else x

first_token = T // 3 + torch.arange(B)[:, None]  # tokens of a document
first_key = (torch.arange(T) // first_token * first_token).int()
starts = first_key.diff(prepend=first_key[:, :1]) != 0
document = starts.cumsum(1, dtype=torch.int32)
# The first document goes on from what stood before.
position = torch.where(first_key == 0, torch.arange(T) + 4, torch.arange(T) - first_key).int()

# Tiles in which few tokens are several programs.
scan_triton.CHUNK = 8
short_convolution_triton._STEPS, short_convolution_triton._TILES = 2, {"forward": 128, "backward": 64}
shift_norm_triton._STEPS, shift_norm_triton._TILES = 4, {"forward": 64, "backward": 64}

def results(call):
    out = call(*leaves)
    return [out.detach(), *(torch.autograd.grad(out.square().sum(), leaves) if out.requires_grad else ())]
"""


@pytest.mark.parametrize("name", CALLS)
def test_operators_read_inputs_however_they_lie_and_may_be_checkpointed(name):
    """Bitwise the same outputs and gradients. Fake tensors and autograd are as `opcheck` wants them.

    Padded rows of float32 are in sequences that lie far apart.
    """
    call, shapes = CALLS[name]
    # Its kernels are those of two others.
    layouts = ("reordered", "padded")[: 1 if name == "convolution and SSD" else None]
    interpret(
        f"""
B, T = 2, 9
{LAID}
leaves = [torch.randn(shape, requires_grad={name != "decoding"}) for shape in [{shapes}]]
call = {call}
want = results(call)
assert all(x.isfinite().all() and x.abs().sum() > 0 for x in want)
calls = {{}}
for how in {layouts}:
    with Laid(how) as laid:
        got = results(call if how == "padded" else lambda *leaves: checkpoint(call, *leaves, use_reentrant=False))
    assert laid.count > 1
    calls |= {{op: args for op, args in laid.calls.items() if how == "reordered" and "backward" not in str(op)}}
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b), (how, tuple(a.shape))
for op, args in calls.items():
    args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    args = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
"""
    )


#: Tokens of which the last one begins a tile, of kernels whose tiles are no option here.
TOKENS = {"short convolution": 65, "SSD": 65, "forgetting attention": 129, "decoding": 65}


@pytest.mark.parametrize("name", [name for name in CALLS if name != "convolution and SSD"])
def test_offsets_do_not_wrap_behind_2_31_elements(name):
    """Tokens lie so far apart as if they were slices of something very wide."""
    call, shapes = CALLS[name]
    interpret(
        f"""
B, T = 1, {TOKENS.get(name, 17)}
{LAID}
leaves = [torch.randn(shape, requires_grad={name != "decoding"}) for shape in [{shapes}]]
call = {call}
want = results(call)
with Laid("tokens far apart"):
    got = results(call)
assert all(torch.isfinite(a).all() and torch.equal(a, b) for a, b in zip(got, want, strict=True))
"""
    )
