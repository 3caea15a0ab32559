"""Data-dependent token shift and RMS norm of heads: what FoX does to queries, keys and values before attention.

On a GPU Triton kernels do both at once for many tokens (`shift_norm_triton.py`), elsewhere PyTorch.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import torch
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.layers import norm
from forgetting_transformer.ops.layers.token_shift import token_shift

_MAX_KERNEL_HEAD_DIM = 256


def shift_norm(
    y_BTE: Tensor,
    num_heads: int,
    *,
    shift_BTH: Tensor | None = None,
    previous_BE: Tensor | None = None,
    begins_BT: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return `token_shift` of y with `alpha = sigmoid(shift)`, and then the `rms_norm` of every head.

    Args:
        y_BTE: the sequence.
        num_heads: H, a divisor of E.
        shift_BTH: logits of alpha. None for no shift.
        previous_BE: the token before the first. Default 0.
        begins_BT: True for the first token of each packed document, before which y counts as 0.
        weight: weight of the norm, `(E,)`, or `(E / H,)` for all heads. None for no norm.
        eps: added to mean squares; positive where there is a norm.

    Returns:
        `(B, T, E)` in y's dtype, computed in float32 or wider.

    Raises:
        ValueError: shapes do not fit, or a norm has no positive eps.
    """
    batch, length, width = y_BTE.shape
    if width % num_heads:
        raise ValueError(f"y has {width} channels; they must be a multiple of num_heads = {num_heads}")
    head_dim = width // num_heads
    if weight is not None and weight.shape not in ((width,), (head_dim,)):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be ({width},), or ({head_dim},) for all")
    for name, x, shape in (
        ("shift", shift_BTH, (batch, length, num_heads)),
        ("previous", previous_BE, (batch, width)),
        ("begins", begins_BT, (batch, length)),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}")
    if weight is not None and not eps > 0:
        raise ValueError(f"eps is {eps}; it must be positive where there is a weight")
    if shift_BTH is None and weight is None:
        return y_BTE
    if _takes_kernel(y_BTE, head_dim):
        kernel = torch.ops.forgetting_transformer.shift_norm
        given = (y_BTE, shift_BTH, previous_BE, begins_BT, weight, num_heads, eps)
        out = backends.attempt("shift_norm", kernel, *given)
        if out is not None:
            return out
    if shift_BTH is not None:
        alpha_BTH = shift_BTH.to(torch.promote_types(shift_BTH.dtype, torch.float32)).sigmoid()
        previous_BHD = None if previous_BE is None else previous_BE.unflatten(-1, (num_heads, -1))
        y_BTE = token_shift(y_BTE.unflatten(-1, (num_heads, -1)), alpha_BTH, previous_BHD, begins_BT).flatten(-2)
    if weight is None:
        return y_BTE
    if weight.shape[0] == width:
        return norm.rms_norm(y_BTE, weight, eps, num_heads)
    return norm.rms_norm(y_BTE.unflatten(-1, (num_heads, -1)), weight, eps).flatten(-2)


def _takes_kernel(y: Tensor, head_dim: int) -> bool:
    return y.is_cuda and kernel_serves(y.dtype, head_dim, y.shape[:-1].numel(), y.device.index)


def kernel_serves(dtype: torch.dtype, head_dim: int, tokens: int, device_index: int) -> bool:
    """Whether the Triton kernels can serve such inputs on this GPU, and pay."""
    fits = dtype.itemsize <= 4 and head_dim <= _MAX_KERNEL_HEAD_DIM and tokens >= backends.MIN_KERNEL_TOKENS
    return fits and backends.has_triton(
        "shift_norm", "forgetting_transformer.ops.layers.shift_norm_triton", device_index
    )
