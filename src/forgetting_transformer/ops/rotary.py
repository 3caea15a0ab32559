"""Rotary position embedding (Su et al. 2021), half-split pairing: channel d turns with channel d + D/2.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import torch
from torch import Tensor


def rotate(x_BTHD: Tensor, position: int | Tensor = 0, base: float = 10_000.0) -> Tensor:
    """Turn the pair (x_d, x_{d+D/2}) at position t by the angle `t · base^(-2d/D)`.

    q·k of two rotated vectors depends on the distance of their positions only, so positions may start anywhere
    (left padding needs no correction).

    Args:
        x_BTHD: queries or keys, D even.
        position: position of x[:, 0], from which they rise by 1; or the position of every token, `(B, T)` or `(1, T)`.
        base: wavelengths run from 2π to 2π·base.

    Returns:
        `(B, T, H, D)` in x's dtype. Angles and rotation are computed in float32 or wider.
    """
    length, head_dim = x_BTHD.shape[1], x_BTHD.shape[3]
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary embedding pairs channels, so it must be even")
    dtype = torch.promote_types(x_BTHD.dtype, torch.float32)
    frequency_d = base ** (-torch.arange(0, head_dim, 2, device=x_BTHD.device, dtype=dtype) / head_dim)
    if isinstance(position, Tensor):
        angle = position.to(dtype)[..., None] * frequency_d  # (B, T, D/2)
    else:
        position_T = torch.arange(position, position + length, device=x_BTHD.device, dtype=dtype)
        angle = torch.outer(position_T, frequency_d)
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    first, second = x_BTHD.to(dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return rotated.to(x_BTHD.dtype)
