"""Attention from new tokens to those in a cache.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forgetting_transformer.model.generation.cache import AttentionCache, Held, log_fgate_of
from forgetting_transformer.ops.forgetting_attention import forgetting_attention_decode

# The op for decoding serves up to this many new tokens: one, or the guesses of assisted generation.
MAX_DECODED_TOKENS = 16


def attend_with_cache(
    attend: Callable[..., Tensor],
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    log_fgate_BTH: Tensor | None,
    span: Any,
    window: int | None,
    pruning: Any,
) -> Tensor:
    """Attend to the tokens in `span.cache` and the new ones, which are added to it; by `attend`, or by the op for
    decoding. Returns `(B, T, H, D)`.
    """
    q_BHTD, k_BGTD, v_BGTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
    log_fgate_BHT = None if log_fgate_BTH is None else log_fgate_BTH.transpose(1, 2)
    if span.padding_BT is not None and log_fgate_BHT is not None:
        # Values in padding must not enter the running sum.
        log_fgate_BHT = log_fgate_BHT.masked_fill(span.padding_BT[:, None], 0)
    held = span.cache.update(k_BGTD, v_BGTD, log_fgate_BHT)
    seq_start_B = span.seq_start_B
    if seq_start_B is not None and held.first:
        seq_start_B = (seq_start_B - held.first).clamp(min=0)
    if span.cache.slot is not None or _decodes(q_BHTD, held, window):
        return _decode(q_BHTD, held, seq_start_B, span.cache, window, pruning).transpose(1, 2)
    if held.cum_log_fgate is not None and q_BHTD.shape[2] < held.keys.shape[2]:
        log_fgate_BHT = log_fgate_of(held.cum_log_fgate)
    log_fgate_BNH = None if log_fgate_BHT is None else log_fgate_BHT.transpose(1, 2)
    keys_and_values = (x.transpose(1, 2) for x in held[:2])
    return attend(q_BTHD, *keys_and_values, log_fgate_BNH, seq_start_B, None, window, pruning)


def _decodes(q_BHTD: Tensor, held: Held, window: int | None) -> bool:
    """Whether the op for decoding serves these tokens: a few (one with a window) behind others, without gradients."""
    num_new, most = q_BHTD.shape[2], MAX_DECODED_TOKENS if window is None else 1
    if held.cum_log_fgate is None or num_new == held.keys.shape[2] or num_new > most:
        return False
    inputs = (q_BHTD, held.keys, held.values, held.cum_log_fgate)
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))


def _decode(
    q_BHTD: Tensor,
    held: Held,
    seq_start_B: Tensor | None,
    cache: AttentionCache,
    window: int | None,
    pruning: Any,
) -> Tensor:
    """Attend from the newest tokens to a cache, `(B, H, T, D)`; to whole buffers where it is static."""
    num_keys, slot = held.keys.shape[2], cache.slot
    running_BHN = held.cum_log_fgate
    if running_BHN is None:  # gates of 1
        running_BHN = q_BHTD.new_zeros((), dtype=torch.float32).expand(*q_BHTD.shape[:2], num_keys)
    if slot is not None and window is not None:
        oldest_B = (slot.end_B - window).clamp(min=0)
        seq_start_B = oldest_B if seq_start_B is None else torch.maximum(seq_start_B, oldest_B)
    out: Any = forgetting_attention_decode(
        q_BHTD, held.keys, held.values, running_BHN, head_first=True, seq_start=seq_start_B,
        seq_end=None if slot is None else slot.end_B,
        adaptive_threshold=None if pruning is None else pruning.threshold(num_keys, window),
    )  # fmt: skip
    return out
