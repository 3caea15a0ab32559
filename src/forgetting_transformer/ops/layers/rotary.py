"""Rotary position embedding (Su et al. 2021), half-split pairing: channel d turns with channel d + D/2.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def rotate(x_BTHD: Tensor, position: int | Tensor = 0, base: float = 10_000.0, scaling: Sequence[float] = ()) -> Tensor:
    """Turn the pair (x_d, x_{d+D/2}) at position t by the angle `t · base^(-2d/D)`.

    q·k of two rotated vectors depends on the distance of their positions only, so positions may start anywhere
    (left padding needs no correction).

    Args:
        x_BTHD: queries or keys, D even.
        position: position of x[:, 0], from which they rise by 1; or the position of every token, `(B, T)` or `(1, T)`.
        base: wavelengths run from 2π to 2π·base.
        scaling: (factor,) divides all frequencies, as for a longer context; (factor, low, high, length) as Llama 3.1
            does it: those with wavelengths above length / low are divided, those below length / high are kept, and
            between them the share that is kept grows with the frequency.

    Returns:
        `(B, T, H, D)` in x's dtype. Angles and rotation are computed in float32 or wider.
    """
    length, head_dim = x_BTHD.shape[1], x_BTHD.shape[3]
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary embedding pairs channels, so it must be even")
    dtype = torch.promote_types(x_BTHD.dtype, torch.float32)
    if isinstance(position, Tensor):
        position_BT = position.to(dtype)
    else:
        position_BT = torch.arange(position, position + length, device=x_BTHD.device, dtype=dtype)[None]
    # TorchInductor would compute a sine and a cosine for every channel of every head again, in each kernel that turns.
    tables = _tables_at_once if torch.compiler.is_compiling() else _tables
    cos_BTD, sin_BTD = tables(position_BT, head_dim, float(base), [float(x) for x in scaling])
    cos_BT1D, sin_BT1D = cos_BTD[:, :, None], sin_BTD[:, :, None]
    first, second = x_BTHD.to(dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos_BT1D - second * sin_BT1D, first * sin_BT1D + second * cos_BT1D), dim=-1)
    return rotated.to(x_BTHD.dtype)


def _tables(position_BT: Tensor, head_dim: int, base: float, scaling: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, `(B, T, D/2)` each, in the dtype of the positions."""
    channel_D = torch.arange(0, head_dim, 2, device=position_BT.device, dtype=position_BT.dtype)
    frequency_D = base ** (-channel_D / head_dim)
    if scaling:
        factor, *bands = scaling
        kept_D = torch.zeros_like(frequency_D)
        if bands:
            low, high, length = bands
            kept_D = ((length / (2 * math.pi) * frequency_D - low) / (high - low)).clamp(0, 1)
        frequency_D = frequency_D * (kept_D + (1 - kept_D) / factor)
    angle_BTD = position_BT[..., None] * frequency_D
    return angle_BTD.cos(), angle_BTD.sin()


@torch.library.custom_op("forgetting_transformer::rotary_tables", mutates_args=())
def _tables_at_once(position_BT: Tensor, head_dim: int, base: float, scaling: Sequence[float]) -> tuple[Tensor, Tensor]:
    """`_tables` as one operation, which a compiler does not look into."""
    return _tables(position_BT, head_dim, base, scaling)


@_tables_at_once.register_fake
def _(position_BT: Tensor, head_dim: int, base: float, scaling: Sequence[float]) -> tuple[Tensor, Tensor]:
    table = position_BT.new_empty((*position_BT.shape, head_dim // 2))
    return table, torch.empty_like(table)
