"""Which calls the Triton kernels serve, and how they are called. Importing this imports no Triton.

`forgetting_attention` and `causal_attention`, which is forgetting attention whose gates are all 1, both go through
here.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import importlib

import torch
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.eager import runs_eagerly

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
    is_bounded: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """Forgetting attention with arguments as in `forgetting_attention`. Only where `takes_kernel`.

    Args:
        log_fgate: None is gates of 1, plain softmax attention.
        first_key_BT: what `first_visible_key` returned.
        threshold_BH: nats, float32: the decay bias below which pairs may be left out.
        is_bounded: threshold_BH is the logarithm of the weight that each row may leave out, and norms of queries and
            keys are to say what that is.

    Returns:
        The output in q's shape and dtype, and the log-normalisers `(B, H, T)`, nats, float32. None, after a warning,
        where Triton cannot compile the kernels.
    """
    arguments = (q, k, v, log_fgate, head_first, sm_scale, seq_start_B, first_key_BT, threshold_BH, is_bounded)
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
    is_bounded: bool,
) -> tuple[Tensor, Tensor]:
    head_axis, length_axis = (1, 2) if head_first else (2, 1)
    num_queries = q.shape[length_axis]
    if log_fgate is None:
        gates = (*k.shape[:head_axis], q.shape[head_axis], *k.shape[head_axis + 1 : 3])
        log_fgate = torch.zeros((), dtype=torch.float32, device=q.device).expand(gates)
    if seq_start_B is not None:
        start_BT = seq_start_B.to(torch.int32)[:, None].expand(-1, num_queries)
        first_key_BT = start_BT if first_key_BT is None else torch.maximum(first_key_BT, start_BT)
    if first_key_BT is not None:
        first_key_BT = first_key_BT.contiguous()
    if runs_eagerly(q, k, v, log_fgate):
        from forgetting_transformer.ops.forgetting_attention import triton as launcher

        return launcher.attend(q, k, v, log_fgate, first_key_BT, threshold_BH, is_bounded, sm_scale, head_first)
    if not head_first:
        q, k, v, log_fgate = (x.transpose(1, 2) for x in (q, k, v, log_fgate))
    kernels = torch.ops.forgetting_transformer
    bounds = (None, None, None)
    if is_bounded:
        bounds = kernels.forgetting_attention_bounds(q.detach(), k.detach(), first_key_BT, sm_scale)
    decay = kernels.forgetting_attention_decay(log_fgate.detach(), num_queries, threshold_BH, *bounds, first_key_BT)
    out_BHTD, log_normaliser_BHT = kernels.forgetting_attention_forward(
        q, k, v, log_fgate, *decay, first_key_BT, sm_scale
    )
    return out_BHTD if head_first else out_BHTD.transpose(1, 2), log_normaliser_BHT


def in_layout_of_caller(
    out_BHTD: Tensor, log_normaliser_BHT: Tensor | None, head_first: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Result of an op: the output and, if wanted, the log-normalisers, with the axes that the caller uses."""
    return returned(out_BHTD if head_first else out_BHTD.transpose(1, 2), log_normaliser_BHT, head_first)


def returned(out: Tensor, log_normaliser_BHT: Tensor | None, head_first: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Result of an op whose output has the caller's axes already."""
    if log_normaliser_BHT is None:
        return out
    return out, log_normaliser_BHT if head_first else log_normaliser_BHT.transpose(1, 2)


def threshold_tensor(threshold: float | Tensor | None, q: Tensor, head_first: bool = True) -> Tensor | None:
    """A threshold as the kernels want it, float32 `(B, H)`; None stays None."""
    if threshold is None:
        return None
    shape = (q.shape[0], q.shape[1 if head_first else 2])
    if not isinstance(threshold, Tensor):
        return torch.full(shape, threshold, dtype=torch.float32, device=q.device)
    return threshold.detach().float().expand(shape)


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
    launcher = importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
    on_hopper = use.window is None and not use.packed and dtype.itemsize == 2 and launcher.has_gluon(index, use.key_dim)
    return backends.GLUON if on_hopper else backends.TRITON
