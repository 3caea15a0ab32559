"""Rotary position embedding (Su et al. 2021), half-split pairing: channel d turns with channel d + D/2.

Axes: B batch, T positions, H heads, D channels of a head.
"""

import torch
from torch import Tensor


def rotate(x_BTHD: Tensor, first_position: int = 0, base: float = 10_000.0) -> Tensor:
    """Turn the pair (x_d, x_{d+D/2}) at position t by the angle `t · base^(-2d/D)`.

    q·k of two rotated vectors depends on the distance of their positions only, so positions may start anywhere
    (left padding needs no correction).

    Args:
        x_BTHD: queries or keys, D even.
        first_position: position of x[:, 0].
        base: wavelengths run from 2π to 2π·base.

    Returns:
        `(B, T, H, D)` in x's dtype. Angles and rotation are computed in float32 or wider.
    """
    length, head_dim = x_BTHD.shape[1], x_BTHD.shape[3]
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary embedding pairs channels, so it must be even")
    dtype = torch.promote_types(x_BTHD.dtype, torch.float32)
    position_T = torch.arange(first_position, first_position + length, device=x_BTHD.device, dtype=dtype)
    frequency_d = base ** (-torch.arange(0, head_dim, 2, device=x_BTHD.device, dtype=dtype) / head_dim)
    angle_Td = torch.outer(position_T, frequency_d)
    cos_T1d, sin_T1d = angle_Td.cos()[:, None], angle_Td.sin()[:, None]
    first, second = x_BTHD.to(dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos_T1d - second * sin_T1d, first * sin_T1d + second * cos_T1d), dim=-1)
    return rotated.to(x_BTHD.dtype)
