"""`silu(gate) · up` in Triton: the forward pass reads both halves of a row, the backward pass writes both in place.

TorchInductor joins the two gradients with a `cat`, whose kernel computes and reads both under masks for every element.
Here a tile is the same columns of both halves of a row, up to 4,096, 16 to a thread: loads of 16 bytes. Values are
computed in float32 and rounded once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.forgetting_attention.layout import FUSED, on_device_of_first, with_whole_channels

# Columns of a program, at most: 16 to a thread.
_MAX_BLOCK = 4096


@triton.jit
def swiglu_forward_kernel(h_ptr, h_row, out_ptr, width, BLOCK: tl.constexpr):
    """out `(rows, width)`, contiguous, from h `(rows, 2 · width)`, strides (h_row, 1). Grid: (rows, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    h_ptr += row * h_row
    gate = tl.load(h_ptr + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + width + column, mask=exists, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def swiglu_backward_kernel(d_out_ptr, d_out_row, h_ptr, h_row, dh_ptr, width, BLOCK: tl.constexpr):
    """dh `(rows, 2 · width)`, contiguous, from d_out `(rows, width)` and h, both strided as above. Grid as above."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    h_ptr += row * h_row
    d_out = tl.load(d_out_ptr + row * d_out_row + column, mask=exists, other=0.0).to(tl.float32)
    gate = tl.load(h_ptr + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + width + column, mask=exists, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = d_out * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = d_out * gate * sigmoid
    dh_ptr += row * width * 2
    tl.store(dh_ptr + column, d_gate.to(dh_ptr.dtype.element_ty), mask=exists)
    tl.store(dh_ptr + width + column, d_up.to(dh_ptr.dtype.element_ty), mask=exists)


def _rows(x: Tensor) -> Tensor:
    return with_whole_channels(x.reshape(-1, x.shape[-1]))


def _options(width: int) -> dict[str, Any]:
    block = min(_MAX_BLOCK, triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": max(1, block // 512), **FUSED}


@operator("swiglu")
@on_device_of_first
def gated(h: Tensor) -> Tensor:
    """`silu(gate) · up` `(…, F)` of h `(…, 2F)`, gate before up, any strides; in h's dtype, contiguous."""
    out, rows = _out_like(h), _rows(h)
    width = out.shape[-1]
    options = _options(width)
    grid = rows.shape[0], triton.cdiv(width, options["BLOCK"])
    swiglu_forward_kernel[grid](rows, rows.stride(0), out, width, **options)
    return out


def _out_like(h: Tensor) -> Tensor:
    return torch.empty((*h.shape[:-1], h.shape[-1] // 2), dtype=h.dtype, device=h.device)


@gated.register_fake
def _(h):
    return _out_like(h)


@operator("swiglu_backward")
@on_device_of_first
def gated_backward(d_out: Tensor, h: Tensor) -> Tensor:
    """The gradient of h, in its shape and dtype, contiguous."""
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    d_rows, rows = _rows(d_out), _rows(h)
    width = d_rows.shape[1]
    options = _options(width)
    grid = rows.shape[0], triton.cdiv(width, options["BLOCK"])
    swiglu_backward_kernel[grid](d_rows, d_rows.stride(0), rows, rows.stride(0), dh, width, **options)
    return dh


@gated_backward.register_fake
def _(d_out, h):
    return torch.empty(h.shape, dtype=h.dtype, device=h.device)


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx, d_out: Tensor) -> Tensor:
    return gated_backward(d_out, *ctx.saved_tensors)


gated.register_autograd(_autograd, setup_context=_save_for_backward)
