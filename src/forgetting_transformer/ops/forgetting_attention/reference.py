"""Forgetting attention and its pruning, by definition: the reference of every backend.

Attention takes O(T·N) memory. What adaptive computation pruning leaves out is computed in float64, for queries in
blocks of 128 and keys in stretches of 128, and reported by evaluations; `decay.py` derives the rule.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops.forgetting_attention.constants import MIN_LOG_FGATE, STRETCH


def forgetting_attention_reference(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    log_fgate_BHN: Tensor,
    seq_start_B: Tensor | None,
    sm_scale: float,
    *,
    first_key_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `softmax(sm_scale · q kᵀ + d) v` with every score held in memory, d_ij = Σ_{l=j+1..i} log f_l.

    Computed in float64 when q is float64, in float32 otherwise. Arguments as in `forgetting_attention`, head first.
    Hard resets (log f = -inf) are exact: they are counted, and pairs with a reset between them are masked.

    Args:
        first_key_BT: the first key that each query sees, for windows and packed documents. Default 0.

    Returns:
        The output `(B, H, T, D)` in q's dtype, and the log-normalisers `(B, H, T)` in the dtype of the computation.
    """
    weights_BHTN, log_normaliser_BHT = attention_weights(
        q_BHTD, k_BGND, log_fgate_BHN, seq_start_B, sm_scale, first_key_BT=first_key_BT
    )
    v_BHND = v_BGND.to(weights_BHTN.dtype).repeat_interleave(q_BHTD.shape[1] // v_BGND.shape[1], dim=1)
    if seq_start_B is not None:
        # Zeros, not whatever the padding holds: 0 · NaN would reach the sums.
        padding_BN = torch.arange(v_BHND.shape[2], device=v_BHND.device) < seq_start_B[:, None]
        v_BHND = v_BHND.masked_fill(padding_BN[:, None, :, None], 0)
    return (weights_BHTN @ v_BHND).to(q_BHTD.dtype), log_normaliser_BHT


def attention_weights(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    log_fgate_BHN: Tensor,
    seq_start_B: Tensor | None,
    sm_scale: float,
    *,
    first_key_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weights `softmax(sm_scale · q kᵀ + d)` and the log-normalisers.

    Arguments as in `forgetting_attention_reference`.

    Returns:
        Weights `(B, H, T, N)`, 0 where a query does not see a key, and log-normalisers `(B, H, T)`, in the dtype of
        the computation.
    """
    dtype = torch.promote_types(q_BHTD.dtype, torch.float32)
    k_BHND = k_BGND.to(dtype).repeat_interleave(q_BHTD.shape[1] // k_BGND.shape[1], dim=1)
    q, log_fgate_BHN = q_BHTD.to(dtype), log_fgate_BHN.to(dtype)
    num_queries, num_keys = q.shape[2], k_BHND.shape[2]
    key_N = torch.arange(num_keys, device=q.device)
    query_T = key_N[num_keys - num_queries :]
    visible_BHTN = (key_N <= query_T[:, None])[None, None]
    if first_key_BT is not None:
        visible_BHTN = visible_BHTN & (key_N >= first_key_BT[:, None, :, None])

    if seq_start_B is not None:
        padding_BN = key_N < seq_start_B[:, None]
        visible_BHTN = visible_BHTN & ~padding_BN[:, None, None, :]
        # Zeros, not whatever the padding holds: 0 · NaN would reach the sums below.
        q = q.masked_fill(padding_BN[:, None, query_T, None], 0)
        k_BHND = k_BHND.masked_fill(padding_BN[:, None, :, None], 0)
        # The gate of the first real token acts on padding only.
        log_fgate_BHN = log_fgate_BHN.masked_fill((key_N <= seq_start_B[:, None])[:, None, :], 0)

    is_reset_BHN = log_fgate_BHN == -torch.inf
    resets_BHN = is_reset_BHN.cumsum(-1)
    visible_BHTN = visible_BHTN & (resets_BHN[..., query_T, None] == resets_BHN[..., None, :])

    c_BHN = log_fgate_BHN.masked_fill(is_reset_BHN, 0).cumsum(-1)
    decay_BHTN = c_BHN[..., query_T, None] - c_BHN[..., None, :]
    scores_BHTN = sm_scale * (q @ k_BHND.transpose(-1, -2)) + decay_BHTN
    # A finite number instead of -inf: rows of padding see nothing, and must give 0 rather than NaN.
    masked_BHTN = scores_BHTN.masked_fill(~visible_BHTN, torch.finfo(dtype).min)
    weights_BHTN = masked_BHTN.softmax(-1).masked_fill(~visible_BHTN, 0)
    sees_nothing_BHT = ~visible_BHTN.any(-1)
    log_normaliser_BHT = masked_BHTN.logsumexp(-1).masked_fill(sees_nothing_BHT, -torch.inf)
    return weights_BHTN, log_normaliser_BHT


class ScoreBounds(NamedTuple):
    """Bounds of the scores of a block and a stretch, nats, float64."""

    query_norm_BHQ: Tensor  # largest norm of a query, times the scale of scores
    self_score_BHQ: Tensor  # least score of a query with itself
    key_norm_BHS: Tensor  # largest norm of a key


def score_bounds(q_BHTD: Tensor, k_BGND: Tensor, sm_scale: float) -> ScoreBounds:
    """Bounds of `adaptive_threshold="auto"`, without padding."""
    q_BHTD, k_BHND = q_BHTD.double(), k_BGND.double().repeat_interleave(q_BHTD.shape[1] // k_BGND.shape[1], dim=1)
    self_score_BHT = sm_scale * (q_BHTD * k_BHND[:, :, k_BHND.shape[2] - q_BHTD.shape[2] :]).sum(-1)
    return ScoreBounds(
        sm_scale * _largest(q_BHTD.norm(dim=-1)), -_largest(-self_score_BHT), _largest(k_BHND.norm(dim=-1))
    )


def first_kept_stretch(
    log_fgate_BHN: Tensor, num_queries: int, log_threshold_BH: Tensor, bounds: ScoreBounds | None = None
) -> Tensor:
    """The first stretch of keys that each block of queries keeps, `(B, H, Q)` int64.

    Args:
        log_fgate_BHN: logarithms of the gates.
        num_queries: T ≤ N; the queries are the last positions.
        log_threshold_BH: without bounds, a stretch is left out if no pair has a decay bias of this or more. With them,
            stretches are left out as long as their weights in each row add up to less than its exponential. Nats.
        bounds: result of `score_bounds`, or None.
    """
    num_keys = log_fgate_BHN.shape[-1]
    shift, blocks, stretches = num_keys - num_queries, math.ceil(num_queries / STRETCH), math.ceil(num_keys / STRETCH)
    c_BHN = log_fgate_BHN.double().clamp(min=MIN_LOG_FGATE).cumsum(-1)
    device = c_BHN.device
    first_query_Q = torch.arange(blocks, device=device) * STRETCH + shift
    last_key_S = (torch.arange(stretches, device=device) * STRETCH + STRETCH - 1).clamp(max=num_keys - 1)
    c_BHS = c_BHN[..., last_key_S]
    bias_BHQS = c_BHN[..., first_query_Q, None] - c_BHS[..., None, :]
    if bounds is not None:
        mass_BHS = torch.logcumsumexp(math.log(STRETCH) - c_BHS, -1) + c_BHS
        largest_key_BHS = bounds.key_norm_BHS.cummax(-1).values
        bias_BHQS += bounds.query_norm_BHQ[..., None] * largest_key_BHS[..., None, :] + mass_BHS[..., None, :]
        bias_BHQS -= bounds.self_score_BHQ[..., None]
    earlier_QS = torch.arange(stretches, device=device) < first_query_Q[:, None] // STRETCH
    skipped_BHQS = (bias_BHQS < log_threshold_BH[..., None, None]) & earlier_QS
    first_BHQ = skipped_BHQS.sum(-1)
    # A block keeps what any later one keeps.
    return first_BHQ.flip(-1).cummin(-1).values.flip(-1)


def skipped_share(
    log_fgate_BHN: Tensor, num_queries: int, log_threshold_BH: Tensor, bounds: ScoreBounds | None = None
) -> Tensor:
    """Share of the blocks of 128 × 128 pairs on and below the diagonal that pruning leaves out, `(B, H)` float64.

    Arguments as those of `first_kept_stretch`.
    """
    first_BHQ = first_kept_stretch(log_fgate_BHN, num_queries, log_threshold_BH, bounds)
    num_keys = log_fgate_BHN.shape[-1]
    last_query_Q = torch.arange(first_BHQ.shape[-1], device=first_BHQ.device) * STRETCH + STRETCH - 1
    visible_Q = (last_query_Q.clamp(max=num_queries - 1) + num_keys - num_queries) // STRETCH + 1
    return first_BHQ.sum(-1).double() / visible_Q.sum()


def _largest(x_BHN: Tensor) -> Tensor:
    """Maxima over blocks of 128 positions, the last one perhaps shorter."""
    padded = F.pad(x_BHN, (0, -x_BHN.shape[-1] % STRETCH), value=-math.inf)
    return padded.unflatten(-1, (-1, STRETCH)).amax(-1)
