"""Decoding in Triton: the operator `forgetting_transformer::forgetting_attention_decode` and its launches.

The operator is opaque to torch.compile, knows its FLOPs, never waits for the GPU and gives the same bits every time.
The number of parts that keys are split into depends on shapes and on the GPU alone, so that a CUDA graph may be
captured.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.forgetting_attention.constants import LOG2_E
from forgetting_transformer.ops.forgetting_attention.decode_kernels import merge_kernel, split_kernel
from forgetting_transformer.ops.forgetting_attention.layout import (
    FUSED,
    ceil_div,
    empty_heads_like,
    multiprocessors,
    on_device_of_first,
    with_whole_channels,
)
from forgetting_transformer.ops.forgetting_attention.triton import attention_flops

# A part shorter than this costs more to merge than it saves.
_MIN_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 256


@operator("forgetting_attention_decode")
@on_device_of_first
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_log_fgate: Tensor,
    threshold: Tensor | None,
    seq_start: Tensor | None,
    seq_end: Tensor | None,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output `(B, H, T, D)`, in memory `(B, T, H, D)`, and log-normalisers `(B, H, T)`, nats, float32.

    Args:
        q: `(B, H, T, D)`, D up to 256.
        k, v: `(B, G, N, D)`, H a multiple of G.
        cum_log_fgate: `(B, H, N)`, float64 or float32.
        threshold: `(B, H)` float32, keys whose decay bias (nats) is below it may be left out; None leaves out nothing.
        seq_start: `(B,)`, the first key that is visible; None is 0.
        seq_end: `(B,)`, one past the last; None is N. The queries are the T positions before it.
    """
    q, k, v = (with_whole_channels(x) for x in (q, k, v))
    batch, heads, num_queries, head_dim = q.shape
    groups, num_keys = k.shape[1:3]
    tiles = _tiles(q)
    num_programs = batch * groups * ceil_div(heads // groups * num_queries, tiles["ROWS"])
    num_splits = _num_splits(num_programs, num_keys, _num_slots(q))
    parts = (batch, heads, num_queries, num_splits)
    acc = torch.empty(*parts, head_dim, dtype=torch.float32, device=q.device)
    maximum, total = (torch.empty(parts, dtype=torch.float32, device=q.device) for _ in range(2))
    out, log_normaliser = _outputs(q)
    split_kernel[(num_programs * num_splits,)](
        q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], cum_log_fgate, *cum_log_fgate.stride(),
        seq_start, seq_end, None if threshold is None else threshold.contiguous(), acc, maximum, total,
        groups, num_queries, num_keys, num_splits, sm_scale * LOG2_E,
        GROUP=heads // groups, HAS_START=seq_start is not None, HAS_END=seq_end is not None,
        HAS_THRESHOLD=threshold is not None, CHANNELS=head_dim, **tiles,
    )  # fmt: skip
    merge_kernel[(batch * heads * num_queries,)](
        acc, maximum, total, out, *out.stride()[:3], log_normaliser, heads, num_queries, num_splits,
        HEAD_DIM=tiles["HEAD_DIM"], CHANNELS=head_dim, SPLITS=triton.next_power_of_2(num_splits), CHUNK=16,
        num_warps=4 if head_dim > 64 else 2, **FUSED,
    )  # fmt: skip
    return out, log_normaliser


@decode.register_fake
def _(q, k, v, cum_log_fgate, threshold, seq_start, seq_end, sm_scale):
    return _outputs(q)


@register_flop_formula(torch.ops.forgetting_transformer.forgetting_attention_decode)
def _decode_flops(q_shape, k_shape, *args, **kwargs) -> int:
    """Two products over the causal pairs, as if nothing were pruned or hidden."""
    return attention_flops(q_shape, k_shape)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_heads_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _num_splits(num_programs: int, num_keys: int, num_slots: int) -> int:
    """Parts that keys are split into: as many as fill the GPU once, of at least `_MIN_KEYS_PER_SPLIT` keys."""
    return max(1, min(num_slots // num_programs, ceil_div(num_keys, _MIN_KEYS_PER_SPLIT), _MAX_SPLITS))


def _num_slots(q: Tensor) -> int:
    """Programs that run at once: registers allow three on a multiprocessor, two where a tile is wide."""
    return multiprocessors(q.device) * (3 if q.shape[3] <= 64 and q.element_size() == 2 else 2)


def _tiles(q: Tensor) -> dict[str, Any]:
    """Launch options of `split_kernel`."""
    head_dim = max(16, triton.next_power_of_2(q.shape[3]))
    # Measured on an H200 in 16 bits; what is loaded ahead fits in the 99 KiB of shared memory that the smallest GPUs
    # have.
    if q.element_size() == 2:
        block, stages = (128, 2) if head_dim <= 64 else (32, 3 if head_dim == 128 else 2)
    else:
        block, stages = max(16, min(64, 4096 // head_dim)), 2
    edges = 1024 if q.element_size() == 2 else 256  # more would take the registers that float32 products need
    return {
        "HEAD_DIM": head_dim, "ROWS": 16, "BLOCK": block, "EDGES": edges, "STAGES": stages, "PRECISION": "ieee",
        "num_warps": 4, **FUSED,
    }  # fmt: skip
