"""Triton kernels on tensors that reach further than 2³¹ elements, in Triton's interpreter: offsets must not wrap.

Rows lie APART elements from each other, as if they were slices of something very wide, so that few of them do it. Only
the pages that are touched exist. Results must be bitwise those of the same numbers side by side.
"""

import pytest

pytest.importorskip("triton")
from tests.ops.interpreter import interpret

pytestmark = pytest.mark.slow

FAR = """
import mmap

ROWS, APART = 140, 2**24  # the last rows begin behind 2³¹ elements

def far(x, axis=1):
    "A copy of x whose positions along an axis are APART elements from each other."
    size = APART * x.shape[axis] * x.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=x.dtype)
    others = x.movedim(axis, 0)[0].contiguous()
    strides = [*others.stride()]
    strides.insert(axis, APART)
    copy = memory.as_strided(x.shape, strides)
    assert copy.narrow(axis, x.shape[axis] - 1, 1).storage_offset() > 2**31
    return copy.copy_(x)

def same(function, given, axes):
    "Bitwise equal results for inputs side by side and far apart; axes: of each input, None to leave it."
    apart = [x if axis is None else far(x, axis) for x, axis in zip(given, axes, strict=True)]
    for near, away in zip(function(*given), function(*apart), strict=True):
        assert torch.isfinite(near).all() and torch.equal(near, away)
"""


def test_attention():
    """Gates too, whose offset in a row is a stride of its own."""
    interpret(
        FAR
        + """
def forward_and_backward(q, k, v, log_fgate, d_out):
    bounds = kernel.find_bounds(q, k, None, 0.25)
    decay = kernel.Decay(*kernel.sum_decay(log_fgate, q.shape[2], torch.full((1, 2), -10.0), *bounds, None))
    out = kernel.empty_heads_like(q)
    log_normaliser = kernel.forward(q, k, v, out, decay, None, 0.25)
    return out, log_normaliser, *kernel.backward(
        d_out, None, q, k, v, log_fgate, decay, None, out, log_normaliser, 0.25, True
    )

same(forward_and_backward, inputs(ROWS, 16, torch.float16), (2, 2, 2, 2, 2))
"""
    )


def test_decoding():
    interpret(
        FAR
        + """
from forgetting_transformer.ops.forgetting_attention import cumulative_log_fgate, decode_triton

def decode(q, k, v, running):
    return decode_triton.decode(q, k, v, running, torch.full((1, 2), -10.0), None, None, 0.25)

q, k, v, log_fgate, _ = inputs(ROWS, 16, torch.float16, queries=1)
same(decode, (q, k, v, cumulative_log_fgate(log_fgate, head_first=True)), (None, 2, 2, 2))
"""
    )


def test_layers():
    interpret(
        FAR
        + """
from forgetting_transformer.ops.layers import norm_triton, residual_norm_triton, swiglu_triton
from forgetting_transformer.ops.layers import shift_norm_triton, short_convolution_triton

def activate(h, d_out):
    return swiglu_triton.gated(h), swiglu_triton.gated_backward(d_out, h)

same(activate, [torch.randn(1, ROWS, n) for n in (12, 6)], (1, 1))

weight = torch.randn(24)

def norm_residual(x, branch, d_y, d_total):
    y, total, scale = residual_norm_triton.normalise(x, branch, weight, 1e-6, torch.float32)
    return y, total, scale, *residual_norm_triton.normalise_backward(
        d_y, d_total, total, weight, scale, torch.float32, torch.float32
    )

same(norm_residual, [torch.randn(1, ROWS, 24) for _ in range(4)], (1, 1, 1, 1))

def norm_groups(x, gate, d_y):
    arguments = x, gate, weight, 2, False, True, 1e-6
    return norm_triton.normalise(*arguments), *norm_triton.normalise_backward(d_y, *arguments)

same(norm_groups, [torch.randn(1, ROWS, 24) for _ in range(3)], (1, 1, 1))

def shift(y, logits, d_out):
    arguments = y, logits, None, None, weight, 2, 1e-6
    gradients = shift_norm_triton.shift_and_normalise_backward(d_out, *arguments)
    return shift_norm_triton.shift_and_normalise(*arguments), gradients[0], gradients[1], gradients[3]

same(shift, [torch.randn(1, ROWS, n) for n in (24, 2, 24)], (1, 1, 1))

APART = 2**31 + 8  # of sequences: 32 bits hold this in units of 8 elements, not in elements
same(shift, [torch.randn(2, 9, n).half() for n in (24, 2, 24)], (0, 0, 0))

def convolve(x, d_y):
    arguments = x, torch.ones(24, 1, 4), None, None, None, 2, 1e-6
    gradients = short_convolution_triton.convolve_backward(d_y, None, *arguments)
    return *short_convolution_triton.convolve(*arguments), *gradients[:2]

APART = 2**24
short_convolution_triton._STEPS, short_convolution_triton._TILES = 2, {"forward": 128, "backward": 64}
same(convolve, [torch.randn(1, ROWS, 24) for _ in range(2)], (1, 1))
"""
    )


def test_recurrences():
    interpret(
        FAR
        + """
from forgetting_transformer.ops.recurrence import ssd

def recur(q, k, v, log_decay, step):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, log_decay, step)]
    out, state = ssd.ssd(*leaves, None, None, None, 0.25)
    torch.autograd.backward((out, state), (torch.ones_like(out), torch.ones_like(state)))
    return out.detach(), state.detach(), *(x.grad for x in leaves)

q, k, v = (torch.randn(1, ROWS, heads, 16) for heads in (1, 1, 2))
log_decay, step = F.logsigmoid(torch.randn(1, ROWS, 2) + 2), F.softplus(torch.randn(1, ROWS, 2))
same(recur, (q, k, v, log_decay, step), (1, 1, 1, 1, 1))
"""
    )


def test_a_launch_has_room_for_a_million_tokens_and_many_rows():
    """CUDA takes 2³¹ - 1 programs along the first axis of a grid, and 65,535 along the others."""
    interpret(
        """
from forgetting_transformer.ops.layers import short_convolution_triton
from forgetting_transformer.ops.recurrence import ssd

grids = []

class Recorded:
    def __getitem__(self, grid):
        grids.append(grid)
        return lambda *given, **options: None

def many(*shape, **_):
    "A tensor that has no memory of its own."
    return torch.zeros(()).expand(*shape)

torch.empty = many
short_convolution_triton.convolution_forward_kernel = Recorded()
short_convolution_triton.convolve(many(1, 2**20, 256), torch.ones(256, 1, 4), None, None, None, 1, 1e-6)
ssd.kernels.score_kernel = ssd.kernels.state_kernel = Recorded()
q, v = many(1, 2**24, 1, 16), many(1, 2**24, 2, 16)
ssd._scores(ssd._Call.of(q, v), q, q)
k, v = many(2**16, 1, 1, 16), many(2**16, 1, 2, 16)
ssd._states(ssd._Call.of(k, v), k, v, many(1), many(1), None, None, 1.0, False)
assert len(grids) == 3 and all(max(grid) > 65535 for grid in grids)
assert all(programs <= 65535 for grid in grids for programs in grid[1:])
"""
    )
