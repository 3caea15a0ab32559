"""Root-mean-square normalisation (Zhang and Sennrich 2019), over the whole width or per group of channels; L2."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, num_groups: int = 1) -> Tensor:
    """Return `x / sqrt(mean(x²) + eps) · weight`, with means over `num_groups` equal slices of the last axis.

    Args:
        x: `(..., width)`.
        weight: `(width,)`.
        eps: added to the mean square.
        num_groups: number of slices, e.g. the number of heads; must divide width.

    Returns:
        Tensor with x's shape and dtype. Statistics and products are computed in float32 or wider.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    grouped = x.to(dtype).unflatten(-1, (num_groups, -1))
    normalised = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    return (normalised.flatten(-2) * weight.to(dtype)).to(x.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `x / sqrt(Σ x² + eps)` over the last axis, in x's shape and dtype, computed in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
