"""Causal softmax attention (Vaswani et al. 2017) with an optional sliding window and grouped key and value heads.

On GPUs, 16-bit queries go through the kernels of forgetting attention with gates of 1: they skip keys outside a window,
and give the same bits every time, unlike the backward pass of FlashAttention-2.

Everything else runs in PyTorch's `scaled_dot_product_attention`, in the dtype of the inputs: float32, for which our
kernels are not tuned, single queries, and inputs that the kernels do not take. Where the visible keys are not the plain
causal triangle it needs an explicit mask. Queries then go through in blocks, each with the keys that some query of the
block
sees: memory stays O(T + N), and a window of w costs O(T·w).

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forgetting_transformer.ops.arguments import check_attention
from forgetting_transformer.ops.forgetting_attention.dispatch import (
    attend_with_kernel,
    first_visible_key,
    takes_kernel,
)

# Queries per block: as many as the window is long, so that half of the pairs in a block's mask are used or more, but
# neither tiny kernels nor large masks.
_MIN_BLOCK_SIZE, _MAX_BLOCK_SIZE = 128, 1024
# Fused kernels read rows of a mask in steps of this many elements, and copy a mask whose rows do not fit.
_MASK_ALIGNMENT = 16


def causal_attention(
    q_BTHD: Tensor,
    k_BNGD: Tensor,
    v_BNGD: Tensor,
    *,
    window_size: int | None = None,
    seq_start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Attend with weights `softmax_j(q_i·k_j / √D)` over the keys i - window_size < j ≤ i.

    When there are fewer queries than keys (T < N, decoding), the queries are the last T positions.

    Args:
        q_BTHD: queries. float16, bfloat16, float32 or float64.
        k_BNGD: keys, N ≥ T, in q's dtype. H must be a multiple of G: query head h reads key head h // (H / G)
            (grouped-query attention, Ainslie et al. 2023).
        v_BNGD: values, like k.
        window_size: number of keys a query sees, itself included. None is all of them.
        seq_start: index `(B,)` of the first real token of each sequence, int64, in [0, N]: left padding. Keys before it
            are invisible whatever they hold (NaN included), queries before it give 0, and all their gradients are
            exactly 0.
        cu_seqlens: packed documents: where each begins, and N, `(documents + 1,)`, int32 or int64, rising from 0 to N.
            Needs B = 1 and T = N. A query sees its own document only.

    Returns:
        `(B, T, H, D)` in q's dtype. Differentiable in q, k and v.

    Raises:
        TypeError, ValueError: arguments that do not fit together. The message names the argument.
    """
    tensors = {"q": q_BTHD, "k": k_BNGD, "v": v_BNGD}
    check_attention(tensors, False, seq_start=seq_start, cu_seqlens=cu_seqlens, window_size=window_size)
    sm_scale = 1 / math.sqrt(q_BTHD.shape[-1])
    if q_BTHD.shape[1] > 1 and q_BTHD.dtype in (torch.float16, torch.bfloat16) and takes_kernel(q_BTHD):
        first_key_BT = first_visible_key(q_BTHD, k_BNGD, window=window_size, cu_seqlens=cu_seqlens, head_first=False)
        out_BTHD = attend_with_kernel(
            q_BTHD, k_BNGD, v_BNGD, None, head_first=False, sm_scale=sm_scale, seq_start_B=seq_start,
            first_key_BT=first_key_BT,
        )  # fmt: skip
        if out_BTHD is not None:
            return out_BTHD
    q_BHTD, k_BGND, v_BGND = (x.transpose(1, 2) for x in (q_BTHD, k_BNGD, v_BNGD))
    # Autocast would change the dtype, which is the caller's choice here.
    with torch.autocast(q_BHTD.device.type, enabled=False):
        begin_BT = None if cu_seqlens is None else first_visible_key(q_BHTD, k_BGND, cu_seqlens=cu_seqlens)
        out_BHTD = _attend(q_BHTD, k_BGND, v_BGND, window_size, seq_start, begin_BT, sm_scale)
    return out_BHTD.transpose(1, 2)


def _attend(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    window: int | None,
    seq_start_B: Tensor | None,
    begin_BT: Tensor | None,
    sm_scale: float,
) -> Tensor:
    """Attend through `scaled_dot_product_attention`, head first. `begin_BT`: where each query's document begins."""
    num_queries, num_keys = q_BHTD.shape[2], k_BGND.shape[2]
    first_query = num_keys - num_queries
    if window is not None:
        # Keys that the first query cannot see, no other can.
        num_unseen = max(0, first_query - window + 1)
        k_BGND, v_BGND = k_BGND[:, :, num_unseen:], v_BGND[:, :, num_unseen:]
        num_keys, first_query = num_keys - num_unseen, first_query - num_unseen
        if seq_start_B is not None:
            seq_start_B = (seq_start_B - num_unseen).clamp(min=0)
        if window >= num_keys:
            window = None
    if seq_start_B is not None:
        # A query in padding is left to see padding, and the zeros there make its output and all gradients exactly 0.
        padding_B1N1 = (torch.arange(num_keys, device=q_BHTD.device) < seq_start_B[:, None])[:, None, :, None]
        q_BHTD = q_BHTD.masked_fill(padding_B1N1[:, :, first_query:], 0)
        k_BGND, v_BGND = k_BGND.masked_fill(padding_B1N1, 0), v_BGND.masked_fill(padding_B1N1, 0)

    heads_per_group = q_BHTD.shape[1] // k_BGND.shape[1]
    if num_queries == 1:
        # Decoding reads each key once for its whole group of queries.
        mask = None if seq_start_B is None else _mask(q_BHTD, k_BGND, 0, first_query, window, seq_start_B)
        return F.scaled_dot_product_attention(
            q_BHTD, k_BGND, v_BGND, attn_mask=mask, scale=sm_scale, enable_gqa=heads_per_group > 1
        )
    # Not every fused kernel knows grouped heads, and where none does, all T·N scores would be stored.
    k_BHND, v_BHND = k_BGND, v_BGND
    if heads_per_group > 1:
        k_BHND, v_BHND = (x.repeat_interleave(heads_per_group, dim=1) for x in (k_BGND, v_BGND))
    if num_queries == num_keys and window is None and seq_start_B is None and begin_BT is None:
        return F.scaled_dot_product_attention(q_BHTD, k_BHND, v_BHND, is_causal=True, scale=sm_scale)
    return _attend_in_blocks(q_BHTD, k_BHND, v_BHND, window, seq_start_B, begin_BT, sm_scale)


def _attend_in_blocks(
    q_BHTD: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    window: int | None,
    seq_start_B: Tensor | None,
    begin_BT: Tensor | None,
    sm_scale: float,
) -> Tensor:
    num_queries, num_keys = q_BHTD.shape[2], k_BHND.shape[2]
    first_query = num_keys - num_queries
    block_size = _MAX_BLOCK_SIZE if window is None else min(max(window, _MIN_BLOCK_SIZE), _MAX_BLOCK_SIZE)
    attend = functools.partial(F.scaled_dot_product_attention, scale=sm_scale)
    # With a window and no padding nearly all blocks share one mask. Otherwise each has its own, and together they would
    # fill O(T·N) memory until the backward pass, so every block is computed again there.
    is_mask_shared = window is not None and seq_start_B is None and begin_BT is None
    if not is_mask_shared and num_queries > block_size and torch.is_grad_enabled():
        attend = functools.partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)

    mask, mask_layout, out_blocks = None, None, []
    for start in range(0, num_queries, block_size):
        q_BHtD = q_BHTD[:, :, start : start + block_size]
        position = first_query + start
        first_key = 0 if window is None else max(0, (position - window + 1) // _MASK_ALIGNMENT * _MASK_ALIGNMENT)
        keys = slice(first_key, position + q_BHtD.shape[2])
        k_BHnD, v_BHnD = k_BHND[:, :, keys], v_BHND[:, :, keys]
        layout = (q_BHtD.shape[2], position - first_key)
        if not is_mask_shared or layout != mask_layout:
            begin_Bt = None if begin_BT is None else begin_BT[:, start : start + block_size]
            mask = _mask(q_BHtD, k_BHnD, first_key, position, window, seq_start_B, begin_Bt)
            mask_layout = layout
        out_blocks.append(attend(q_BHtD, k_BHnD, v_BHnD, attn_mask=mask))
    return out_blocks[0] if len(out_blocks) == 1 else torch.cat(out_blocks, dim=2)


def _mask(
    q_BHtD: Tensor,
    k_BHnD: Tensor,
    first_key: int,
    first_query: int,
    window: int | None,
    seq_start_B: Tensor | None,
    begin_Bt: Tensor | None = None,
) -> Tensor:
    """Return the mask, 0 or -inf, for the scores of queries at `first_query`, ... and keys at `first_key`, ....

    Shape `(t, n)`, or `(B, 1, t, n)` with padding or packed documents, in q's dtype.
    """
    num_queries, num_keys = q_BHtD.shape[2], k_BHnD.shape[2]
    diagonal = first_query - first_key
    is_visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BHtD.device).tril(diagonal)
    if window is not None:
        is_visible = is_visible.triu(diagonal - window + 1)
    if begin_Bt is not None:
        key_n = torch.arange(first_key, first_key + num_keys, device=q_BHtD.device)
        is_visible = is_visible & (key_n >= begin_Bt[:, None, :, None])
    if seq_start_B is not None:
        query_t1 = torch.arange(first_query, first_query + num_queries, device=q_BHtD.device)[:, None]
        key_n = torch.arange(first_key, first_key + num_keys, device=q_BHtD.device)
        seq_start_B111 = seq_start_B[:, None, None, None]
        is_visible = is_visible & ((key_n >= seq_start_B111) | (query_t1 < seq_start_B111))
    return torch.zeros_like(is_visible, dtype=q_BHtD.dtype).masked_fill(~is_visible, -torch.inf)
