"""Attention from new tokens to all tokens before them, for every layer with attention.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forgetting_transformer.model.generation.cached_attention import attend_with_cache
from forgetting_transformer.model.span import Span
from forgetting_transformer.ops import context
from forgetting_transformer.ops.attention import causal_attention
from forgetting_transformer.ops.context_attention import attend_with_own_heads
from forgetting_transformer.ops.forgetting_attention import forgetting_attention


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

    def threshold(self, num_keys: int, window: int | None = None) -> Tensor | None:
        """The decay bias `(H,)` beyond which pairs are left out; None where nothing bounds scores."""
        if self.score_bound_H is None:
            return None
        return self.log_tolerance - (2 * self.score_bound_H + math.log(min(num_keys, window or num_keys)))


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
        span: facts about the tokens, from the decoder.
        window: keys that a query sees, itself included; None is all.
        pruning: None computes every pair.

    Returns:
        The output `(B, T, H, D)`.
    """
    inputs = (q_BTHD, k_BTGD, v_BTGD, log_fgate_BTH)
    if context.active() is not None:  # processes share the sequences (strategy.context)
        return attend_with_own_heads(attend_to_keys, *inputs, span.cu_seqlens, window, pruning)
    if span.cache is not None:
        return attend_with_cache(attend_to_keys, *inputs, span, window, pruning)
    return attend_to_keys(*inputs, span.seq_start_B, span.cu_seqlens, window, pruning)


def attend_to_keys(
    q_BTHD: Tensor,
    k_BNGD: Tensor,
    v_BNGD: Tensor,
    log_fgate_BNH: Tensor | None,
    seq_start_B: Tensor | None,
    cu_seqlens: Tensor | None,
    window: int | None,
    pruning: Pruning | None,
) -> Tensor:
    """Call the op for T queries and N keys, of which the last T are the queries' own; returns `(B, T, H, D)`."""
    options: dict[str, Any] = {"seq_start": seq_start_B, "cu_seqlens": cu_seqlens, "window_size": window}
    if log_fgate_BNH is None:
        return causal_attention(q_BTHD, k_BNGD, v_BNGD, **options)
    if pruning is not None and pruning.score_bound_H is None:
        options |= {"adaptive_threshold": "auto", "log_tolerance": pruning.log_tolerance}
    elif pruning is not None:
        options["adaptive_threshold"] = pruning.threshold(k_BNGD.shape[1], window)
    heads_first = (x.transpose(1, 2) for x in (q_BTHD, k_BNGD, v_BNGD, log_fgate_BNH))
    return forgetting_attention(*heads_first, head_first=True, **options).transpose(1, 2)
