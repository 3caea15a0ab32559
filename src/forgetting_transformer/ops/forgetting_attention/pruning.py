"""What adaptive computation pruning leaves out, computed in PyTorch in float64.

The kernels' search is compared with it, and evaluations report it.

Queries come in blocks of 128, keys in stretches of 128; `decay.py` derives the rule.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops.forgetting_attention.constants import MIN_LOG_FGATE, STRETCH


class ScoreBounds(NamedTuple):
    """What bounds the scores of a block and a stretch, nats, float64."""

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
        bounds: what `score_bounds` returned, or None.
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
