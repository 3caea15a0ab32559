"""The short convolution with SiLU and L2 norms in Triton: one kernel forward, one backward, inputs read once.

Only the inputs are kept for the backward pass, which computes everything else again. Gradients of filters and biases
are sums over time: every program leaves its part, and the parts are added in a fixed order. So the same inputs give the
same bits every time.

A program works on a block of channels, a head where heads are normalised, and on groups of four neighbouring positions:
tile o of a block holds position o of every group. A filter of four taps at position o reads tiles o - 3 to o, which lie
in the same threads. So an input that four outputs share is loaded once or twice, not four times. The gradient of
position o needs what the filter gave at o to o + 3, so the backward pass walks from the end to the beginning.

Axes: `forgetting_transformer/ops/__init__.py`. P programs along time, of all sequences.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.forgetting_attention.layout import FUSED, on_device_of_first, with_whole_channels

#: Taps of the kernels. Shorter filters have zeros in front.
MAX_TAPS = 4
# Channels of a block where nothing is normalised.
_BLOCK_C = 128
# Elements of a tile, with 4 warps. The backward pass holds three times as many tiles in registers.
_TILES = {"forward": 1024, "backward": 512}
# Backward: groups of tiles of a program along time.
_STEPS = 8


@triton.jit
def _tap(weight_ptr, channel, exists, TAP: tl.constexpr, TAPS: tl.constexpr):
    """Tap TAP of four of each channel's filter `(C, TAPS)`, float32."""
    if TAP < 4 - TAPS:
        weight = tl.zeros_like(channel).to(tl.float32)
    else:
        weight = tl.load(weight_ptr + channel * TAPS + (TAP - (4 - TAPS)), mask=exists, other=0.0).to(tl.float32)
    return weight


@triton.jit
def _rows(
    x_ptr, row, x_row, previous_ptr, channel, exists, start, length, TAPS: tl.constexpr, HAS_PREVIOUS: tl.constexpr
):
    """Inputs at positions `start + row`, float32; before the sequence what came before it, or 0."""
    position = start + row
    inside = (position >= 0) & (position < length)
    x = tl.load(x_ptr + row[:, None] * x_row + channel[None, :], mask=inside[:, None] & exists[None, :], other=0.0)
    x = x.to(tl.float32)
    if HAS_PREVIOUS:
        at = position + (TAPS - 1)
        before = (position < 0) & (at >= 0)
        offset = channel[None, :] * (TAPS - 1) + at[:, None]
        x += tl.load(previous_ptr + offset, mask=before[:, None] & exists[None, :], other=0.0).to(tl.float32)
    return x


@triton.jit
def _position(position_ptr, row, start, length, HAS_DOCUMENTS: tl.constexpr):
    """Number of tokens before each, at `start + row`, in its document; anything where documents are not packed."""
    position = tl.zeros_like(row)
    if HAS_DOCUMENTS:
        inside = (start + row >= 0) & (start + row < length)
        position = tl.load(position_ptr + row, mask=inside, other=0)
    return position


@triton.jit
def _within(x, position, DISTANCE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr):
    """x of the positions whose document reaches DISTANCE tokens back, 0 of the others."""
    if HAS_DOCUMENTS:
        x = tl.where((position >= DISTANCE)[:, None], x, 0.0)
    return x


@triton.jit
def _filter(x_0, x_1, x_2, x_3, w_0, w_1, w_2, w_3, bias):
    return x_0 * w_0[None, :] + x_1 * w_1[None, :] + x_2 * w_2[None, :] + x_3 * w_3[None, :] + bias[None, :]


@triton.jit
def _filter_at(x_0, x_1, x_2, x_3, w_0, w_1, w_2, w_3, bias, position, HAS_DOCUMENTS: tl.constexpr):
    """The filter at the positions of x_3."""
    x_0, x_1 = _within(x_0, position, 3, HAS_DOCUMENTS), _within(x_1, position, 2, HAS_DOCUMENTS)
    x_2 = _within(x_2, position, 1, HAS_DOCUMENTS)
    return _filter(x_0, x_1, x_2, x_3, w_0, w_1, w_2, w_3, bias)


@triton.jit
def _store_activated(z, y_ptr, row, y_row, channel, exists, start, length, epsilon, NORM: tl.constexpr):
    z = z * tl.sigmoid(z)
    if NORM:
        z = z * tl.rsqrt(tl.sum(z * z, axis=1) + epsilon)[:, None]
    inside = start + row < length
    y_ptrs = y_ptr + row[:, None] * y_row + channel[None, :]
    tl.store(y_ptrs, z.to(y_ptr.dtype.element_ty), mask=inside[:, None] & exists[None, :])


@triton.jit
def convolution_forward_kernel(
    x_ptr, x_batch, x_row, weight_ptr, bias_ptr, bias_channels, previous_ptr, position_ptr, y_ptr, length, channels,
    epsilon, TAPS: tl.constexpr, HAS_PREVIOUS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    NORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """y of `4 · GROUPS` positions of WIDTH channels. Grid: (blocks of positions · blocks of channels, B).

    Both share an axis because the others end at 65,535 programs, which a sequence of a million tokens may need.

    x `(B, T, C)` with strides (x_batch, x_row, 1); weight `(C, TAPS)`; bias `(C,)`; previous `(B, C, TAPS - 1)`;
    position `(B, T)` int32, in packed documents; y `(B, T, C)`, contiguous. bias_channels: channels, or 0 for no bias.
    """
    blocks, batch = tl.cdiv(channels, WIDTH), tl.program_id(1).to(tl.int64)
    block, start = tl.program_id(0) % blocks, tl.program_id(0) // blocks * (4 * GROUPS)
    column = tl.arange(0, BLOCK_C)
    channel = block * WIDTH + column
    exists = (column < WIDTH) & (channel < channels)
    row = 4 * tl.arange(0, GROUPS)
    x_ptr += batch * x_batch + start.to(tl.int64) * x_row
    y_ptr += (batch * length + start) * channels
    position_ptr += batch * length + start
    previous_ptr += batch * channels * (TAPS - 1)
    w_0, w_1 = _tap(weight_ptr, channel, exists, 0, TAPS), _tap(weight_ptr, channel, exists, 1, TAPS)
    w_2, w_3 = _tap(weight_ptr, channel, exists, 2, TAPS), _tap(weight_ptr, channel, exists, 3, TAPS)
    bias = tl.load(bias_ptr + channel, mask=exists & (channel < bias_channels), other=0.0).to(tl.float32)

    x_0 = _rows(x_ptr, row - 3, x_row, previous_ptr, channel, exists, start, length, TAPS, HAS_PREVIOUS)
    x_1 = _rows(x_ptr, row - 2, x_row, previous_ptr, channel, exists, start, length, TAPS, HAS_PREVIOUS)
    x_2 = _rows(x_ptr, row - 1, x_row, previous_ptr, channel, exists, start, length, TAPS, HAS_PREVIOUS)
    x_3 = _rows(x_ptr, row, x_row, previous_ptr, channel, exists, start, length, TAPS, HAS_PREVIOUS)
    x_4 = _rows(x_ptr, row + 1, x_row, previous_ptr, channel, exists, start, length, TAPS, HAS_PREVIOUS)
    x_5 = _rows(x_ptr, row + 2, x_row, previous_ptr, channel, exists, start, length, TAPS, HAS_PREVIOUS)
    x_6 = _rows(x_ptr, row + 3, x_row, previous_ptr, channel, exists, start, length, TAPS, HAS_PREVIOUS)
    p_0 = _position(position_ptr, row, start, length, HAS_DOCUMENTS)
    z_0 = _filter_at(x_0, x_1, x_2, x_3, w_0, w_1, w_2, w_3, bias, p_0, HAS_DOCUMENTS)
    p_1 = _position(position_ptr, row + 1, start, length, HAS_DOCUMENTS)
    z_1 = _filter_at(x_1, x_2, x_3, x_4, w_0, w_1, w_2, w_3, bias, p_1, HAS_DOCUMENTS)
    p_2 = _position(position_ptr, row + 2, start, length, HAS_DOCUMENTS)
    z_2 = _filter_at(x_2, x_3, x_4, x_5, w_0, w_1, w_2, w_3, bias, p_2, HAS_DOCUMENTS)
    p_3 = _position(position_ptr, row + 3, start, length, HAS_DOCUMENTS)
    z_3 = _filter_at(x_3, x_4, x_5, x_6, w_0, w_1, w_2, w_3, bias, p_3, HAS_DOCUMENTS)
    _store_activated(z_0, y_ptr, row, channels, channel, exists, start, length, epsilon, NORM)
    _store_activated(z_1, y_ptr, row + 1, channels, channel, exists, start, length, epsilon, NORM)
    _store_activated(z_2, y_ptr, row + 2, channels, channel, exists, start, length, epsilon, NORM)
    _store_activated(z_3, y_ptr, row + 3, channels, channel, exists, start, length, epsilon, NORM)


@triton.jit
def _gradient(z, dy_ptr, row, dy_row, channel, exists, start, length, epsilon, NORM: tl.constexpr):
    """The gradient of what the filter gave, z, at positions `start + row`; 0 outside of the sequence."""
    position = start + row
    inside = (position >= 0) & (position < length)
    dy_ptrs = dy_ptr + row[:, None] * dy_row + channel[None, :]
    d = tl.load(dy_ptrs, mask=inside[:, None] & exists[None, :], other=0.0).to(tl.float32)
    gate = tl.sigmoid(z)
    if NORM:
        s = z * gate
        scale = tl.rsqrt(tl.sum(s * s, axis=1) + epsilon)
        along = tl.sum(d * s, axis=1) * scale * scale
        d = (d - s * along[:, None]) * scale[:, None]
    return d * (gate + z * gate * (1 - gate))


@triton.jit
def _sum_of_taps(
    d_0, d_1, d_2, d_3, x_0, x_1, x_2, x_3, p_0, p_1, p_2, p_3, DISTANCE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr
):
    """The gradient of the tap that weighs the input DISTANCE positions back, of four positions."""
    d_0, d_1 = _within(d_0, p_0, DISTANCE, HAS_DOCUMENTS), _within(d_1, p_1, DISTANCE, HAS_DOCUMENTS)
    d_2, d_3 = _within(d_2, p_2, DISTANCE, HAS_DOCUMENTS), _within(d_3, p_3, DISTANCE, HAS_DOCUMENTS)
    return d_0 * x_0 + d_1 * x_1 + d_2 * x_2 + d_3 * x_3


@triton.jit
def _back(d_0, d_1, d_2, d_3, p_1, p_2, p_3, w_0, w_1, w_2, w_3, none, HAS_DOCUMENTS: tl.constexpr):
    """The gradient of an input, from those of what the filter gave at its position and the three behind."""
    d_1, d_2 = _within(d_1, p_1, 1, HAS_DOCUMENTS), _within(d_2, p_2, 2, HAS_DOCUMENTS)
    d_3 = _within(d_3, p_3, 3, HAS_DOCUMENTS)
    return _filter(d_0, d_1, d_2, d_3, w_3, w_2, w_1, w_0, none)


@triton.jit
def _store_gradient(
    dx, dx_ptr, row, dx_row, d_previous_ptr, channel, exists, start, length,
    TAPS: tl.constexpr, HAS_PREVIOUS: tl.constexpr,
):  # fmt: skip
    position = start + row
    inside = (position >= 0) & (position < length)
    dx_ptrs = dx_ptr + row[:, None] * dx_row + channel[None, :]
    tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=inside[:, None] & exists[None, :])
    if HAS_PREVIOUS:
        at = position + (TAPS - 1)
        before = (position < 0) & (at >= 0)
        offset = channel[None, :] * (TAPS - 1) + at[:, None]
        dx = dx.to(d_previous_ptr.dtype.element_ty)
        tl.store(d_previous_ptr + offset, dx, mask=before[:, None] & exists[None, :])


@triton.jit
def convolution_backward_kernel(
    dy_ptr, dy_batch, dy_row, x_ptr, x_batch, x_row, weight_ptr, bias_ptr, bias_channels, previous_ptr,
    position_ptr, dx_ptr, d_previous_ptr, part_ptr, length, channels, epsilon, steps,
    TAPS: tl.constexpr, HAS_PREVIOUS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, NORM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Gradients of `GROUPS · 4 · steps` positions of WIDTH channels. Grid: as of `convolution_forward_kernel`.

    Each of GROUPS stretches is walked from its end to its beginning, four positions at a time: what the last four need
    of those behind them is at hand. With previous inputs the first program begins four positions before the sequence.
    Beyond the forward kernel's: dy as x; dx `(B, T, C)`, contiguous; d_previous as previous; part `(P, 5, C)` float32:
    sums over a program's positions of the gradients of four taps and of the bias.
    """
    block, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * (4 * GROUPS * steps)
    if HAS_PREVIOUS:
        first -= 4
    column = tl.arange(0, BLOCK_C)
    channel = block * WIDTH + column
    exists = (column < WIDTH) & (channel < channels)
    x_ptr += batch * x_batch + first.to(tl.int64) * x_row
    dy_ptr += batch * dy_batch + first.to(tl.int64) * dy_row
    dx_ptr += (batch * length + first) * channels
    position_ptr += batch * length + first
    previous_ptr += batch * channels * (TAPS - 1)
    d_previous_ptr += batch * channels * (TAPS - 1)
    w_0, w_1 = _tap(weight_ptr, channel, exists, 0, TAPS), _tap(weight_ptr, channel, exists, 1, TAPS)
    w_2, w_3 = _tap(weight_ptr, channel, exists, 2, TAPS), _tap(weight_ptr, channel, exists, 3, TAPS)
    bias = tl.load(bias_ptr + channel, mask=exists & (channel < bias_channels), other=0.0).to(tl.float32)
    none = tl.zeros_like(w_0)

    # Behind the stretches: inputs from the last three of a stretch on, and the gradients of what the filter gave there.
    row = (tl.arange(0, GROUPS) + 1) * (4 * steps)
    x_4 = _rows(x_ptr, row - 3, x_row, previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
    x_5 = _rows(x_ptr, row - 2, x_row, previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
    x_6 = _rows(x_ptr, row - 1, x_row, previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
    x_7 = _rows(x_ptr, row, x_row, previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
    x_8 = _rows(x_ptr, row + 1, x_row, previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
    x_9 = _rows(x_ptr, row + 2, x_row, previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
    p_4 = _position(position_ptr, row, first, length, HAS_DOCUMENTS)
    z_4 = _filter_at(x_4, x_5, x_6, x_7, w_0, w_1, w_2, w_3, bias, p_4, HAS_DOCUMENTS)
    p_5 = _position(position_ptr, row + 1, first, length, HAS_DOCUMENTS)
    z_5 = _filter_at(x_5, x_6, x_7, x_8, w_0, w_1, w_2, w_3, bias, p_5, HAS_DOCUMENTS)
    p_6 = _position(position_ptr, row + 2, first, length, HAS_DOCUMENTS)
    z_6 = _filter_at(x_6, x_7, x_8, x_9, w_0, w_1, w_2, w_3, bias, p_6, HAS_DOCUMENTS)
    d_4 = _gradient(z_4, dy_ptr, row, dy_row, channel, exists, first, length, epsilon, NORM)
    d_5 = _gradient(z_5, dy_ptr, row + 1, dy_row, channel, exists, first, length, epsilon, NORM)
    d_6 = _gradient(z_6, dy_ptr, row + 2, dy_row, channel, exists, first, length, epsilon, NORM)
    dw_0 = tl.zeros([GROUPS, BLOCK_C], tl.float32)
    dw_1, dw_2, dw_3, d_bias = dw_0, dw_0, dw_0, dw_0
    for _ in range(steps):
        row -= 4
        x_0 = _rows(x_ptr, row - 3, x_row, previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
        x_1 = _rows(x_ptr, row - 2, x_row, previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
        x_2 = _rows(x_ptr, row - 1, x_row, previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
        x_3 = _rows(x_ptr, row, x_row, previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
        p_0 = _position(position_ptr, row, first, length, HAS_DOCUMENTS)
        z_0 = _filter_at(x_0, x_1, x_2, x_3, w_0, w_1, w_2, w_3, bias, p_0, HAS_DOCUMENTS)
        p_1 = _position(position_ptr, row + 1, first, length, HAS_DOCUMENTS)
        z_1 = _filter_at(x_1, x_2, x_3, x_4, w_0, w_1, w_2, w_3, bias, p_1, HAS_DOCUMENTS)
        p_2 = _position(position_ptr, row + 2, first, length, HAS_DOCUMENTS)
        z_2 = _filter_at(x_2, x_3, x_4, x_5, w_0, w_1, w_2, w_3, bias, p_2, HAS_DOCUMENTS)
        p_3 = _position(position_ptr, row + 3, first, length, HAS_DOCUMENTS)
        z_3 = _filter_at(x_3, x_4, x_5, x_6, w_0, w_1, w_2, w_3, bias, p_3, HAS_DOCUMENTS)
        d_0 = _gradient(z_0, dy_ptr, row, dy_row, channel, exists, first, length, epsilon, NORM)
        d_1 = _gradient(z_1, dy_ptr, row + 1, dy_row, channel, exists, first, length, epsilon, NORM)
        d_2 = _gradient(z_2, dy_ptr, row + 2, dy_row, channel, exists, first, length, epsilon, NORM)
        d_3 = _gradient(z_3, dy_ptr, row + 3, dy_row, channel, exists, first, length, epsilon, NORM)
        dw_0 += _sum_of_taps(d_0, d_1, d_2, d_3, x_0, x_1, x_2, x_3, p_0, p_1, p_2, p_3, 3, HAS_DOCUMENTS)
        dw_1 += _sum_of_taps(d_0, d_1, d_2, d_3, x_1, x_2, x_3, x_4, p_0, p_1, p_2, p_3, 2, HAS_DOCUMENTS)
        dw_2 += _sum_of_taps(d_0, d_1, d_2, d_3, x_2, x_3, x_4, x_5, p_0, p_1, p_2, p_3, 1, HAS_DOCUMENTS)
        dw_3 += d_0 * x_3 + d_1 * x_4 + d_2 * x_5 + d_3 * x_6
        d_bias += d_0 + d_1 + d_2 + d_3
        dx_0 = _back(d_0, d_1, d_2, d_3, p_1, p_2, p_3, w_0, w_1, w_2, w_3, none, HAS_DOCUMENTS)
        dx_1 = _back(d_1, d_2, d_3, d_4, p_2, p_3, p_4, w_0, w_1, w_2, w_3, none, HAS_DOCUMENTS)
        dx_2 = _back(d_2, d_3, d_4, d_5, p_3, p_4, p_5, w_0, w_1, w_2, w_3, none, HAS_DOCUMENTS)
        dx_3 = _back(d_3, d_4, d_5, d_6, p_4, p_5, p_6, w_0, w_1, w_2, w_3, none, HAS_DOCUMENTS)
        _store_gradient(dx_0, dx_ptr, row, channels, d_previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS)
        _store_gradient(
            dx_1, dx_ptr, row + 1, channels, d_previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS
        )
        _store_gradient(
            dx_2, dx_ptr, row + 2, channels, d_previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS
        )
        _store_gradient(
            dx_3, dx_ptr, row + 3, channels, d_previous_ptr, channel, exists, first, length, TAPS, HAS_PREVIOUS
        )
        x_4, x_5, x_6 = x_0, x_1, x_2
        d_4, d_5, d_6 = d_0, d_1, d_2
        p_4, p_5, p_6 = p_0, p_1, p_2
    part_ptr += (batch * tl.num_programs(1) + tl.program_id(1)) * 5 * channels
    tl.store(part_ptr + channel, tl.sum(dw_0, axis=0), mask=exists)
    tl.store(part_ptr + channels + channel, tl.sum(dw_1, axis=0), mask=exists)
    tl.store(part_ptr + 2 * channels + channel, tl.sum(dw_2, axis=0), mask=exists)
    tl.store(part_ptr + 3 * channels + channel, tl.sum(dw_3, axis=0), mask=exists)
    tl.store(part_ptr + 4 * channels + channel, tl.sum(d_bias, axis=0), mask=exists)


def _options(
    kernel: str, x: Tensor, weight: Tensor, previous: Tensor | None, positions: Tensor | None, heads: int
) -> dict[str, Any]:
    """Launch options. heads: how many are normalised, 0 for none."""
    width = x.shape[2] // heads if heads else _BLOCK_C
    block_c = max(16, triton.next_power_of_2(width))
    return {
        "TAPS": weight.shape[-1], "HAS_PREVIOUS": previous is not None, "HAS_DOCUMENTS": positions is not None,
        "NORM": heads > 0, "WIDTH": width, "BLOCK_C": block_c,
        "GROUPS": max(1, _TILES[kernel] // block_c), "num_warps": 4, **FUSED,
    }  # fmt: skip


@operator("short_convolution")
@on_device_of_first
def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    previous: Tensor | None,
    positions: Tensor | None,
    heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """`short_convolution` of up to four taps.

    Args:
        x: `(B, T, C)`, any strides.
        weight: `(C, 1, W)`, any floating dtype; products and sums are float32.
        bias: `(C,)`.
        previous: `(B, C, W - 1)`.
        positions: `(B, T)` int32, of each token in its packed document; None where a row is one.
        heads: divide each of so many equal slices of the result's channels by its length; 0 for none.
        epsilon: added to the square of a length.

    Returns:
        y `(B, T, C)` in x's dtype, contiguous, and the last inputs `(B, C, W - 1)`.
    """
    x = with_whole_channels(x)
    batch, length, channels = x.shape
    y = torch.empty((batch, length, channels), dtype=x.dtype, device=x.device)
    options = _options("forward", x, weight, previous, positions, heads)
    blocks = triton.cdiv(channels, options["WIDTH"]) * triton.cdiv(length, 4 * options["GROUPS"])
    convolution_forward_kernel[blocks, batch](
        x, x.stride(0), x.stride(1), weight.contiguous(), weight if bias is None else bias.contiguous(),
        0 if bias is None else channels, x if previous is None else previous.contiguous(),
        x if positions is None else positions.contiguous(), y, length, channels, epsilon, **options,
    )  # fmt: skip
    kept = weight.shape[-1] - 1
    inputs = x[:, max(0, length - kept) :].transpose(1, 2)
    if length < kept:
        before = x.new_zeros(batch, channels, kept) if previous is None else previous.to(x.dtype)
        inputs = torch.cat((before[..., length:], inputs), dim=-1)
    return y, inputs.clone(memory_format=torch.contiguous_format)


@convolve.register_fake
def _(x, weight, bias, previous, positions, heads, epsilon):
    return x.new_empty(x.shape), x.new_empty((x.shape[0], x.shape[2], weight.shape[-1] - 1))


@operator("short_convolution_backward")
@on_device_of_first
def convolve_backward(
    dy: Tensor,
    d_last: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    previous: Tensor | None,
    positions: Tensor | None,
    heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and previous, the last two empty where there is none of them."""
    dy, x = with_whole_channels(dy), with_whole_channels(x)
    batch, length, channels = x.shape
    dx = torch.empty((batch, length, channels), dtype=x.dtype, device=x.device)
    d_previous = (
        dx.new_empty(0) if previous is None else torch.empty_like(previous, memory_format=torch.contiguous_format)
    )
    options = _options("backward", x, weight, previous, positions, heads)
    covered = length + (4 if previous is not None else 0)
    blocks = triton.cdiv(covered, 4 * options["GROUPS"] * _STEPS)
    part = torch.empty((batch * blocks, 5, channels), dtype=torch.float32, device=x.device)
    convolution_backward_kernel[triton.cdiv(channels, options["WIDTH"]), blocks, batch](
        dy, dy.stride(0), dy.stride(1), x, x.stride(0), x.stride(1), weight.contiguous(),
        weight if bias is None else bias.contiguous(), 0 if bias is None else channels,
        x if previous is None else previous.contiguous(), x if positions is None else positions.contiguous(),
        dx, d_previous, part, length, channels, epsilon, _STEPS, **options,
    )  # fmt: skip
    *d_taps, d_bias = part.sum(0)
    d_weight = torch.stack(d_taps[MAX_TAPS - weight.shape[-1] :], dim=-1)[:, None].to(weight.dtype)
    if d_last is not None:
        kept = weight.shape[-1] - 1
        own = min(kept, length)
        dx[:, length - own :] += d_last[..., kept - own :].transpose(1, 2)
        if previous is not None:
            d_previous[..., own:] += d_last[..., : kept - own]
    return dx, d_weight, d_bias.to(bias.dtype) if bias is not None else dx.new_empty(0), d_previous


@convolve_backward.register_fake
def _(dy, d_last, x, weight, bias, previous, positions, heads, epsilon):
    d_bias, d_previous = (
        x.new_empty(0) if given is None else torch.empty_like(given, memory_format=torch.contiguous_format)
        for given in (bias, previous)
    )
    return x.new_empty(x.shape), weight.new_empty(weight.shape), d_bias, d_previous


def _save_for_backward(ctx, inputs, output) -> None:
    x, weight, bias, previous, positions, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, bias, previous, positions)


def _autograd(ctx, dy: Tensor, d_last: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, previous, positions = ctx.saved_tensors  # once: activation checkpointing gives them away
    dx, d_weight, d_bias, d_previous = convolve_backward(dy, d_last, x, weight, bias, previous, positions, *ctx.rest)
    d_bias, d_previous = None if bias is None else d_bias, None if previous is None else d_previous
    return dx, d_weight, d_bias, d_previous, None, None, None


convolve.register_autograd(_autograd, setup_context=_save_for_backward)
