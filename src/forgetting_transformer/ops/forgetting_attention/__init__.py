"""Forgetting attention: causal softmax attention whose scores decay with the forget gates between key and query.

Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", ICLR 2025, section 3.

Axes: `forgetting_transformer/ops/__init__.py`.

Files, from the call down:
    dispatch                  which calls the GPU kernels serve
    reference, portable       the definition, which tests every backend; what runs where no kernel does, as on a CPU
    triton, layout            the operators and their launches; what launches share
    kernels; hopper, …        attention and its gradients; the same for Hopper GPUs (H100), which triton.py chooses
    decay                     sums of gates, and what pruning skips
    decode, decode_triton     from the newest tokens to a cache; its kernels
"""

import math

import torch
from torch import Tensor

from forgetting_transformer.ops.arguments import (
    check_adaptive_threshold,
    check_attention,
    check_gates,
    checked_scale,
)
from forgetting_transformer.ops.forgetting_attention.decode import cumulative_log_fgate, forgetting_attention_decode
from forgetting_transformer.ops.forgetting_attention.dispatch import (
    attend_with_kernel,
    first_visible_key,
    per_head,
    takes_kernel,
)
from forgetting_transformer.ops.forgetting_attention.portable import forgetting_attention_portable
from forgetting_transformer.ops.forgetting_attention.reference import forgetting_attention_reference

__all__ = [
    "cumulative_log_fgate",
    "forgetting_attention",
    "forgetting_attention_decode",
    "forgetting_attention_portable",
    "forgetting_attention_reference",
]


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    *,
    head_first: bool = False,
    seq_start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    window_size: int | None = None,
    sm_scale: float | None = None,
    adaptive_threshold: str | float | Tensor | None = None,
    log_tolerance: float = -10.0,
) -> Tensor:
    """Attend with weights `softmax_j(sm_scale · q_i·k_j + Σ_{l=j+1..i} log f_l)` over the keys j ≤ i.

    A gate acts on everything before it: `log f_l` is added to every pair whose key lies before position l and whose
    query lies at l or after. The gate of the first key therefore has no effect.

    When there are fewer queries than keys (T < N, decoding), the queries are the last T positions.

    Args:
        q: queries `(B, T, H, D)`, or `(B, H, T, D)` with `head_first`. float16, bfloat16, float32 or float64.
        k: keys `(B, N, G, D)`, N ≥ T, in q's dtype. H must be a multiple of G: query head h reads key head h // (H / G)
            (grouped-query attention, Ainslie et al. 2023).
        v: values, like k.
        log_fgate: natural logarithm of the forget gates `(B, N, H)`, any floating dtype; float32 is recommended. Never
            positive, which is checked for tensors on the CPU: looking at values would make a GPU wait.
            Usually `logsigmoid` of a linear layer's output. 0 is "keep everything"; -inf is a hard reset, after
            which nothing before that position is seen.
        head_first: the head axis comes before the sequence axis in every argument and in the output.
        seq_start: index `(B,)` of the first real token of each sequence, int64, in [0, N]: left padding. Keys before
            it are invisible whatever they hold (NaN included), queries before it give 0, and all their gradients
            are exactly 0.
        cu_seqlens: packed documents: where each begins, and N, `(documents + 1,)`, int32 or int64, rising from 0 to N.
            Needs B = 1 and T = N. A query sees its own document only.
        window_size: number of keys a query sees at most, itself included.
        sm_scale: factor on q·k. Default 1/√D.
        adaptive_threshold: adaptive computation pruning. A backend may skip blocks of pairs whose whole decay bias
            is below this value (nats, ≤ 0): a number or a tensor that broadcasts to `(B, H)`. "auto" takes the norms of
            the queries and keys of each block, and each query's score with itself, and skips blocks as long as the
            weights of all that a row leaves out add up to less than exp(log_tolerance). None skips nothing. Pruning
            only ever saves work: the kernels do it, the portable and the reference backend compute every pair.
        log_tolerance: for adaptive_threshold="auto", nats, < 0.

    Returns:
        Tensor with q's shape and dtype. Differentiable once in q, k, v and log_fgate.

    Raises:
        TypeError: an argument is not a tensor, or of an unsupported dtype.
        ValueError: shapes, dtypes, devices or ranges do not fit together. The message names the argument.
    """
    tensors = {"q": q, "k": k, "v": v, "log_fgate": log_fgate}
    check_attention(tensors, head_first, seq_start=seq_start, cu_seqlens=cu_seqlens, window_size=window_size)
    check_gates(log_fgate, seq_start, head_first)
    check_adaptive_threshold(adaptive_threshold, q, head_first)
    if not -math.inf < log_tolerance < 0:
        raise ValueError(f"log_tolerance is {log_tolerance}; it is ln ε of a small ε, so negative and finite")
    sm_scale = checked_scale(sm_scale, q.shape[-1])

    if takes_kernel(q):
        threshold, tolerance = adaptive_threshold, None
        if isinstance(threshold, str):  # "auto"
            threshold, tolerance = None, log_tolerance
        first_key_BT = first_visible_key(q, k, window=window_size, cu_seqlens=cu_seqlens, head_first=head_first)
        out = attend_with_kernel(
            q, k, v, log_fgate, head_first=head_first, sm_scale=sm_scale, seq_start_B=seq_start,
            first_key_BT=first_key_BT, threshold_BH=per_head(threshold, q, head_first),
            log_tolerance_BH=per_head(tolerance, q, head_first),
        )  # fmt: skip
        if out is not None:
            return out
    if not head_first:
        q, k, v, log_fgate = (x.transpose(1, 2) for x in (q, k, v, log_fgate))
    # The op chooses its own precision: autocast would round the decay bias to 16 bits inside it.
    with torch.autocast(q.device.type, enabled=False):
        first_key_BT = first_visible_key(q, k, window=window_size, cu_seqlens=cu_seqlens)
        out_BHTD = forgetting_attention_portable(
            q, k, v, log_fgate, seq_start, sm_scale, first_key_BT=first_key_BT, window=window_size
        )
    return out_BHTD if head_first else out_BHTD.transpose(1, 2)
