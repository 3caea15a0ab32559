"""Root-mean-square normalisation (Zhang and Sennrich 2019), over the whole width or per group of channels; L2."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import backends

#: Activations of gates.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": F.silu}
_MAX_KERNEL_WIDTH = 8192
_KERNELS = "forgetting_transformer.ops.layers.norm_triton"


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


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    num_groups: int = 1,
    *,
    gate_first: bool = False,
    activation: str = "silu",
) -> Tensor:
    """Return `rms_norm(x) · act(gate)`, or with gate_first `rms_norm(x · act(gate))`; on a GPU in one Triton kernel.

    Args:
        x: `(..., width)`.
        gate: `(..., width)`. None for `rms_norm(x)`.
        weight, eps, num_groups: arguments of `rms_norm`; eps is positive.
        gate_first: apply the gate before the norm, as Mamba-2 does.
        activation: a name in `ACTIVATIONS`.

    Returns:
        Tensor with x's shape and dtype.

    Raises:
        ValueError: gate does not have x's shape, activation is no name in `ACTIVATIONS`, or eps is not positive.
    """
    if not eps > 0:
        raise ValueError(f"eps is {eps}; it must be positive")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}; it must be x's, {tuple(x.shape)}")
    if x.is_cuda and gated_norm_takes_kernel(x.dtype, x.shape[-1] // num_groups, x.device.index):
        kernel = torch.ops.forgetting_transformer.gated_rms_norm
        given = (x, gate, weight, num_groups, gate_first, activation == "silu", eps)
        out = backends.attempt("gated_norm", kernel, *given)
        if out is not None:
            return out
    if gate is None:
        return rms_norm(x, weight, eps, num_groups)
    gate = ACTIVATIONS[activation](gate)
    if gate_first:
        return rms_norm(x * gate, weight, eps, num_groups)
    return rms_norm(x, weight, eps, num_groups) * gate


def gated_norm_takes_kernel(dtype: torch.dtype, width: int, device_index: int) -> bool:
    """Whether the Triton kernel of `gated_rms_norm` can serve groups of this width on this GPU."""
    fits = dtype.itemsize <= 4 and width <= _MAX_KERNEL_WIDTH
    return fits and backends.has_triton("gated_norm", _KERNELS, device_index)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `x / sqrt(Σ x² + eps)` over the last axis, in x's shape and dtype, computed in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
