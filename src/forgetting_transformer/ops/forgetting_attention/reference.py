"""Forgetting attention, written down as it is defined. The yardstick for every backend; O(T·N) memory.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import torch
from torch import Tensor


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
    weights_BHTN, _, log_normaliser_BHT = attention_weights(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights `softmax(sm_scale · q kᵀ + d)`, the decay bias d, and the log-normalisers.

    Arguments as in `forgetting_attention_reference`.

    Returns:
        Weights `(B, H, T, N)`, 0 where a query does not see a key; d `(B, H, T, N)`, nats, -inf there; log-normalisers
        `(B, H, T)`. All in the dtype of the computation.
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
    return weights_BHTN, decay_BHTN.masked_fill(~visible_BHTN, -torch.inf), log_normaliser_BHT
