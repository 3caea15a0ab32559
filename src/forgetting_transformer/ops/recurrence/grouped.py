"""Linear attention whose heads share queries and keys: calls that the Triton kernels of `ssd.py` serve.

Importing this imports no Triton. Axes: `forgetting_transformer/ops/__init__.py`.
"""

import torch
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.layers import short_convolution

_MODULE = "forgetting_transformer.ops.recurrence.convolved_ssd"  # which imports ssd.py
_KEY_DIMS, _VALUE_DIMS = (16, 32, 64, 128, 256), (16, 32, 64, 128)
# Numbers of a state, which programs hold whole in the shared memory of the smallest GPUs.
_MAX_STATE = 128 * 128
# Logarithm of a decay of 0, in float64 too; FLA's kernels take no -inf.
LOG_ZERO = -1000.0


def serves(heads: int, groups: int, key_dim: int, value_dim: int, dtype: torch.dtype, device_index: int) -> bool:
    """Whether the kernels run such a call; plain values, so that compiled graphs can take the answer as a constant.

    Without groups of several heads FLA's kernels are made for the call: here each head would get its own scores.
    """
    if groups >= heads or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    fits = key_dim in _KEY_DIMS and value_dim in _VALUE_DIMS and key_dim * value_dim <= _MAX_STATE
    return fits and backends.has_triton("simple_gla", _MODULE, device_index)


# the mark that `torch.compiler.assume_constant_result` sets, without importing the compiler.
serves._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    step_BTH: Tensor | None,
    skip_H: Tensor | None,
    initial_state_BHKV: Tensor | None,
    document_BT: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor] | None:
    """Output and final state; None, after a warning, where Triton cannot compile the kernels. Only where `serves`."""
    if step_BTH is None:
        step_BTH = torch.ones((), dtype=torch.float32, device=v_BTHV.device).expand(log_decay_BTH.shape)
    gates = (log_decay_BTH, step_BTH.float(), _float(skip_H), _float(initial_state_BHKV))
    kernel = torch.ops.forgetting_transformer.ssd
    return backends.attempt("simple_gla", kernel, q_BTGK, k_BTGK, v_BTHV, *gates, document_BT, scale)


def run_convolved(
    x_BTC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None,
    previous_BCW: Tensor | None,
    log_decay_BTH: Tensor,
    step_BTH: Tensor,
    skip_H: Tensor | None,
    initial_state_BHKV: Tensor | None,
    *,
    position_BT: Tensor | None = None,
    groups: int,
    key_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`recurrence` of what `silu(short_convolution(x))` gives: values, keys and queries, side by side in C.

    Keeps only x for the backward pass.

    Args:
        x_BTC, weight_C1W, bias_C, previous_BCW: of `short_convolution`.
        log_decay_BTH, step_BTH, skip_H, initial_state_BHKV, scale: of `recurrence`.
        position_BT: packed documents, as `short_convolution` takes them. No state passes from one into the next.
        groups, key_dim: G and K.

    Returns:
        Output `(B, T, H, V)`, final state, and the last inputs of the convolution. None where the kernels of one of the
        two do not serve the call: make two of it.
    """
    (length, heads), taps = log_decay_BTH.shape[1:], weight_C1W.shape[-1]
    value_dim = (x_BTC.shape[2] - 2 * groups * key_dim) // heads
    dtype, index = x_BTC.dtype, x_BTC.device.index
    if not x_BTC.is_cuda or length == 1 or not serves(heads, groups, key_dim, value_dim, dtype, index):
        return None
    if not short_convolution.kernel_serves(dtype, taps, 1, 0, index):
        return None
    with torch.autocast(x_BTC.device.type, enabled=False):
        gates = (log_decay_BTH, step_BTH.float(), _float(skip_H), _float(initial_state_BHKV))
        documents: tuple[Tensor | None, Tensor | None] = (None, None)
        if position_BT is not None:
            documents = (position_BT.int(), (position_BT == 0).cumsum(1, dtype=torch.int32))
        given = (x_BTC, weight_C1W, bias_C, previous_BCW, *gates, *documents, groups, key_dim, scale)
        return backends.attempt("simple_gla", torch.ops.forgetting_transformer.convolved_ssd, *given)


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def documents(cu_seqlens: Tensor, like_BTX: Tensor) -> Tensor:
    """The number of the document that each token belongs to, int32 `(B, T)`."""
    batch, length = like_BTX.shape[:2]
    token_A = torch.arange(batch * length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, token_A, right=True, out_int32=True).view(batch, length)


def end_with_documents(log_decay_BTH: Tensor, document_BT: Tensor) -> Tensor:
    """Log decays with which no state passes from one document into the next."""
    begins_BT = torch.cat((torch.zeros_like(document_BT[:, :1]), document_BT.diff(dim=1)), dim=1) != 0
    return log_decay_BTH.masked_fill(begins_BT[..., None], LOG_ZERO)


def for_every_head(x_BTGK: Tensor, heads: int) -> Tensor:
    """`(B, T, G, K)` to `(B, T, H, K)`: every head gets its group's vector. With one group, a view."""
    return x_BTGK[:, :, :, None].expand(-1, -1, -1, heads // x_BTGK.shape[2], -1).flatten(2, 3)
