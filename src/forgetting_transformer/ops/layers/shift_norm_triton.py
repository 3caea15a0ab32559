"""Token shift and RMS norm of heads in Triton: one kernel forward, one backward, inputs read once.

Only the inputs are kept for the backward pass, which computes the rest again. The gradient of position t needs that of
position t + 1. So each thread walks a stretch of positions from its end to its beginning, four at a time, and keeps
what the last one leaves to the one before it. Gradients of norm weights are sums over positions: every program leaves
its part, and the parts are added in a fixed order. So the same inputs give the same bits every time.

A tile is one head at several positions, with 16 numbers to a thread forward and 8 backward, which has more tensors in
registers.

Axes: `forgetting_transformer/ops/__init__.py`. P programs along time, of all sequences.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.forgetting_attention.layout import FUSED, on_device_of_first, with_whole_channels
from forgetting_transformer.ops.layers.residual_norm_triton import sum_parts

# Elements of a tile, with 4 warps: 16 and 8 to a thread.
_TILES = {"forward": 2048, "backward": 1024}
# Backward: a stretch has four times as many positions, more where a sequence would leave more than _MAX_PARTS parts.
# The same on every GPU, since the number of parts changes bits.
_STEPS, _MAX_PARTS = 8, 256
# One kernel for any of these: UNIT says how far loads of y are aligned, and logits are loaded one at a time.
_SIZES = ["y_batch", "y_row", "shift_batch", "shift_row", "length"]


@triton.jit
def _load_rows(ptr, row, stride, channel, exists, length):
    """Rows `row` of a sequence, float32; 0 outside of it."""
    inside = (row >= 0) & (row < length)
    x = tl.load(ptr + row[:, None] * stride + channel[None, :], mask=inside[:, None] & exists[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit
def _load_before(y_ptr, row, y_row, previous_ptr, channel, exists, length, HAS_PREVIOUS: tl.constexpr):
    """Rows `row`, of which the one before the sequence is previous."""
    y = _load_rows(y_ptr, row, y_row, channel, exists, length)
    if HAS_PREVIOUS:
        first = (row == -1)[:, None] & exists[None, :]
        offset = tl.zeros_like(row)[:, None] + channel[None, :]
        y += tl.load(previous_ptr + offset, mask=first, other=0.0).to(tl.float32)
    return y


@triton.jit
def _weights(shift_ptr, row, shift_row, begins_ptr, length, SHIFT: tl.constexpr, HAS_BEGINS: tl.constexpr):
    """Weights of the row before and of the row itself, and the derivative of the first by its logit.

    The first row of a document has no row before.
    """
    alpha = tl.zeros_like(row).to(tl.float32)
    if SHIFT:
        inside = (row >= 0) & (row < length)
        alpha = tl.sigmoid(tl.load(shift_ptr + row * shift_row, mask=inside, other=0.0).to(tl.float32))
    before = alpha
    if HAS_BEGINS:
        begins = tl.load(begins_ptr + row, mask=(row >= 0) & (row < length), other=1)
        before = tl.where(begins != 0, 0.0, alpha)
    return before, 1 - alpha, alpha * (1 - alpha)


@triton.jit
def _blend(y_before, y, before, here):
    """The shifted rows. A weight of 0 leaves out what may not be finite."""
    y_before = tl.where((before == 0)[:, None], 0.0, y_before)
    return before[:, None] * y_before + here[:, None] * y


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["shift_ptr"])
def shift_norm_forward_kernel(
    y_ptr, y_batch, y_row, shift_ptr, shift_batch, shift_row, previous_ptr, begins_ptr, weight_ptr, weight_head,
    out_ptr, heads, length, epsilon,
    UNIT: tl.constexpr, SHIFT: tl.constexpr, NORM: tl.constexpr, HAS_PREVIOUS: tl.constexpr, HAS_BEGINS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out of GROUPS positions of one head. Grid: (blocks of positions · heads, B).

    y `(B, T, H·WIDTH)`, strides (y_batch · UNIT, y_row · UNIT, 1); shift `(B, T, H)`, strides (shift_batch, shift_row,
    1); previous `(B, H·WIDTH)`; begins `(B, T)`, integers; weight, of head h from weight_head · h on; out as y,
    contiguous.
    """
    head, block, batch = tl.program_id(0) % heads, tl.program_id(0) // heads, tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    channel, exists = head * WIDTH + column, column < WIDTH
    row = block.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    y_row *= UNIT
    y_ptr += batch * y_batch * UNIT
    before, here, _ = _weights(
        shift_ptr + batch * shift_batch + head, row, shift_row, begins_ptr + batch * length, length, SHIFT, HAS_BEGINS
    )
    z = _load_rows(y_ptr, row, y_row, channel, exists, length)
    if SHIFT:
        previous_ptr += batch * heads * WIDTH
        y_before = _load_before(y_ptr, row - 1, y_row, previous_ptr, channel, exists, length, HAS_PREVIOUS)
        z = _blend(y_before, z, before, here)
    if NORM:
        weight = tl.load(weight_ptr + head * weight_head + column, mask=exists, other=0.0).to(tl.float32)
        z = z * tl.rsqrt(tl.sum(z * z, axis=1) / WIDTH + epsilon)[:, None] * weight[None, :]
    out_ptrs = out_ptr + (batch * length + row)[:, None] * (heads * WIDTH) + channel[None, :]
    tl.store(out_ptrs, z.to(out_ptr.dtype.element_ty), mask=(row < length)[:, None] & exists[None, :])


@triton.jit
def _gradient(z, d, weight, epsilon, WIDTH: tl.constexpr, NORM: tl.constexpr):
    """Gradients of what is normalised, z, and of the weight, before their sum over rows."""
    d_weight = d
    if NORM:
        scale = tl.rsqrt(tl.sum(z * z, axis=1) / WIDTH + epsilon)[:, None]
        normal = z * scale
        d_weight = d * normal
        d = d * weight[None, :]
        d = scale * (d - normal * (tl.sum(d * normal, axis=1) / WIDTH)[:, None])
    return d, d_weight


@triton.jit
def _to_before(d, before, HAS_BEGINS: tl.constexpr):
    """Gradients that d leaves to the rows before. A document leaves nothing to another, not even what is not finite."""
    carry = before[:, None] * d
    if HAS_BEGINS:
        carry = tl.where((before == 0)[:, None], 0.0, carry)
    return carry


@triton.jit
def _step_back(
    y_before, y, d, carry, row, shift_ptr, shift_row, begins_ptr, weight, dy_ptr, d_shift_ptr, heads, channel,
    exists, length, epsilon,
    SHIFT: tl.constexpr, NORM: tl.constexpr, HAS_BEGINS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores the gradients at `row`; returns what they leave to the row before, and the part of the weight's."""
    before, here, slope = _weights(shift_ptr, row, shift_row, begins_ptr, length, SHIFT, HAS_BEGINS)
    z = y
    if SHIFT:
        z = _blend(y_before, y, before, here)
    d, d_weight = _gradient(z, d, weight, epsilon, WIDTH, NORM)
    inside = row < length
    dy = here[:, None] * d + carry
    dy_ptrs = dy_ptr + row[:, None] * (heads * WIDTH) + channel[None, :]
    tl.store(dy_ptrs, dy.to(dy_ptr.dtype.element_ty), mask=inside[:, None] & exists[None, :])
    if SHIFT:
        y_before = tl.where((before == 0)[:, None], 0.0, y_before)
        d_shift = tl.sum(d * (y_before - y), axis=1) * slope
        tl.store(d_shift_ptr + row * heads, d_shift.to(d_shift_ptr.dtype.element_ty), mask=inside)
        carry = _to_before(d, before, HAS_BEGINS)
    return carry, d_weight


@triton.jit(do_not_specialize=[*_SIZES, "steps"], do_not_specialize_on_alignment=["shift_ptr"])
def shift_norm_backward_kernel(
    d_out_ptr, d_out_batch, d_out_row, y_ptr, y_batch, y_row, shift_ptr, shift_batch, shift_row,
    previous_ptr, begins_ptr, weight_ptr, weight_head, dy_ptr, d_shift_ptr, d_previous_ptr, part_ptr,
    heads, length, epsilon, steps,
    UNIT: tl.constexpr, SHIFT: tl.constexpr, NORM: tl.constexpr, HAS_PREVIOUS: tl.constexpr, HAS_BEGINS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Gradients of GROUPS stretches of `4 · steps` positions of one head. Grid: as of the forward kernel.

    Beyond its arguments: d_out as y, with its own strides; dy, d_shift and d_previous as their tensors, contiguous;
    part `(P, H·WIDTH)` float32: sums over a program's positions of the gradients of weights.
    """
    head, block, batch = tl.program_id(0) % heads, tl.program_id(0) // heads, tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    channel, exists = head * WIDTH + column, column < WIDTH
    start = (block.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)) * (4 * steps)
    d_out_ptr += batch * d_out_batch
    y_row *= UNIT
    y_ptr += batch * y_batch * UNIT
    shift_ptr += batch * shift_batch + head
    previous_ptr += batch * heads * WIDTH
    begins_ptr += batch * length
    dy_ptr += batch * length * (heads * WIDTH)
    d_shift_ptr += batch * length * heads + head
    weight = tl.zeros([BLOCK], tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + head * weight_head + column, mask=exists, other=0.0).to(tl.float32)

    # the part that the position behind the stretch leaves to its last one
    row = start + 4 * steps
    carry = tl.zeros([GROUPS, BLOCK], tl.float32)
    y_3 = _load_rows(y_ptr, row - 1, y_row, channel, exists, length)
    if SHIFT:
        before, here, _ = _weights(shift_ptr, row, shift_row, begins_ptr, length, SHIFT, HAS_BEGINS)
        z = _blend(y_3, _load_rows(y_ptr, row, y_row, channel, exists, length), before, here)
        d, _ = _gradient(
            z, _load_rows(d_out_ptr, row, d_out_row, channel, exists, length), weight, epsilon, WIDTH, NORM
        )
        carry = tl.where((row < length)[:, None], _to_before(d, before, HAS_BEGINS), 0.0)

    d_weight = tl.zeros([GROUPS, BLOCK], tl.float32)
    for step in range(steps):
        row = start + 4 * (steps - 1 - step)
        y_2 = _load_rows(y_ptr, row + 2, y_row, channel, exists, length)
        y_1 = _load_rows(y_ptr, row + 1, y_row, channel, exists, length)
        y_0 = _load_rows(y_ptr, row, y_row, channel, exists, length)
        y_before = _load_before(y_ptr, row - 1, y_row, previous_ptr, channel, exists, length, HAS_PREVIOUS)
        d_3 = _load_rows(d_out_ptr, row + 3, d_out_row, channel, exists, length)
        d_2 = _load_rows(d_out_ptr, row + 2, d_out_row, channel, exists, length)
        d_1 = _load_rows(d_out_ptr, row + 1, d_out_row, channel, exists, length)
        d_0 = _load_rows(d_out_ptr, row, d_out_row, channel, exists, length)
        carry, w_3 = _step_back(
            y_2, y_3, d_3, carry, row + 3, shift_ptr, shift_row, begins_ptr, weight, dy_ptr, d_shift_ptr,
            heads, channel, exists, length, epsilon, SHIFT, NORM, HAS_BEGINS, WIDTH,
        )  # fmt: skip
        carry, w_2 = _step_back(
            y_1, y_2, d_2, carry, row + 2, shift_ptr, shift_row, begins_ptr, weight, dy_ptr, d_shift_ptr,
            heads, channel, exists, length, epsilon, SHIFT, NORM, HAS_BEGINS, WIDTH,
        )  # fmt: skip
        carry, w_1 = _step_back(
            y_0, y_1, d_1, carry, row + 1, shift_ptr, shift_row, begins_ptr, weight, dy_ptr, d_shift_ptr,
            heads, channel, exists, length, epsilon, SHIFT, NORM, HAS_BEGINS, WIDTH,
        )  # fmt: skip
        carry, w_0 = _step_back(
            y_before, y_0, d_0, carry, row, shift_ptr, shift_row, begins_ptr, weight, dy_ptr, d_shift_ptr,
            heads, channel, exists, length, epsilon, SHIFT, NORM, HAS_BEGINS, WIDTH,
        )  # fmt: skip
        d_weight += w_0 + w_1 + w_2 + w_3
        y_3 = y_before
    if HAS_PREVIOUS:
        first = (start == 0)[:, None] & exists[None, :]
        offset = batch * heads * WIDTH + tl.zeros_like(start)[:, None] + channel[None, :]
        tl.store(d_previous_ptr + offset, carry.to(d_previous_ptr.dtype.element_ty), mask=first)
    if NORM:
        part_ptr += (batch * (tl.num_programs(0) // heads) + block) * heads * WIDTH
        tl.store(part_ptr + channel, tl.sum(d_weight, axis=0), mask=exists)


def _options(
    kernel: str,
    y: Tensor,
    shift: Tensor | None,
    previous: Tensor | None,
    begins: Tensor | None,
    weight: Tensor | None,
    heads: int,
) -> dict[str, Any]:
    width = y.shape[-1] // heads
    block = triton.next_power_of_2(width)
    return {
        "UNIT": _unit(y), "SHIFT": shift is not None, "NORM": weight is not None, "HAS_PREVIOUS": previous is not None,
        "HAS_BEGINS": begins is not None, "WIDTH": width, "BLOCK": block,
        "GROUPS": max(1, _TILES[kernel] // block), "num_warps": 4, **FUSED,
    }  # fmt: skip


def _unit(y: Tensor) -> int:
    """Elements in which strides are counted. Triton asks of a number whether 16 divides it, and 8 is enough here."""
    return math.gcd(8, y.stride(0), y.stride(1))


def _whole(x: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise if x is None else x.contiguous()


def _given(
    y: Tensor, shift: Tensor | None, previous: Tensor | None, begins: Tensor | None, weight: Tensor | None, heads: int
) -> tuple[Any, ...]:
    """Inputs as both kernels take them."""
    shift = y if shift is None else with_whole_channels(shift)
    begins = y if begins is None else begins.contiguous().view(torch.int8)
    weight_head = 0 if weight is None or weight.numel() * heads == y.shape[-1] else y.shape[-1] // heads
    unit = _unit(y)
    return (
        y, y.stride(0) // unit, y.stride(1) // unit, shift, shift.stride(0), shift.stride(1), _whole(previous, y),
        begins, _whole(weight, y), weight_head,
    )  # fmt: skip


@operator("shift_norm")
@on_device_of_first
def shift_and_normalise(
    y: Tensor,
    shift: Tensor | None,
    previous: Tensor | None,
    begins: Tensor | None,
    weight: Tensor | None,
    heads: int,
    epsilon: float,
) -> Tensor:
    """Mix each position with the one before it, and normalise heads; either may be left out.

    Args:
        y: `(B, T, E)`, any strides.
        shift: `(B, T, H)`: the weight of the position before is its sigmoid. None for no shift.
        previous: `(B, E)`, the position before the first. None is 0.
        begins: `(B, T)`, bool: True at positions that have none before them. None for those of documents.
        weight: weight of the norm, `(E,)`, or `(E / H,)` for all heads; None for no norm. Any floating dtype.
        heads: H.
        epsilon: added to mean squares.

    Returns:
        `(B, T, E)` in y's dtype, contiguous; computed in float32 and rounded once.
    """
    y = with_whole_channels(y)
    batch, length, _ = y.shape
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    options = _options("forward", y, shift, previous, begins, weight, heads)
    shift_norm_forward_kernel[triton.cdiv(length, options["GROUPS"]) * heads, batch](
        *_given(y, shift, previous, begins, weight, heads), out, heads, length, epsilon, **options
    )
    return out


@shift_and_normalise.register_fake
def _(y, shift, previous, begins, weight, heads, epsilon):
    return y.new_empty(y.shape)


@operator("shift_norm_backward")
@on_device_of_first
def shift_and_normalise_backward(
    d_out: Tensor,
    y: Tensor,
    shift: Tensor | None,
    previous: Tensor | None,
    begins: Tensor | None,
    weight: Tensor | None,
    heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of y, shift, previous and weight, empty where there is none of them."""
    d_out, y = with_whole_channels(d_out), with_whole_channels(y)
    batch, length, width = y.shape
    dy, d_shift, d_previous, d_weight = _gradients_like(y, shift, previous, weight)
    options = _options("backward", y, shift, previous, begins, weight, heads)
    steps = max(_STEPS, triton.cdiv(batch * length, 4 * options["GROUPS"] * _MAX_PARTS))
    blocks = triton.cdiv(length, 4 * options["GROUPS"] * steps)
    part = torch.empty((batch * blocks, width) if weight is not None else (0,), dtype=torch.float32, device=y.device)
    shift_norm_backward_kernel[blocks * heads, batch](
        d_out, d_out.stride(0), d_out.stride(1), *_given(y, shift, previous, begins, weight, heads),
        dy, d_shift, d_previous, part, heads, length, epsilon, steps, **options,
    )  # fmt: skip
    if weight is not None:
        if weight.shape[0] == width:
            sum_parts(part, d_weight)
        else:
            of_heads = part.new_empty(width)
            sum_parts(part, of_heads)
            d_weight.copy_(of_heads.view(heads, -1).sum(0))
    return dy, d_shift, d_previous, d_weight


def _gradients_like(
    y: Tensor, shift: Tensor | None, previous: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def like(x: Tensor | None) -> Tensor:
        return y.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)

    return like(y), like(shift), like(previous), like(weight)


@shift_and_normalise_backward.register_fake
def _(d_out, y, shift, previous, begins, weight, heads, epsilon):
    return _gradients_like(y, shift, previous, weight)


def _save_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.heads, ctx.epsilon = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, d_out: Tensor) -> tuple[Tensor | None, ...]:
    y, shift, previous, begins, weight = ctx.saved_tensors  # once: activation checkpointing gives them away
    dy, *others = shift_and_normalise_backward(d_out, y, shift, previous, begins, weight, ctx.heads, ctx.epsilon)
    d_shift, d_previous, d_weight = (
        None if x is None else dx for x, dx in zip((shift, previous, weight), others, strict=True)
    )
    return dy, d_shift, d_previous, None, d_weight, None, None


shift_and_normalise.register_autograd(_autograd, setup_context=_save_for_backward)
