"""RMSNorm of a residual stream, with the addition of a branch before it.

On a GPU Triton kernels do it for many tokens (`residual_norm_triton.py`), elsewhere PyTorch.
"""

from typing import Any

import torch
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.layers import norm

_MAX_KERNEL_WIDTH = 8192


def wide_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm.rms_norm` for rows as wide as a residual stream: one program of the kernel has one row."""
    if _takes_kernel(x, x.dtype):
        y = _with_kernel(x, None, weight, eps, x.dtype, False)
        if y is not None:
            return y
    return norm.rms_norm(x, weight, eps)


def add_rms_norm(residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of `residual + branch`, and this sum, which is the residual stream from here on.

    Read the sum from the second result, also where there is no branch: the gradient of the residual
    stream is then added where the gradient of the norm is computed.

    Args:
        residual: `(..., E)`.
        branch: as residual, of any floating dtype. None adds nothing.
        weight: `(E,)`.
        eps: added to the mean square.

    Returns:
        The norm `(..., E)` and the sum. Both have the dtype that the sum has in PyTorch, and statistics and products
        are computed in float32 or wider. Under autocast on a GPU the norm may have autocast's dtype instead, to which
        a linear layer would round it first.
    """
    dtype = residual.dtype if branch is None else torch.promote_types(residual.dtype, branch.dtype)
    if _takes_kernel(residual, dtype):
        if torch.is_autocast_enabled(residual.device.type):
            dtype = torch.get_autocast_dtype(residual.device.type)
        results = _with_kernel(residual, branch, weight, eps, dtype, True)
        if results is not None:
            return results
    if branch is not None:
        residual = residual + branch
    return norm.rms_norm(residual, weight, eps), residual


def _takes_kernel(x: Tensor, dtype: torch.dtype) -> bool:
    return x.is_cuda and kernel_serves(dtype, x.shape[-1], x.shape[:-1].numel(), x.device.index)


def kernel_serves(dtype: torch.dtype, width: int, tokens: int, device_index: int) -> bool:
    """Whether the Triton kernels can serve such inputs on this GPU, and pay."""
    fits = dtype.itemsize <= 4 and width <= _MAX_KERNEL_WIDTH and tokens >= backends.MIN_KERNEL_TOKENS
    return fits and backends.has_triton(
        "residual_norm", "forgetting_transformer.ops.layers.residual_norm_triton", device_index
    )


def _with_kernel(*arguments: Any) -> Any:
    from forgetting_transformer.ops.layers.residual_norm_triton import ResidualNorm

    return backends.attempt("residual_norm", ResidualNorm.apply, *arguments)
