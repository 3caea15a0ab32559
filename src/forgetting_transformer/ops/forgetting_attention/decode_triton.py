"""Decoding in Triton: attention from the newest tokens to a cache of all keys, with the keys split (Flash-Decoding).

A few queries at the end of a long sequence leave most of a GPU idle if a head's keys are walked by one program. So the
keys that count are split evenly over several: `split_kernel` attends within one part, `merge_kernel` adds the parts up,
always in the same order (Dao et al. 2023). Their number depends on shapes and on the GPU alone, so that a CUDA graph
may be captured.

The bias of a pair, Σ_{l=j+1..i} log f_l = c_i - c_j, is the difference of two stored running sums, taken in their
precision (float64) and rounded to float32 afterwards. Running sums never rise, so the tiles of keys that pruning leaves
out are the leftmost ones: every program counts them by looking at all tile edges at once, and what is left is what is
split.

All query heads that share a key head are computed together, from one reading of the keys: a tile has R rows, row r
being query r % M of the group's head r // M. Tensor cores want 16 rows; what is not used of them costs nothing that
shows, as reading the keys takes longer.

The operator `forgetting_transformer::forgetting_attention_decode` is opaque to torch.compile, knows its FLOPs, never
waits for the GPU and gives the same bits every time.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import forgetting_transformer.ops.forgetting_attention.triton  # noqa: F401  # registers the other operators
from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.forgetting_attention.constants import LOG2_E
from forgetting_transformer.ops.forgetting_attention.layout import (
    FUSED,
    ceil_div,
    empty_heads_like,
    multiprocessors,
    on_device_of_first,
    with_whole_channels,
)

# A part shorter than this costs more to merge than it saves.
_MIN_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 256


@triton.jit
def split_kernel(
    q_ptr, q_0, q_1, q_2, k_ptr, k_0, k_1, k_2, v_ptr, v_0, v_1, v_2, running_ptr, running_0, running_1, running_2,
    seq_start_ptr, seq_end_ptr, threshold_ptr, acc_ptr, maximum_ptr, total_ptr,
    groups, num_queries, num_keys, num_splits, scale,
    GROUP: tl.constexpr, HAS_START: tl.constexpr, HAS_END: tl.constexpr, HAS_THRESHOLD: tl.constexpr,
    HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from R rows to one part of the keys.

    Writes for every query and part, `(B·H·M, parts)`, the largest score `maximum` and the `total` of exp2(score -
    maximum), and `acc (B·H·M, parts, D)`, the values with these weights; nothing to `acc` where the total is 0.
    """
    split = tl.program_id(0) % num_splits
    num_row_tiles = tl.cdiv(GROUP * num_queries, ROWS)
    row_tile = tl.program_id(0) // num_splits % num_row_tiles
    z = (tl.program_id(0) // num_splits // num_row_tiles).to(tl.int64)
    sequence, key_head, zero = z // groups, z % groups, z * 0
    row = row_tile * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUP * num_queries
    head, query = key_head * GROUP + row // num_queries, row % num_queries

    first_key, end = 0, num_keys
    if HAS_START:
        first_key = tl.load(seq_start_ptr + sequence).to(tl.int32)
    if HAS_END:
        end = tl.load(seq_end_ptr + sequence).to(tl.int32)
    position = end - num_queries + query
    running = running_ptr + sequence * running_0
    running_row = running + head * running_1  # (R,)
    at_query = tl.load(running_row + (zero + position) * running_2, mask=is_row & (position >= 0), other=0.0)

    first_tile = first_key // BLOCK
    if HAS_THRESHOLD:
        # Tiles that every head of the group leaves out, as seen from the first query that is not padding, which sees
        # the largest biases.
        num_pruned = end
        first_query = tl.minimum(tl.maximum(end - num_queries, first_key), num_keys - 1)
        for member in range(GROUP):
            running_head = running + (key_head * GROUP + member) * running_1
            at_first = tl.load(running_head + (zero + first_query) * running_2).to(tl.float64)
            threshold = tl.load(threshold_ptr + (sequence * groups + key_head) * GROUP + member).to(tl.float64)
            count = 0
            for start in range(0, end, EDGES * BLOCK):
                edge = start + tl.arange(0, EDGES) * BLOCK + (BLOCK - 1)
                exists = edge < end
                at_edge = tl.load(running_head + (zero + edge) * running_2, mask=exists, other=0.0).to(tl.float64)
                # A threshold that is NaN leaves out nothing.
                count += tl.sum((exists & (at_first - at_edge < threshold)).to(tl.int32), axis=0)
            num_pruned = tl.minimum(num_pruned, count)
        first_tile = tl.maximum(first_tile, num_pruned)
    num_tiles = tl.maximum(tl.cdiv(end, BLOCK) - first_tile, 0)
    start = (first_tile + (num_tiles * split) // num_splits) * BLOCK
    stop = (first_tile + (num_tiles * (split + 1)) // num_splits) * BLOCK

    channel = tl.arange(0, HEAD_DIM)
    is_channel = channel < CHANNELS
    at = sequence * q_0 + head[:, None] * q_1 + query[:, None] * q_2 + channel[None, :]
    q = tl.load(q_ptr + at, mask=is_row[:, None] & is_channel[None, :], other=0.0)
    k, v = k_ptr + sequence * k_0 + key_head * k_1, v_ptr + sequence * v_0 + key_head * v_1
    maximum = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for n in tl.range(start, stop, BLOCK, num_stages=STAGES):
        offset = tl.arange(0, BLOCK)
        key = n + offset
        is_key = (key >= first_key) & (key < end)
        mask = is_key[:, None] & is_channel[None, :]
        # One base that moves, in 64 bits, and offsets that stay.
        k_tile = tl.load(k + (zero + n) * k_2 + (offset[:, None] * k_2 + channel[None, :]), mask=mask, other=0.0)
        v_tile = tl.load(v + (zero + n) * v_2 + (offset[:, None] * v_2 + channel[None, :]), mask=mask, other=0.0)
        at_key = tl.load(
            running_row[:, None] + (zero + key)[None, :] * running_2, mask=is_row[:, None] & is_key[None, :], other=0.0
        )
        bias = (at_query[:, None] - at_key).to(tl.float32) * 1.4426950408889634
        score = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        seen = is_key[None, :] & (key[None, :] <= position[:, None])
        score = tl.where(seen, score * scale + bias, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        weight = tl.math.exp2(score - new_maximum[:, None])
        rescale = tl.math.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        maximum = new_maximum

    part = ((sequence * groups * GROUP + head) * num_queries + query) * num_splits + split
    tl.store(maximum_ptr + part, maximum, mask=is_row)
    tl.store(total_ptr + part, total, mask=is_row)
    mask = (is_row & (total > 0.0))[:, None] & is_channel[None, :]
    tl.store(acc_ptr + part[:, None] * CHANNELS + channel[None, :], acc, mask=mask)


@triton.jit
def merge_kernel(
    acc_ptr, maximum_ptr, total_ptr, out_ptr, out_0, out_1, out_2, log_normaliser_ptr, heads, num_queries, num_splits,
    HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Output and log-normaliser (nats) of one query, from those of its parts."""
    z = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    maxima = tl.load(maximum_ptr + z * num_splits + split, mask=split < num_splits, other=-1e30)
    totals = tl.load(total_ptr + z * num_splits + split, mask=split < num_splits, other=0.0)
    maximum = tl.max(maxima, 0)
    total = tl.sum(totals * tl.math.exp2(maxima - maximum), 0)
    channel = tl.arange(0, HEAD_DIM)
    is_channel = channel < CHANNELS
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, num_splits, CHUNK):
        some = start + tl.arange(0, CHUNK)
        part = z * num_splits + some
        # A part that saw nothing wrote nothing.
        saw = tl.load(total_ptr + part, mask=some < num_splits, other=0.0) > 0.0
        weight = tl.math.exp2(tl.load(maximum_ptr + part, mask=saw, other=-1e30) - maximum)
        at = acc_ptr + part[:, None] * CHANNELS + channel[None, :]
        part_acc = tl.load(at, mask=saw[:, None] & is_channel[None, :], other=0.0)
        acc += tl.sum(part_acc * weight[:, None], 0)
    sees_nothing = total == 0.0
    safe_total = tl.where(sees_nothing, 1.0, total)
    query, head, sequence = z % num_queries, z // num_queries % heads, z // num_queries // heads
    out = out_ptr + sequence * out_0 + head * out_1 + query * out_2 + channel
    tl.store(out, (acc / safe_total).to(out_ptr.dtype.element_ty), mask=is_channel)
    log_normaliser = (maximum + tl.math.log2(safe_total)) * 0.6931471805599453
    tl.store(log_normaliser_ptr + z, tl.where(sees_nothing, float("-inf"), log_normaliser))


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
