"""Choice between GPU kernels and PyTorch for a call, and the call of the kernels. Importing this imports no Triton.

triton.py chooses between its kernels and the Hopper kernels, which are written in Gluon.

`forgetting_attention` and `causal_attention`, which is forgetting attention whose gates are all 1, both go through
here.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.eager import runs_eagerly
from forgetting_transformer.ops.forgetting_attention.constants import STRETCH

#: Largest head dimension of the Triton kernels.
MAX_KERNEL_HEAD_DIM = 256
# Importing it imports the launches of whole sequences too, and registers the operators of both.
_KERNELS = "forgetting_transformer.ops.forgetting_attention.decode_triton"


def takes_kernel(q: Tensor) -> bool:
    """Whether the Triton kernels can serve these queries: on a GPU, but no float64 and no very wide heads."""
    fits = q.is_cuda and q.dtype != torch.float64 and q.shape[3] <= MAX_KERNEL_HEAD_DIM
    return fits and backends.has_triton("attention", _KERNELS, q.device.index)


def attend_with_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor | None,
    *,
    head_first: bool,
    sm_scale: float,
    seq_start_B: Tensor | None = None,
    first_key_BT: Tensor | None = None,
    threshold_BH: Tensor | None = None,
    log_tolerance_BH: Tensor | None = None,
) -> Tensor | None:
    """Forgetting attention with arguments as in `forgetting_attention`. Only where `takes_kernel`.

    Args:
        log_fgate: None is gates of 1, plain softmax attention.
        first_key_BT: result of `first_visible_key`.
        threshold_BH: nats, float32: the decay bias below which pairs may be left out.
        log_tolerance_BH: in its place, ln ε, float32, for the weight ε that each row may leave out; norms of queries
            and keys decide which pairs these are.

    Returns:
        The output in q's shape and dtype. None, after a warning, where Triton cannot compile the kernels.
    """
    arguments = (q, k, v, log_fgate, head_first, sm_scale, seq_start_B, first_key_BT, threshold_BH, log_tolerance_BH)
    return backends.attempt("attention", _launch, *arguments)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor | None,
    head_first: bool,
    sm_scale: float,
    seq_start_B: Tensor | None,
    first_key_BT: Tensor | None,
    threshold_BH: Tensor | None,
    log_tolerance_BH: Tensor | None,
) -> Tensor:
    head_axis, length_axis = (1, 2) if head_first else (2, 1)
    num_queries, num_keys = q.shape[length_axis], k.shape[length_axis]
    padding_BT, missing = None, 0
    if q.dtype.itemsize == 2 and _has_hopper_kernels(q.device.index, q.shape[3]):
        # These kernels take whole tiles. Invisible positions are multiplied by 0, and must not be NaN.
        if seq_start_B is not None and num_queries % STRETCH == num_keys % STRETCH == 0:
            padding_BN = torch.arange(num_keys, device=q.device) < seq_start_B[:, None]
            padding_BT = padding_BN[:, num_keys - num_queries :].unsqueeze(head_axis)
            q = q.masked_fill(padding_BT[..., None], 0.0)
            k, v = (x.masked_fill(padding_BN.unsqueeze(head_axis)[..., None], 0.0) for x in (k, v))
        sees_all = first_key_BT is None and seq_start_B is None
        if sees_all and num_queries >= 2 * STRETCH and (num_keys - num_queries) % STRETCH == 0:
            missing = -num_queries % STRETCH
    if missing:
        after = (0, missing) if head_first else (0, 0, 0, missing)
        q, k, v = (F.pad(x, (0, 0, *after)) for x in (q, k, v))
        log_fgate = None if log_fgate is None else F.pad(log_fgate, after)
    if log_fgate is None:
        gates = (*k.shape[:head_axis], q.shape[head_axis], *k.shape[head_axis + 1 : 3])
        log_fgate = torch.zeros((), dtype=torch.float32, device=q.device).expand(gates)
    if seq_start_B is not None:
        start_BT = seq_start_B.to(torch.int32)[:, None].expand(-1, num_queries)
        first_key_BT = start_BT if first_key_BT is None else torch.maximum(first_key_BT, start_BT)
    if first_key_BT is not None:
        first_key_BT = first_key_BT.contiguous()
    out = _attend(q, k, v, log_fgate, first_key_BT, threshold_BH, log_tolerance_BH, sm_scale, head_first)
    if missing:
        out = out.narrow(length_axis, 0, num_queries)
    if padding_BT is not None:  # its gradient may be NaN too
        out = out.masked_fill(padding_BT[..., None], 0.0)
    return out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    first_key_BT: Tensor | None,
    threshold_BH: Tensor | None,
    log_tolerance_BH: Tensor | None,
    sm_scale: float,
    head_first: bool,
) -> Tensor:
    """Through the operators, or past them where only autograd looks on."""
    if runs_eagerly(q, k, v, log_fgate):
        from forgetting_transformer.ops.forgetting_attention import triton as launcher

        arguments = q, k, v, log_fgate, first_key_BT, threshold_BH, log_tolerance_BH, sm_scale, head_first
        return launcher.attend(*arguments)[0]
    if not head_first:
        q, k, v, log_fgate = (x.transpose(1, 2) for x in (q, k, v, log_fgate))
    kernels = torch.ops.forgetting_transformer
    limit_BH, bounds = threshold_BH, (None, None, None)
    if log_tolerance_BH is not None:
        limit_BH = log_tolerance_BH
        bounds = kernels.forgetting_attention_bounds(q.detach(), k.detach(), first_key_BT, sm_scale)
    decay = kernels.forgetting_attention_decay(log_fgate.detach(), q.shape[2], limit_BH, *bounds, first_key_BT)
    out_BHTD, _ = kernels.forgetting_attention_forward(q, k, v, log_fgate, *decay, first_key_BT, sm_scale)
    return out_BHTD if head_first else out_BHTD.transpose(1, 2)


def _has_hopper_kernels(device_index: int | None, head_dim: int) -> bool:
    """Whether kernels for Hopper GPUs take 16-bit tensors of whole tiles; a constant to compiled graphs. None is a CPU,
    as under Triton's interpreter."""
    launcher = importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
    return device_index is not None and launcher.has_hopper_kernels(device_index, head_dim)


# the mark that `backends.has_triton` has too
_has_hopper_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def per_head(limit: float | Tensor | None, q: Tensor, head_first: bool = True) -> Tensor | None:
    """A limit of pruning as the kernels want it, float32 `(B, H)`; None stays None."""
    if limit is None:
        return None
    shape = (q.shape[0], q.shape[1 if head_first else 2])
    if not isinstance(limit, Tensor):
        return torch.full(shape, limit, dtype=torch.float32, device=q.device)
    return limit.detach().float().expand(shape)


def first_visible_key(
    q: Tensor, k: Tensor, *, window: int | None = None, cu_seqlens: Tensor | None = None, head_first: bool = True
) -> Tensor | None:
    """The first key that each query sees, `(B, T)` int32, with windows and documents; None if all see the first."""
    length_axis = 2 if head_first else 1
    num_queries, num_keys = q.shape[length_axis], k.shape[length_axis]
    if cu_seqlens is None and (window is None or window >= num_keys):
        return None
    query_T = torch.arange(num_keys - num_queries, num_keys, dtype=torch.int32, device=q.device)
    first_key_T = torch.zeros_like(query_T)
    if cu_seqlens is not None:
        starts = cu_seqlens.to(torch.int32)
        first_key_T = starts[torch.searchsorted(starts, query_T, right=True) - 1]
    if window is not None and window < num_keys:
        first_key_T = torch.maximum(first_key_T, query_T - (window - 1))
    return first_key_T.expand(q.shape[0], -1)


def attention_backend(use: backends.OpUse, dtype: torch.dtype, device: torch.device) -> str:
    """The backend that runs most of this use on tensors of whole tiles, one of `backends.BACKENDS["attention"]`."""
    if device.type != "cuda" or dtype == torch.float64 or use.key_dim > MAX_KERNEL_HEAD_DIM:
        return backends.PYTORCH
    if not use.is_gated and dtype == torch.float32:
        return backends.PYTORCH
    index = torch.cuda.current_device() if device.index is None else device.index
    if not backends.has_triton("attention", _KERNELS, index):
        return backends.PYTORCH
    return backends.HOPPER if dtype.itemsize == 2 and _has_hopper_kernels(index, use.key_dim) else backends.TRITON
