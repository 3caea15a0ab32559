"""RMSNorm of a residual stream in Triton, with the addition before it and the gradient that goes around it.

A tile is a whole row, in registers, with 16 numbers to a thread forward and 8 backward: a mean needs no second look.
Backward, a program adds the gradients of the residual stream and of the norm: each is read once, and their sum is
written once, and once more in the branch's dtype. Gradients of the weight are sums over
rows: every program leaves its part, and the parts are added in a fixed order. So the same inputs give the same bits
every time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.forgetting_attention.layout import FUSED, on_device_of_first, with_whole_channels

# Columns of a row that a warp has: 8 to a thread in the backward pass, which has more tensors in registers.
_COLUMNS_PER_WARP = {"forward": 512, "backward": 256}
# Programs of the backward pass, each with its part of the weight's gradient: two for a multiprocessor of an H100 or
# H200, which run at the same time. It is the same on every GPU, since the number of parts changes bits.
_PROGRAMS = 264
# Weights of a program that adds the parts.
_SUM_BLOCK = 32


@triton.jit
def residual_norm_forward_kernel(
    x_ptr, x_row, branch_ptr, branch_row, weight_ptr, total_ptr, y_ptr, scale_ptr, width, eps,
    HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of total = x + branch, rounded to its dtype, scale = 1 / sqrt(mean(total²) + eps), y. Grid: rows.

    x, branch `(rows, width)`, strides (x_row, 1) and (branch_row, 1); total, y the same, contiguous; weight
    `(width,)`; scale `(rows,)` float32. Without a branch total is x and not written.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < width
    x = tl.load(x_ptr + row * x_row + column, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        x += tl.load(branch_ptr + row * branch_row + column, mask=exists, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + column, total, mask=exists)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    tl.store(scale_ptr + row, scale)
    tl.store(y_ptr + row * width + column, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def residual_norm_backward_kernel(
    dy_ptr, dy_row, d_total_ptr, d_total_row, x_ptr, x_row, weight_ptr, scale_ptr, dx_ptr, d_branch_ptr, part_ptr,
    rows, width, rows_per_program,
    HAS_TOTAL: tl.constexpr, HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of rows_per_program rows. Grid: programs.

    x is the total of `residual_norm_forward_kernel`. dy and d_total `(rows, width)`, the gradients of y and of total,
    with strides as x has; dx and d_branch, the same sum in two dtypes, contiguous; part `(programs, width)` float32,
    sums over a program's rows of the gradient of weight.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    exists = column < width
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    first = program * rows_per_program
    for step in tl.range(0, tl.minimum(rows_per_program, rows - first), num_stages=STAGES):
        row = first.to(tl.int64) + step
        x = tl.load(x_ptr + row * x_row + column, mask=exists, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_row + column, mask=exists, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        normed = x * scale
        d_weight += dy * normed
        dy = dy * weight
        dx = (dy - normed * (tl.sum(dy * normed) / width)) * scale
        if HAS_TOTAL:
            dx += tl.load(d_total_ptr + row * d_total_row + column, mask=exists, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask=exists)
        if HAS_BRANCH:
            tl.store(d_branch_ptr + row * width + column, dx.to(d_branch_ptr.dtype.element_ty), mask=exists)
    tl.store(part_ptr + program.to(tl.int64) * width + column, d_weight, mask=exists)


@triton.jit
def sum_kernel(part_ptr, d_weight_ptr, parts, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The gradients of BLOCK weights from `(parts, width)`, in d_weight's dtype. Grid: blocks of columns."""
    part = tl.arange(0, PARTS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = (part < parts)[:, None] & (column < width)[None, :]
    d_weight = tl.sum(tl.load(part_ptr + part[:, None] * width + column[None, :], mask=exists, other=0.0), axis=0)
    tl.store(d_weight_ptr + column, d_weight.to(d_weight_ptr.dtype.element_ty), mask=column < width)


def _rows(x: Tensor) -> Tensor:
    return with_whole_channels(x.reshape(-1, x.shape[-1]))


def _options(kernel: str, width: int) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    options = {"BLOCK": block, "num_warps": min(16, max(1, block // _COLUMNS_PER_WARP[kernel])), **FUSED}
    # Rows in flight, as many as the shared memory of every GPU has room for.
    return options | {"STAGES": min(3, 1 + 4096 // block)} if kernel == "backward" else options


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _results_like(x: Tensor, branch: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0) if branch is None else _empty(x, torch.promote_types(x.dtype, branch.dtype))
    return _empty(x, dtype), total, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


@operator("residual_norm")
@on_device_of_first
def normalise(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the RMSNorm of x + branch, that sum, and what the rows were multiplied by.

    Args:
        x: `(…, E)`, any strides.
        branch: as x, of any floating dtype; None to add nothing. The sum is then empty.
        weight: `(E,)`.
        eps: added to mean squares.
        dtype: dtype of y.
    """
    y, total, scale = _results_like(x, branch, dtype)
    rows = _rows(x)
    added = rows if branch is None else _rows(branch)
    residual_norm_forward_kernel[(rows.shape[0],)](
        rows, rows.stride(0), added, added.stride(0), weight.contiguous(), total, y, scale, rows.shape[1], eps,
        HAS_BRANCH=branch is not None, **_options("forward", rows.shape[1]),
    )  # fmt: skip
    return y, total, scale


@normalise.register_fake
def _(x, branch, weight, eps, dtype):
    return _results_like(x, branch, dtype)


@operator("residual_norm_backward")
@on_device_of_first
def normalise_backward(
    dy: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, branch and weight.

    Args:
        dy, d_total: gradients of y and of the sum; None where that has no use.
        total: the sum, or x where nothing was added.
        weight, scale: as of `normalise`.
        dtype: dtype of x.
        branch_dtype: dtype of branch; None without one. The gradient is then empty.
    """
    dx, d_branch, d_weight = _gradients_like(total, weight, dtype, branch_dtype)
    dy, rows = _rows(dy), _rows(total)
    around = rows if d_total is None else _rows(d_total)
    count, width = rows.shape
    rows_per_program = max(1, triton.cdiv(count, _PROGRAMS))
    part = torch.empty((triton.cdiv(count, rows_per_program), width), dtype=torch.float32, device=dy.device)
    residual_norm_backward_kernel[(part.shape[0],)](
        dy, dy.stride(0), around, around.stride(0), rows, rows.stride(0), weight.contiguous(), scale, dx, d_branch,
        part, count, width, rows_per_program,
        HAS_TOTAL=d_total is not None, HAS_BRANCH=branch_dtype is not None, **_options("backward", width),
    )  # fmt: skip
    sum_parts(part, d_weight)
    return dx, d_branch, d_weight


def sum_parts(part: Tensor, total: Tensor) -> None:
    """Write the sum over rows of part `(parts, width)`, float32, into total `(width,)`, always in the same order."""
    parts, width = part.shape
    sum_kernel[(triton.cdiv(width, _SUM_BLOCK),)](
        part, total, parts, width, PARTS=triton.next_power_of_2(max(1, parts)), BLOCK=_SUM_BLOCK, num_warps=8, **FUSED
    )


def _gradients_like(
    total: Tensor, weight: Tensor, dtype: torch.dtype, branch_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    d_branch = total.new_empty(0) if branch_dtype is None else _empty(total, branch_dtype)
    return _empty(total, dtype), d_branch, _empty(weight, weight.dtype)


@normalise_backward.register_fake
def _(dy, d_total, total, weight, scale, dtype, branch_dtype):
    return _gradients_like(total, weight, dtype, branch_dtype)


class ResidualNorm(torch.autograd.Function):
    """`normalise` with its gradients. A Function, since an operator of torch.library may not return what it was given.

    Where nothing is added, x itself is the residual stream, so that its gradient from there comes back here.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, goes_on: bool
    ) -> Any:
        """Return y, and with goes_on the residual stream too."""
        y, total, scale = torch.ops.forgetting_transformer.residual_norm(x, branch, weight, eps, dtype)
        if branch is None:
            total = x.view_as(x)
        ctx.save_for_backward(x if branch is None else total, weight, scale)
        ctx.dtype, ctx.branch_dtype = x.dtype, None if branch is None else branch.dtype
        return (y, total) if goes_on else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor, d_total: Tensor | None = None) -> tuple[Tensor | None, ...]:
        dx, d_branch, d_weight = torch.ops.forgetting_transformer.residual_norm_backward(
            dy, d_total, *ctx.saved_tensors, ctx.dtype, ctx.branch_dtype
        )
        return dx, None if ctx.branch_dtype is None else d_branch, d_weight, None, None, None
