"""Token shift and RMS norm of heads in Triton: one kernel forward, one backward, inputs read once.

Only the inputs are kept for the backward pass, which computes the rest again. The gradient of position t needs that of
position t + 1. So each thread walks a stretch of positions from its end to its beginning, two at a time, and keeps
what the last one leaves to the one before it; the next two are loaded meanwhile. Gradients of norm weights are sums
over positions: every program leaves its part, and the parts are added in a fixed order. So the same inputs give the
same bits every time.

A tile is one head at several positions, with 16 numbers to a thread forward and 8 backward, which has more tensors in
registers. Backward, a program is one warp: several would wait for each other at every position, where gradients of
logits go from the threads that sum them to those that store them.

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

# Elements of a tile: 16 and 8 to a thread.
_TILES, _WARPS = {"forward": 2048, "backward": 256}, {"forward": 4, "backward": 1}
# Backward: a stretch has twice as many positions, more where a sequence would leave more than _MAX_PARTS parts.
# The same on every GPU, since the number of parts changes bits.
_STEPS, _MAX_PARTS = 8, 256
# One kernel for any of these: UNIT says how far loads of y are aligned, and logits are loaded one at a time.
_SIZES = ["y_batch", "y_row", "shift_batch", "shift_row", "length"]


@triton.jit
def _locate(
    x_ptr, x_batch, x_row, y_ptr, y_batch, y_row, shift_ptr, shift_batch, shift_row, previous_ptr, begins_ptr,
    heads, length, stretch, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Places of a program, which has GROUPS stretches of one head.

    Returns:
        Pointers to the first row of each stretch in each input, with the inputs' row strides.
        Facts about rows, which are counted from the program's first: the first row of each stretch, the number of
        programs before this one, the rows up to the end of the sequence, and which channels exist.
        The first row of each stretch in a contiguous tensor of all sequences, and the channels.
    """
    head, block, batch = tl.program_id(0) % heads, tl.program_id(0) // heads, tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    channel, exists = (head * WIDTH + column)[None, :], (column < WIDTH)[None, :]
    first, row = block.to(tl.int64) * (GROUPS * stretch), tl.arange(0, GROUPS) * stretch
    position = first + row
    inputs = (
        x_ptr + batch * x_batch + position[:, None] * x_row + channel, x_row,
        y_ptr + batch * y_batch + position[:, None] * y_row + channel, y_row,
        previous_ptr + batch * heads * WIDTH + tl.zeros_like(row)[:, None] + channel,
        shift_ptr + batch * shift_batch + position * shift_row + head, shift_row,
        begins_ptr + batch * length + position,
    )  # fmt: skip
    return inputs, (row, block, (length - first).to(tl.int32), exists), batch * length + position, channel


@triton.jit
def _read(step, inputs, rows, SHIFT: tl.constexpr, HAS_PREVIOUS: tl.constexpr, HAS_BEGINS: tl.constexpr):
    """x at the rows `row + step`; y at those before them; logits of the shift, and beginnings of documents.

    Outside of the sequence numbers are 0, but for previous, which is y before the first row. With a negative step
    nothing is read.
    """
    x_ptrs, x_row, y_ptrs, y_row, previous_ptrs, shift_ptrs, shift_row, begins_ptrs = inputs
    start, block, length, exists = rows
    row, offset = start + step, tl.cast(step, tl.int64)
    inside = (row >= start) & (row < length)
    x = tl.load(x_ptrs + offset * x_row, mask=inside[:, None] & exists, other=0.0)
    behind = (row >= start) & (row <= length) & (row + block > 0)
    y = tl.load(y_ptrs + (offset - 1) * y_row, mask=behind[:, None] & exists, other=0.0)
    if HAS_PREVIOUS:
        first = (row >= start) & (row + block == 0)
        y += tl.load(previous_ptrs, mask=first[:, None] & exists, other=0.0)
    logit, begins = tl.zeros_like(row), tl.zeros_like(row)
    if SHIFT:
        logit = tl.load(shift_ptrs + offset * shift_row, mask=inside, other=0.0)
    if HAS_BEGINS:
        begins = tl.load(begins_ptrs + offset, mask=inside, other=1)
    return x, y, logit, begins


@triton.jit
def _weights(logit, begins, HAS_BEGINS: tl.constexpr):
    """Weights of the row before and of the row itself, and the derivative of the first by its logit.

    The first row of a document has no row before.
    """
    alpha = tl.sigmoid(logit.to(tl.float32))
    before = alpha
    if HAS_BEGINS:
        before = tl.where(begins != 0, 0.0, alpha)
    return before, 1 - alpha, alpha * (1 - alpha)


@triton.jit
def _apart(x, before, HAS_BEGINS: tl.constexpr):
    """0 for what would go from one document to another, which may not be finite."""
    return tl.where((before == 0)[:, None], 0.0, x) if HAS_BEGINS else x


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
    y_batch, y_row = y_batch.to(tl.int64) * UNIT, y_row.to(tl.int64) * UNIT
    inputs, rows, position, channel = _locate(
        y_ptr, y_batch, y_row, y_ptr, y_batch, y_row, shift_ptr, shift_batch, shift_row, previous_ptr, begins_ptr,
        heads, length, 1, WIDTH, BLOCK, GROUPS,
    )  # fmt: skip
    row, _, length, exists = rows
    z, y_before, logit, begins = _read(0, inputs, rows, SHIFT, HAS_PREVIOUS, HAS_BEGINS)
    z = z.to(tl.float32)
    if SHIFT:
        before, here, _ = _weights(logit, begins, HAS_BEGINS)
        z = before[:, None] * _apart(y_before.to(tl.float32), before, HAS_BEGINS) + here[:, None] * z
    if NORM:
        weight_ptrs = weight_ptr + tl.program_id(0) % heads * weight_head + tl.arange(0, BLOCK)[None, :]
        weight = tl.load(weight_ptrs, mask=exists, other=0.0).to(tl.float32)
        z = z * tl.rsqrt(tl.sum(z * z, axis=1) / WIDTH + epsilon)[:, None] * weight
    out_ptrs = out_ptr + position[:, None] * (heads * WIDTH) + channel
    tl.store(out_ptrs, z.to(out_ptr.dtype.element_ty), mask=(row < length)[:, None] & exists)


@triton.jit
def _gradients(
    y, given, weight, epsilon, SHIFT: tl.constexpr, NORM: tl.constexpr, HAS_BEGINS: tl.constexpr, WIDTH: tl.constexpr
):
    """Gradients that the outputs at rows y leave to y, to the rows before, to logits and, before their sum over rows,
    to the weight. given: results of `_read`, whose x is the gradient of these outputs.
    """
    d, y_before, logit, begins = given
    y, d, d_before, d_logit = y.to(tl.float32), d.to(tl.float32), 0.0, 0.0
    z = y
    if SHIFT:
        before, here, slope = _weights(logit, begins, HAS_BEGINS)
        y_before = _apart(y_before.to(tl.float32), before, HAS_BEGINS)
        z = before[:, None] * y_before + here[:, None] * y
    d_weight = d
    if NORM:
        scale = tl.rsqrt(tl.sum(z * z, axis=1) / WIDTH + epsilon)
        d *= scale[:, None]
        d_weight = d * z
        d *= weight
        d -= z * (scale * scale * (tl.sum(d * z, axis=1) / WIDTH))[:, None]
    if SHIFT:
        d_before = _apart(before[:, None] * d, before, HAS_BEGINS)
        d_logit = tl.sum(d * (y_before - y), axis=1) * slope
        d = here[:, None] * d
    return d, d_before, d_logit, d_weight


@triton.jit(do_not_specialize=[*_SIZES, "steps"], do_not_specialize_on_alignment=["shift_ptr"])
def shift_norm_backward_kernel(
    d_out_ptr, d_out_batch, d_out_row, y_ptr, y_batch, y_row, shift_ptr, shift_batch, shift_row,
    previous_ptr, begins_ptr, weight_ptr, weight_head, dy_ptr, d_shift_ptr, d_previous_ptr, part_ptr,
    heads, length, epsilon, steps,
    UNIT: tl.constexpr, SHIFT: tl.constexpr, NORM: tl.constexpr, HAS_PREVIOUS: tl.constexpr, HAS_BEGINS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Gradients of GROUPS stretches of `2 · steps` positions of one head. Grid: as of the forward kernel.

    Beyond its arguments: d_out as y, with its own strides; dy, d_shift and d_previous as their tensors, contiguous;
    part `(P, H·WIDTH)` float32: sums over a program's positions of the gradients of weights.
    """
    y_batch, y_row = y_batch.to(tl.int64) * UNIT, y_row.to(tl.int64) * UNIT
    inputs, rows, position, channel = _locate(
        d_out_ptr, d_out_batch, d_out_row, y_ptr, y_batch, y_row, shift_ptr, shift_batch, shift_row,
        previous_ptr, begins_ptr, heads, length, 2 * steps, WIDTH, BLOCK, GROUPS,
    )  # fmt: skip
    row, block, length, exists = rows
    head, width = tl.program_id(0) % heads, heads * WIDTH
    weight = tl.zeros([1, BLOCK], tl.float32)
    if NORM:
        weight_ptrs = weight_ptr + head * weight_head + tl.arange(0, BLOCK)[None, :]
        weight = tl.load(weight_ptrs, mask=exists, other=0.0).to(tl.float32)
    dy_ptrs = dy_ptr + position[:, None] * width + channel
    d_shift_ptrs = d_shift_ptr + position * heads + head

    # What the row behind the stretch leaves to its last one.
    step = 2 * steps
    given = _read(step, inputs, rows, SHIFT, HAS_PREVIOUS, HAS_BEGINS)
    y, carry = given[1].to(tl.float32), tl.zeros([GROUPS, BLOCK], tl.float32)
    if SHIFT:
        follows = (row + step < length)[:, None] & exists
        behind = tl.load(inputs[2] + tl.cast(step, tl.int64) * y_row, mask=follows, other=0.0)
        _, carry, _, _ = _gradients(behind, given, weight, epsilon, SHIFT, NORM, HAS_BEGINS, WIDTH)

    sums = tl.zeros([GROUPS, BLOCK], tl.float32)
    next_1 = _read(step - 1, inputs, rows, SHIFT, HAS_PREVIOUS, HAS_BEGINS)
    next_0 = _read(step - 2, inputs, rows, SHIFT, HAS_PREVIOUS, HAS_BEGINS)
    for _ in range(steps):
        step -= 2
        given_1, given_0 = next_1, next_0
        next_1 = _read(step - 1, inputs, rows, SHIFT, HAS_PREVIOUS, HAS_BEGINS)
        next_0 = _read(step - 2, inputs, rows, SHIFT, HAS_PREVIOUS, HAS_BEGINS)
        for place in tl.static_range(1, -1, -1):
            given = given_1 if place else given_0
            dy, d_before, d_logit, d_weight = _gradients(y, given, weight, epsilon, SHIFT, NORM, HAS_BEGINS, WIDTH)
            offset = tl.cast(step + place, tl.int64)
            inside = row + step + place < length
            dy = (dy + carry).to(dy_ptr.dtype.element_ty)
            tl.store(dy_ptrs + offset * width, dy, mask=inside[:, None] & exists)
            if SHIFT:
                d_logit = d_logit.to(d_shift_ptr.dtype.element_ty)
                tl.store(d_shift_ptrs + offset * heads, d_logit, mask=inside)
                carry = d_before
            sums += d_weight
            y = given[1].to(tl.float32)
    if HAS_PREVIOUS:
        d_previous_ptrs = d_previous_ptr + tl.program_id(1) * width + tl.zeros_like(row)[:, None] + channel
        first = (row + block == 0)[:, None] & exists
        tl.store(d_previous_ptrs, carry.to(d_previous_ptr.dtype.element_ty), mask=first)
    if NORM:
        part_ptr += (tl.program_id(1) * (tl.num_programs(0) // heads) + block).to(tl.int64) * width
        tl.store(part_ptr + channel, tl.sum(sums, axis=0)[None, :], mask=exists)


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
        "GROUPS": max(1, _TILES[kernel] // block), "num_warps": _WARPS[kernel], **FUSED,
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
    steps = max(_STEPS, triton.cdiv(batch * length, 2 * options["GROUPS"] * _MAX_PARTS))
    blocks = triton.cdiv(length, 2 * options["GROUPS"] * steps)
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
