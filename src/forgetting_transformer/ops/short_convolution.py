"""Short causal convolution along the sequence, one filter per channel (depthwise), as in Mamba and DeltaNet.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def short_convolution(
    x_BTC: Tensor, weight_C1W: Tensor, bias_C: Tensor | None = None, *, previous_BCW: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `y_t = bias + Σ_w weight_w · x_{t-W+1+w}` per channel, and the last inputs, which the next call needs.

    The last tap weighs the current position. The weight has the layout of `nn.Conv1d(C, C, W, groups=C)`.

    Args:
        x_BTC: the sequence, T ≥ 1.
        weight_C1W: filters.
        bias_C: added at every position.
        previous_BCW: the W - 1 inputs before x[:, 0], oldest first: what an earlier call returned. Default 0.

    Returns:
        y `(B, T, C)`, without an activation, and the last inputs `(B, C, W - 1)` in x's dtype, zeros on the left where
        there were fewer.
    """
    batch, length, channels = x_BTC.shape
    if weight_C1W.ndim != 3 or weight_C1W.shape[:2] != (channels, 1):
        raise ValueError(
            f"weight has shape {tuple(weight_C1W.shape)}; it must be ({channels}, 1, W), one filter per channel of x"
        )
    if bias_C is not None and bias_C.shape != (channels,):
        raise ValueError(f"bias has shape {tuple(bias_C.shape)}; it must be ({channels},), one entry per channel of x")
    if length == 0:
        raise ValueError(f"x has shape {tuple(x_BTC.shape)}; it must have at least one position")
    previous_shape = (batch, channels, weight_C1W.shape[-1] - 1)
    if previous_BCW is None:
        previous_BCW = x_BTC.new_zeros(previous_shape)
    elif previous_BCW.shape != previous_shape:
        raise ValueError(
            f"previous has shape {tuple(previous_BCW.shape)}; it must be {previous_shape}, "
            "the W - 1 inputs before x of every channel"
        )
    inputs_BCS = torch.cat((previous_BCW.to(x_BTC.dtype), x_BTC.transpose(1, 2)), dim=-1)
    y_BCT = F.conv1d(inputs_BCS, weight_C1W, bias_C, groups=channels)
    # A copy: a view would keep the whole sequence alive in a cache.
    return y_BCT.transpose(1, 2), inputs_BCS[..., length:].clone()
