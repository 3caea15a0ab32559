"""Forgetting attention from the newest tokens of a sequence to a cache of all its keys: decoding, one token at a time.

The decay of a pair is a difference of running sums, Σ_{l=j+1..i} log f_l = c_i - c_j. A cache that stores c has nothing
to add up again when a token comes, and knows what pruning may skip: c never rises, so it is the oldest keys.

c is kept in float64. With f near 1/2 it reaches -45,000 nats at 65,536 tokens, where float32 numbers are 0.004 apart;
in float64 the bias of a pair is exact to 1e-11 and then rounded to float32 by itself. It takes 8 bytes per head and
token, against 256 of keys and values with 64 channels in 16 bits.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import math

import torch
from torch import Tensor

from forgetting_transformer.ops.arguments import check_adaptive_threshold, check_attention
from forgetting_transformer.ops.forgetting_attention.constants import MIN_LOG_FGATE
from forgetting_transformer.ops.forgetting_attention.dispatch import per_head, takes_kernel


def cumulative_log_fgate(log_fgate: Tensor, previous: Tensor | None = None, *, head_first: bool = False) -> Tensor:
    """Running sums c_i = Σ_{l ≤ i} log f_l of new tokens, to be stored for `forgetting_attention_decode`.

    Args:
        log_fgate: natural logarithm of the forget gates `(B, T, H)`, or `(B, H, T)` with `head_first`. Hard resets
            (-inf) count as -256, which no softmax weight survives.
        previous: what was returned for the token before these, `(B, 1, H)` or `(B, H, 1)`. None starts from 0.

    Returns:
        Tensor with log_fgate's shape, float64 (float32 on devices without it). Only differences of its entries count.
    """
    axis = -1 if head_first else -2
    has_float64 = log_fgate.device.type != "mps"
    log_fgate = log_fgate.to(torch.float64 if has_float64 else torch.float32).clamp(min=MIN_LOG_FGATE)
    running = log_fgate.cumsum(axis) if log_fgate.shape[axis] > 1 else log_fgate
    return running if previous is None else running + previous


def forgetting_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_log_fgate: Tensor,
    *,
    head_first: bool = False,
    seq_start: Tensor | None = None,
    seq_end: Tensor | None = None,
    adaptive_threshold: float | Tensor | None = None,
) -> Tensor:
    """Attend from the last T positions with weights `softmax_j(q_i·k_j / √D + c_i - c_j)` over the keys j ≤ i.

    The same numbers as `forgetting_attention`, without gradients, for T of 1 to 16 or so. The cost is one reading of
    the visible keys and values, whatever the number of query heads that share them; with pruning, of those that are not
    pruned.

    k, v and cum_log_fgate may be views of larger buffers, in any memory layout whose channels lie side by side
    (fastest: head first, so that a head's keys are neighbours). With `seq_end` they may be the whole buffers: then no
    shape changes while they fill, and one CUDA graph or one compiled graph serves every token.

    Args:
        q: queries `(B, T, H, D)`, or `(B, H, T, D)` with `head_first`. float16, bfloat16, float32 or float64.
        k: keys `(B, N, G, D)`, in q's dtype. H must be a multiple of G: query head h reads key head h // (H / G).
        v: values, like k.
        cum_log_fgate: running sums c of the log forget gates `(B, N, H)`, as `cumulative_log_fgate` returns them,
            float64 or float32. Only differences count: a sum may have started anywhere.
        head_first: the head axis comes before the sequence axis in every argument and in the output.
        seq_start: index `(B,)` of the first real token of each sequence, in [0, N]: left padding. Keys before it are
            invisible whatever they hold (NaN included), queries before it give 0.
        seq_end: index `(B,)` one past the last token of each sequence, in [T, N]. Its queries are the T positions
            before that, and what lies behind is invisible whatever it holds. Default N.
        adaptive_threshold: adaptive computation pruning: a backend may skip keys whose decay bias c_i - c_j is below
            this value (nats, ≤ 0), a number or a tensor that broadcasts to `(B, H)`. None skips nothing. The Triton
            kernel prunes, the portable backend computes every pair.

    Returns:
        Tensor with q's shape and dtype.

    Raises:
        TypeError: an argument is not a tensor, or of an unsupported dtype.
        ValueError: shapes, dtypes, devices or ranges do not fit together. The message names the argument.
        RuntimeError: a gradient is asked for.
    """
    tensors = {"q": q, "k": k, "v": v, "cum_log_fgate": cum_log_fgate}
    check_attention(tensors, head_first, seq_start=seq_start, seq_end=seq_end)
    if cum_log_fgate.dtype not in (torch.float64, torch.float32):
        raise TypeError(
            f"cum_log_fgate has dtype {cum_log_fgate.dtype}; it must be float64, or float32 where sequences are short"
        )
    if isinstance(adaptive_threshold, str):
        raise TypeError(
            f"adaptive_threshold is {adaptive_threshold!r}; decoding takes a number or a tensor, because the norms of "
            "all keys would cost as much as attending to them"
        )
    check_adaptive_threshold(adaptive_threshold, q, head_first)
    sm_scale = 1 / math.sqrt(q.shape[-1])
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, cum_log_fgate)):
        raise RuntimeError(
            "forgetting_attention_decode has no gradients: call it under torch.no_grad(), or use forgetting_attention"
        )

    if not head_first:
        q, k, v, cum_log_fgate = (x.transpose(1, 2) for x in (q, k, v, cum_log_fgate))
    if takes_kernel(q):
        threshold_BH = per_head(adaptive_threshold, q)
        kernel = torch.ops.forgetting_transformer.forgetting_attention_decode
        out_BHTD, _ = kernel(q, k, v, cum_log_fgate, threshold_BH, seq_start, seq_end, sm_scale)
    else:
        # The op chooses its own precision: autocast would round scores to 16 bits inside it.
        with torch.autocast(q.device.type, enabled=False):
            out_BHTD = forgetting_attention_decode_portable(q, k, v, cum_log_fgate, seq_start, seq_end, sm_scale)
    return out_BHTD if head_first else out_BHTD.transpose(1, 2)


def forgetting_attention_decode_portable(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    cum_log_fgate_BHN: Tensor,
    seq_start_B: Tensor | None,
    seq_end_B: Tensor | None,
    sm_scale: float,
) -> Tensor:
    """Decode on any device, with T·N scores in memory. Arguments as in `forgetting_attention_decode`, head first.

    Returns:
        The output `(B, H, T, D)` in q's dtype.
    """
    dtype = torch.promote_types(q_BHTD.dtype, torch.float32)
    (batch, heads, num_queries, _), (groups, num_keys) = q_BHTD.shape, k_BGND.shape[1:3]
    q, k, v = (x.to(dtype) for x in (q_BHTD, k_BGND, v_BGND))
    key_N = torch.arange(num_keys, device=q.device)
    end_B11 = num_keys if seq_end_B is None else seq_end_B[:, None, None]
    query_BT1 = torch.arange(num_queries, device=q.device)[:, None] + (end_B11 - num_queries)
    visible_BTN = (key_N <= query_BT1).expand(batch, -1, -1)
    if seq_start_B is not None:
        visible_BTN = visible_BTN & (key_N >= seq_start_B[:, None, None])
    if seq_start_B is not None or seq_end_B is not None:
        # Zeros, not whatever invisible keys hold: 0 · NaN would reach the sums below.
        is_hidden_B1N1 = ~visible_BTN.any(1)[:, None, :, None]
        k, v = k.masked_fill(is_hidden_B1N1, 0), v.masked_fill(is_hidden_B1N1, 0)

    query_BHT = query_BT1.clamp(min=0).mT.expand(batch, heads, -1)
    bias_BHTN = (cum_log_fgate_BHN.gather(2, query_BHT)[..., None] - cum_log_fgate_BHN[:, :, None]).to(dtype)
    # The heads that share keys are rows of one product.
    q_BGRD = q.reshape(batch, groups, -1, q.shape[3])
    scores_BHTN = sm_scale * (q_BGRD @ k.mT).view(batch, heads, num_queries, num_keys) + bias_BHTN
    visible_B1TN = visible_BTN[:, None]
    scores_BHTN = scores_BHTN.masked_fill(~visible_B1TN, torch.finfo(dtype).min)
    weights_BHTN = scores_BHTN.softmax(-1).masked_fill(~visible_B1TN, 0)
    out_BGRD = weights_BHTN.view(batch, groups, -1, num_keys) @ v
    return out_BGRD.view(q.shape).to(q_BHTD.dtype)
