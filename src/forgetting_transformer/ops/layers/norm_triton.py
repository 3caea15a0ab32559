"""The RMS norm with a gate before or behind it in Triton: one kernel forward, one backward, inputs read once.

Only the inputs are kept for the backward pass. Gradients of weights are sums over positions: every program leaves its
part, and the parts are added in a fixed order. So the same inputs give the same bits every time.

A tile is one group of one or more whole rows, so that a mean needs no second look, with 8 or more numbers to a thread:
loads of 16 bytes. In the backward pass the tiles of the next rows are loaded while these are computed.

Axes: N rows, G groups of a row with C channels each, P programs along rows.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.forgetting_attention.layout import FUSED, on_device_of_first, with_whole_channels

# Elements of a tile per warp; backward: tiles of a program along rows.
_TILE, _STEPS = 256, 16
# Backward: bytes of shared memory for tiles of the next rows, loaded while these are computed. sm_86 has 100 KB.
_PREFETCHED = 64 * 1024
# Channels of a wide row per warp. Few warps to a row leave room for more rows at a time.
_WARP_WIDTHS = {"forward": 512, "backward": 1024}


@triton.jit(do_not_specialize=["gate_row", "rows"])
def norm_forward_kernel(
    x_ptr, x_row, gate_ptr, gate_row, weight_ptr, y_ptr, rows, width, epsilon,
    UNIT: tl.constexpr, GATE: tl.constexpr, GATE_FIRST: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y of ROWS rows of one group. Grid: blocks of rows · groups.

    x, gate and y `(N, G·WIDTH)`, rows x_row, gate_row · UNIT and width elements apart; weight `(G·WIDTH,)`.
    """
    groups = width // WIDTH
    # Groups of a row lie side by side in memory, so programs that run at the same time have those.
    group, row = tl.program_id(0) % groups, (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    gate_row *= UNIT
    column = tl.arange(0, BLOCK)
    exists = (row < rows)[:, None] & (column < WIDTH)[None, :]
    channel = group * WIDTH + column
    weight = tl.load(weight_ptr + channel, mask=column < WIDTH, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row[:, None] * x_row + channel[None, :], mask=exists, other=0.0).to(tl.float32)
    if GATE:
        gate = tl.load(gate_ptr + row[:, None] * gate_row + channel[None, :], mask=exists, other=0.0).to(tl.float32)
        gate = gate * tl.sigmoid(gate) if SILU else tl.sigmoid(gate)
        if GATE_FIRST:
            x = x * gate
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + epsilon)[:, None] * weight[None, :]
    if GATE and not GATE_FIRST:
        y = y * gate
    tl.store(y_ptr + row[:, None] * width + channel[None, :], y.to(y_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["gate_row", "rows"])
def norm_backward_kernel(
    dy_ptr, dy_row, x_ptr, x_row, gate_ptr, gate_row, weight_ptr, dx_ptr, d_gate_ptr, part_ptr,
    rows, width, epsilon, steps,
    UNIT: tl.constexpr, GATE: tl.constexpr, GATE_FIRST: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of `ROWS · steps` rows of one group. Grid: blocks of rows · groups.

    Beyond the forward kernel's: dy as x; dx and d_gate as y; part `(P, width)` float32: sums over a program's rows of
    the gradients of weights.
    """
    groups = width // WIDTH
    group, block = tl.program_id(0) % groups, (tl.program_id(0) // groups).to(tl.int64)
    gate_row *= UNIT
    column = tl.arange(0, BLOCK)
    channel = group * WIDTH + column
    weight = tl.load(weight_ptr + channel, mask=column < WIDTH, other=0.0).to(tl.float32)
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(steps, num_stages=STAGES):
        row = (block * steps + step) * ROWS + tl.arange(0, ROWS)
        exists = (row < rows)[:, None] & (column < WIDTH)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_row + channel[None, :], mask=exists, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_row + channel[None, :], mask=exists, other=0.0).to(tl.float32)
        if GATE:
            z = tl.load(gate_ptr + row[:, None] * gate_row + channel[None, :], mask=exists, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(z)
            gate = z * sigmoid if SILU else sigmoid
            slope = sigmoid + gate * (1 - sigmoid) if SILU else gate * (1 - gate)
        u = x
        if GATE and GATE_FIRST:
            u = x * gate
        scale = tl.rsqrt(tl.sum(u * u, axis=1) / WIDTH + epsilon)[:, None]
        normal = u * scale
        d_gate_ptrs = d_gate_ptr + row[:, None] * width + channel[None, :]
        if GATE and not GATE_FIRST:
            d_gate = dy * normal * weight[None, :] * slope
            tl.store(d_gate_ptrs, d_gate.to(d_gate_ptr.dtype.element_ty), mask=exists)
            dy = dy * gate
        d_weight += dy * normal
        dy = dy * weight[None, :]
        du = scale * (dy - normal * (tl.sum(dy * normal, axis=1) / WIDTH)[:, None])
        if GATE and GATE_FIRST:
            tl.store(d_gate_ptrs, (du * x * slope).to(d_gate_ptr.dtype.element_ty), mask=exists)
            du = du * gate
        tl.store(dx_ptr + row[:, None] * width + channel[None, :], du.to(dx_ptr.dtype.element_ty), mask=exists)
    tl.store(part_ptr + block * width + channel, tl.sum(d_weight, axis=0), mask=column < WIDTH)


def _rows_of(x: Tensor) -> Tensor:
    """`(…, width)` as `(N, width)`, a view where its rows are one distance apart."""
    return with_whole_channels(x).reshape(-1, x.shape[-1])


def _options(kernel: str, x: Tensor, gate: Tensor | None, groups: int, gate_first: bool, silu: bool) -> dict[str, Any]:
    width = x.shape[-1] // groups
    block = triton.next_power_of_2(width)
    warps = min(16, max(4, block // _WARP_WIDTHS[kernel]))
    options = {
        "UNIT": 1 if gate is None else math.gcd(8, gate.stride(-2)), "GATE": gate is not None,
        "GATE_FIRST": gate_first, "SILU": silu, "WIDTH": width, "BLOCK": block,
        "ROWS": max(1, _TILE * warps // block), "num_warps": warps, **FUSED,
    }  # fmt: skip
    if kernel == "backward":
        loaded = 3 * options["ROWS"] * block * x.element_size()
        options["STAGES"] = 2 if 2 * loaded <= _PREFETCHED else 1
    return options


@operator("gated_rms_norm")
@on_device_of_first
def normalise(
    x: Tensor, gate: Tensor | None, weight: Tensor, groups: int, gate_first: bool, silu: bool, epsilon: float
) -> Tensor:
    """`gated_rms_norm` of equal slices of up to 8,192 channels.

    Args:
        x: `(…, width)`.
        gate: like x; None for none.
        weight: `(width,)`, any floating dtype; products and sums are float32.
        groups: how many slices.
        gate_first: the gate is applied before the norm.
        silu: the gate's activation is SiLU, otherwise sigmoid.
        epsilon: added to the mean square.

    Returns:
        x's shape and dtype, contiguous.
    """
    rows_x, rows_gate = _rows_of(x), None if gate is None else _rows_of(gate)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    given = rows_x if rows_gate is None else rows_gate
    options = _options("forward", x, rows_gate, groups, gate_first, silu)
    rows, width = rows_x.shape
    norm_forward_kernel[(triton.cdiv(rows, options["ROWS"]) * groups,)](
        rows_x, rows_x.stride(0), given, given.stride(0) // options["UNIT"], weight.contiguous(), y, rows, width,
        epsilon, **options,
    )  # fmt: skip
    return y


@normalise.register_fake
def _(x, gate, weight, groups, gate_first, silu, epsilon):
    return x.new_empty(x.shape)


@operator("gated_rms_norm_backward")
@on_device_of_first
def normalise_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    groups: int,
    gate_first: bool,
    silu: bool,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate (empty without one) and weight."""
    rows_dy, rows_x, rows_gate = _rows_of(dy), _rows_of(x), None if gate is None else _rows_of(gate)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_gate = dx.new_empty(0) if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    given = rows_x if rows_gate is None else rows_gate
    options = _options("backward", x, rows_gate, groups, gate_first, silu)
    rows, width = rows_x.shape
    blocks = triton.cdiv(rows, options["ROWS"] * _STEPS)
    part = torch.empty((blocks, width), dtype=torch.float32, device=x.device)
    norm_backward_kernel[(blocks * groups,)](
        rows_dy, rows_dy.stride(0), rows_x, rows_x.stride(0), given, given.stride(0) // options["UNIT"],
        weight.contiguous(), dx, d_gate, part, rows, width, epsilon, _STEPS, **options,
    )  # fmt: skip
    return dx, d_gate, part.sum(0).to(weight.dtype)


@normalise_backward.register_fake
def _(dy, x, gate, weight, groups, gate_first, silu, epsilon):
    d_gate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return x.new_empty(x.shape), d_gate, weight.new_empty(weight.shape)


def _save_for_backward(ctx, inputs, output) -> None:
    x, gate, weight, *ctx.rest = inputs
    ctx.save_for_backward(x, gate, weight)


def _autograd(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, gate, weight = ctx.saved_tensors  # once: activation checkpointing gives them away
    dx, d_gate, d_weight = normalise_backward(dy, x, gate, weight, *ctx.rest)
    return dx, None if gate is None else d_gate, d_weight, None, None, None, None


normalise.register_autograd(_autograd, setup_context=_save_for_backward)
