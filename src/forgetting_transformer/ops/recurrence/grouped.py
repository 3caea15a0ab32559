"""Linear attention whose heads share queries and keys: which calls the Triton kernels of `ssd.py` serve.

Importing this imports no Triton. Axes: `forgetting_transformer/ops/__init__.py`.
"""

import torch
from torch import Tensor

from forgetting_transformer.ops import backends

_MODULE = "forgetting_transformer.ops.recurrence.ssd"
_KEY_DIMS, _VALUE_DIMS = (16, 32, 64, 128, 256), (16, 32, 64, 128)
# Numbers of a state, which programs hold whole in the shared memory of the smallest GPUs.
_MAX_STATE = 128 * 128
# Logarithm of a decay of 0, in float64 too; FLA's kernels take no -inf.
_LOG_ZERO = -1000.0


def serves(heads: int, groups: int, key_dim: int, value_dim: int, dtype: torch.dtype, device_index: int) -> bool:
    """Whether the kernels run such a call; plain values, so that compiled graphs can take the answer as a constant.

    Without groups of several heads FLA's kernels are made for the call: here each head would get its own scores.
    """
    if groups >= heads or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    fits = key_dim in _KEY_DIMS and value_dim in _VALUE_DIMS and key_dim * value_dim <= _MAX_STATE
    return fits and backends.has_triton("simple_gla", _MODULE, device_index)


# What `torch.compiler.assume_constant_result` sets, without importing the compiler.
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
    skip_H = None if skip_H is None else skip_H.float()
    state = None if initial_state_BHKV is None else initial_state_BHKV.float()
    arguments = (q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, step_BTH.float(), skip_H, state, document_BT, scale)
    if torch.compiler.is_compiling():
        return torch.ops.forgetting_transformer.ssd(*arguments)
    try:
        return torch.ops.forgetting_transformer.ssd(*arguments)
    except Exception as error:  # what a compiler raises is not one class
        if backends.is_failure_of_gpu(error) or not backends.is_raised_by_triton(error):
            raise
        reason = f"its kernels do not compile: {backends.describe_error(error)}"
        backends.rule_out("simple_gla", backends.TRITON, reason, backends.COMPILER_CURE)
        return None


def documents(cu_seqlens: Tensor, like_BTX: Tensor) -> Tensor:
    """The number of the document that each token belongs to, int32 `(B, T)`."""
    batch, length = like_BTX.shape[:2]
    token_A = torch.arange(batch * length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, token_A, right=True, out_int32=True).view(batch, length)


def end_with_documents(log_decay_BTH: Tensor, document_BT: Tensor) -> Tensor:
    """Log decays with which no state goes on from one document into the next."""
    begins_BT = torch.cat((torch.zeros_like(document_BT[:, :1]), document_BT.diff(dim=1)), dim=1) != 0
    return log_decay_BTH.masked_fill(begins_BT[..., None], _LOG_ZERO)


def for_every_head(x_BTGK: Tensor, heads: int) -> Tensor:
    """`(B, T, G, K)` to `(B, T, H, K)`: every head gets its group's vector. With one group, a view."""
    return x_BTGK[:, :, :, None].expand(-1, -1, -1, heads // x_BTGK.shape[2], -1).flatten(2, 3)
