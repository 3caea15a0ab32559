"""Attention from new tokens to all tokens before them, for every layer with attention.

`attend` chooses the op, and serves caches, static caches, left padding, packed documents, sequences that processes
share, windows, grouped keys and pruning.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.model.generation.cache import AttentionCache, Held, log_fgate_of
from forgetting_transformer.model.span import Span
from forgetting_transformer.ops import context
from forgetting_transformer.ops.attention import causal_attention
from forgetting_transformer.ops.forgetting_attention import forgetting_attention, forgetting_attention_decode
from forgetting_transformer.ops.forgetting_attention.dispatch import first_visible_key
from forgetting_transformer.ops.forgetting_attention.reference import attention_weights

# The op for decoding serves up to this many new tokens: one, or the guesses of assisted generation.
MAX_DECODED_TOKENS = 16


@dataclass(frozen=True)
class Pruning:
    """Rule for keys that attention may leave out: their softmax weights add up to less than ε in every row.

    If all scores lie in [-U, U], a pair whose bias is below -(2U + ln N) + ln ε has a softmax weight below ε/N. So all
    such pairs of a row together have less than ε. Without U the op finds bounds in the vectors at hand.

    Attributes:
        log_tolerance: ln ε, nats, < 0.
        score_bound_H: U of each head, float32, with |q·k| / √D ≤ U for any text; None where nothing bounds scores.
    """

    log_tolerance: float
    score_bound_H: Tensor | None

    def threshold(self, num_keys: int) -> Tensor | None:
        """The decay bias `(H,)` beyond which pairs are left out; None where nothing bounds scores."""
        if self.score_bound_H is None:
            return None
        return self.log_tolerance - (2 * self.score_bound_H + math.log(num_keys))


def attend(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    log_fgate_BTH: Tensor | None,
    span: Span,
    *,
    window: int | None = None,
    pruning: Pruning | None = None,
) -> Tensor:
    """Attend from T new tokens to all that they see, and add them to the cache.

    Args:
        q_BTHD: queries, after normalisation and rotation.
        k_BTGD, v_BTGD: keys and values of G heads, a divisor of H: query head h reads head h // (H / G).
        log_fgate_BTH: logarithms of the forget gates; None is ordinary attention.
        span: what is known of the tokens.
        window: keys that a query sees, itself included; None is all.
        pruning: None computes every pair.

    Returns:
        The output `(B, T, H, D)`.
    """
    shared = _share_heads(q_BTHD, k_BTGD, v_BTGD, log_fgate_BTH, span, window, pruning)
    q_BHTD, k_BGTD, v_BGTD = (x.transpose(1, 2) for x in (shared.q, shared.k, shared.v))
    log_fgate_BHT = None if shared.log_fgate is None else shared.log_fgate.transpose(1, 2)
    cache = cast(AttentionCache | None, span.cache)
    held = Held(k_BGTD, v_BGTD, None, 0)
    if cache is not None:
        if span.padding_BT is not None and log_fgate_BHT is not None:
            # Values in padding must not enter the running sum.
            log_fgate_BHT = log_fgate_BHT.masked_fill(span.padding_BT[:, None], 0)
        held = cache.update(k_BGTD, v_BGTD, log_fgate_BHT)

    seq_start_B = span.seq_start_B
    if seq_start_B is not None and held.first:
        seq_start_B = (seq_start_B - held.first).clamp(min=0)
    num_new, num_keys = q_BHTD.shape[2], held.keys.shape[2]
    options: dict[str, Any] = {"seq_start": seq_start_B, "cu_seqlens": span.cu_seqlens, "window_size": window}
    if cache is not None and (cache.slot is not None or _decodes(num_new, num_keys, q_BHTD, held, window)):
        out_BTHD = _decode(q_BHTD, held, seq_start_B, cache, window, pruning).transpose(1, 2)
    elif log_fgate_BHT is None:
        length_first = (x.transpose(1, 2) for x in (q_BHTD, held.keys, held.values))
        out_BTHD = causal_attention(*length_first, **options)
    else:
        if num_new < num_keys:
            assert held.cum_log_fgate is not None
            log_fgate_BHT = log_fgate_of(held.cum_log_fgate)
        if pruning is not None and pruning.score_bound_H is None:
            options |= {"adaptive_threshold": "auto", "log_tolerance": pruning.log_tolerance}
        elif pruning is not None:
            threshold_H = pruning.threshold(_visible(num_keys, window))
            options["adaptive_threshold"] = _own_heads(threshold_H, shared)
        out_BHTD: Any = forgetting_attention(q_BHTD, held.keys, held.values, log_fgate_BHT, head_first=True, **options)
        out_BTHD = out_BHTD.transpose(1, 2)
    if span.attentions is not None:
        span.attentions.append(_weights(q_BHTD, log_fgate_BHT, held, seq_start_B, window))
    return _join_heads(out_BTHD, len(q_BTHD), shared)


def _visible(num_keys: int, window: int | None) -> int:
    return num_keys if window is None else min(num_keys, window)


def _decodes(num_new: int, num_keys: int, q_BHTD: Tensor, held: Held, window: int | None) -> bool:
    """Whether the op for decoding serves these tokens: a few (one with a window) behind others, without gradients."""
    if held.cum_log_fgate is None or num_new == num_keys or num_new > (MAX_DECODED_TOKENS if window is None else 1):
        return False
    inputs = (q_BHTD, held.keys, held.values, held.cum_log_fgate)
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))


def _decode(
    q_BHTD: Tensor,
    held: Held,
    seq_start_B: Tensor | None,
    cache: AttentionCache,
    window: int | None,
    pruning: Pruning | None,
) -> Tensor:
    """Attend from the newest tokens to a cache, `(B, H, T, D)`; to whole buffers where it is static."""
    num_keys, slot = held.keys.shape[2], cache.slot
    running_BHN = held.cum_log_fgate
    if running_BHN is None:  # gates of 1
        running_BHN = q_BHTD.new_zeros((), dtype=torch.float32).expand(*q_BHTD.shape[:2], num_keys)
    if slot is not None and window is not None:
        oldest_B = (slot.end_B - window).clamp(min=0)
        seq_start_B = oldest_B if seq_start_B is None else torch.maximum(seq_start_B, oldest_B)
    options: dict[str, Any] = {"head_first": True, "seq_start": seq_start_B}
    options["seq_end"] = None if slot is None else slot.end_B
    if pruning is not None:
        options["adaptive_threshold"] = pruning.threshold(_visible(num_keys, window))
    out: Any = forgetting_attention_decode(q_BHTD, held.keys, held.values, running_BHN, **options)
    return out


@torch.no_grad()
def _weights(
    q_BHTD: Tensor, log_fgate_BHN: Tensor | None, held: Held, seq_start_B: Tensor | None, window: int | None
) -> Tensor:
    """The weight of each key for each query, `(B, H, T, N)`, float32 or wider, 0 where a query does not see a key.

    Computed pair by pair, with nothing pruned and without gradients. N counts past tokens too.
    """
    if held.cum_log_fgate is not None:
        log_fgate_BHN = log_fgate_of(held.cum_log_fgate)
    elif log_fgate_BHN is None:
        log_fgate_BHN = q_BHTD.new_zeros((*q_BHTD.shape[:2], held.keys.shape[2]))
    first_key_BT = first_visible_key(q_BHTD, held.keys, window=window)
    scale = 1 / math.sqrt(q_BHTD.shape[-1])
    with torch.autocast(q_BHTD.device.type, enabled=False):
        weights_BHTN, _ = attention_weights(
            q_BHTD, held.keys, log_fgate_BHN, seq_start_B, scale, first_key_BT=first_key_BT
        )
    return F.pad(weights_BHTN, (held.first, 0))  # keys that a window's cache has dropped


def check_attention_options(
    hidden_size: int, num_heads: int, num_kv_heads: int | None, window_size: int | None, use_rope: bool
) -> None:
    """Refuse options that do not fit together, naming the key and what to do."""
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size is {hidden_size}; it must be a multiple of num_heads = {num_heads}")
    if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
        raise ValueError(
            f"num_kv_heads is {num_kv_heads}; it must divide num_heads = {num_heads}, or be None for num_heads of them"
        )
    if window_size is not None and window_size < 1:
        raise ValueError(f"window_size is {window_size}; a token sees itself, so at least 1, or None for no window")
    if use_rope and (hidden_size // num_heads) % 2:
        raise ValueError(
            f"use_rope needs an even head dimension; hidden_size / num_heads is {hidden_size // num_heads}"
        )


# Where processes share sequences (`ops/context.py`).


class SharedHeads(NamedTuple):
    """Queries `(B, T, h, D)`, keys, values and gates of the heads that this process attends with.

    Attributes:
        order: which process takes which groups of heads; None: by their numbers.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_fgate: Tensor | None
    order: context.Order | None = None


def _share_heads(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    log_fgate_BTH: Tensor | None,
    span: Span,
    window: int | None,
    pruning: Pruning | None,
) -> SharedHeads:
    """From some positions of all heads to all positions of some heads; unchanged where sequences are whole.

    Whole groups move, each with its key head, in an order that gives all processes about as much to do where pruning
    leaves some heads more than others. Key heads are copied where there are too few for all processes to have as many.
    """
    active = context.active()
    if active is None:
        return SharedHeads(q_BTHD, k_BTGD, v_BTGD, log_fgate_BTH)
    copies = active.size // math.gcd(active.size, k_BTGD.shape[2])
    if copies > 1:
        k_BTGD, v_BTGD = (x.repeat_interleave(copies, dim=2) for x in (k_BTGD, v_BTGD))
    packed, split, order = span.cu_seqlens is not None, (k_BTGD.shape[2], -1), None
    moved = [q_BTHD.unflatten(2, split), k_BTGD, v_BTGD]
    if log_fgate_BTH is not None:
        gates_BTGR = log_fgate_BTH.unflatten(2, split)
        moved.append(gates_BTGR)
        if pruning is not None:
            threshold_H = pruning.threshold(_visible(log_fgate_BTH.shape[1] * active.size, window))
            # The head of a group that forgets most slowly stands for it.
            threshold_G = None if threshold_H is None else threshold_H.unflatten(0, split).amin(-1)
            with torch.no_grad():
                order = context.even_order(gates_BTGR.amax(-1), threshold_G, span.cu_seqlens)
    q, k, v, *gates = (context.to_heads(x, packed, order) for x in moved)
    return SharedHeads(q.flatten(2, 3), k, v, gates[0].flatten(2, 3) if gates else None, order)


def _own_heads(threshold_H: Tensor | None, shared: SharedHeads) -> Tensor | None:
    """Entries of the heads that this process has."""
    active = context.active()
    if threshold_H is None or active is None:
        return threshold_H
    threshold_GR = threshold_H.unflatten(0, (shared.k.shape[2] * active.size, -1))
    return context.own_heads(threshold_GR, shared.order).flatten()


def _join_heads(out_BThD: Tensor, batch: int, shared: SharedHeads) -> Tensor:
    """From all positions of some heads to some positions of all heads."""
    if context.active() is None:
        return out_BThD
    out_BTGRD = out_BThD.unflatten(2, (shared.k.shape[2], -1))
    return context.to_sequence(out_BTGRD, batch, shared.order).flatten(2, 3)
