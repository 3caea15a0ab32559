"""Short causal convolution along the sequence, one filter per channel (depthwise), as in Mamba and DeltaNet.

On a GPU one Triton kernel does the whole op (`short_convolution_triton.py`), elsewhere PyTorch.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.layers.norm import l2_norm

_MAX_KERNEL_TAPS, _MAX_KERNEL_HEAD_DIM = 4, 256
_EPSILON = 1e-6  # of l2_norm


def short_convolution(
    x_BTC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None = None,
    *,
    previous_BCW: Tensor | None = None,
    position_BT: Tensor | None = None,
    unit_heads: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return `y_t = silu(bias + Σ_w weight_w · x_{t-W+1+w})` per channel, and the last inputs, for the next call.

    The last tap weighs the current position. The weight has the layout of `nn.Conv1d(C, C, W, groups=C)`.

    Args:
        x_BTC: the sequence, T ≥ 1.
        weight_C1W: filters, any floating dtype.
        bias_C: added at every position, any floating dtype.
        previous_BCW: the W - 1 inputs before x[:, 0], oldest first: what an earlier call returned. Default 0.
        position_BT: packed documents: how many tokens of its document are before each. No input of one document enters
            another. Default: a row is one, and continues `previous`.
        unit_heads: then divide each of so many equal slices of y's channels by its length (`l2_norm`), at every
            position. 0 for none.

    Returns:
        y `(B, T, C)` in x's dtype, and the last inputs `(B, C, W - 1)` in x's dtype, zeros on the left where
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
    if unit_heads and channels % unit_heads:
        raise ValueError(f"unit_heads is {unit_heads}; it must be a divisor of x's {channels} channels, or 0")
    previous_shape = (batch, channels, weight_C1W.shape[-1] - 1)
    if previous_BCW is not None and previous_BCW.shape != previous_shape:
        raise ValueError(
            f"previous has shape {tuple(previous_BCW.shape)}; it must be {previous_shape}, "
            "the W - 1 inputs before x of every channel"
        )
    if position_BT is not None:
        if position_BT.shape != (batch, length):
            raise ValueError(
                f"position has shape {tuple(position_BT.shape)}; it must be {(batch, length)}, one per token of x"
            )
        position_BT = position_BT.int()
    given = (x_BTC, weight_C1W, bias_C, previous_BCW, position_BT, unit_heads)
    if x_BTC.is_cuda and kernel_serves(
        x_BTC.dtype, weight_C1W.shape[-1], channels // max(1, unit_heads), unit_heads, x_BTC.device.index
    ):
        kernel = torch.ops.forgetting_transformer.short_convolution
        result = backends.attempt("short_convolution", kernel, *given, _EPSILON)
        if result is not None:
            return result
    return _in_pytorch(*given)


def kernel_serves(dtype: torch.dtype, taps: int, head_dim: int, unit_heads: int, device_index: int) -> bool:
    """Whether the Triton kernels can serve such inputs on this GPU."""
    fits = (
        dtype.itemsize <= 4 and 1 <= taps <= _MAX_KERNEL_TAPS and (not unit_heads or head_dim <= _MAX_KERNEL_HEAD_DIM)
    )
    module = "forgetting_transformer.ops.layers.short_convolution_triton"
    return fits and backends.has_triton("short_convolution", module, device_index)


def _in_pytorch(
    x_BTC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None,
    previous_BCW: Tensor | None,
    position_BT: Tensor | None,
    unit_heads: int,
) -> tuple[Tensor, Tensor]:
    batch, length, channels = x_BTC.shape
    if previous_BCW is None:
        previous_BCW = x_BTC.new_zeros(batch, channels, weight_C1W.shape[-1] - 1)
    inputs_BCS = torch.cat((previous_BCW.to(x_BTC.dtype), x_BTC.transpose(1, 2)), dim=-1)
    weight_C1W, bias_C = weight_C1W.to(x_BTC.dtype), None if bias_C is None else bias_C.to(x_BTC.dtype)
    if position_BT is None:
        y_BTC = F.conv1d(inputs_BCS, weight_C1W, bias_C, groups=channels).transpose(1, 2)
    else:
        # Tap by tap, without the inputs of other documents.
        last = weight_C1W.shape[-1] - 1
        taps = (weight_C1W[:, 0, w] * inputs_BCS[..., w : w + length].transpose(1, 2) for w in range(last + 1))
        kept = (y.masked_fill((position_BT < last - w)[..., None], 0) for w, y in enumerate(taps))
        y_BTC = sum(kept, torch.zeros_like(x_BTC) if bias_C is None else bias_C)
    y_BTC = F.silu(y_BTC)
    if unit_heads:
        y_BTC = l2_norm(y_BTC.unflatten(-1, (unit_heads, -1)), _EPSILON).flatten(-2)
    # A copy: a view would keep the whole sequence alive in a cache.
    return y_BTC, inputs_BCS[..., length:].clone()
