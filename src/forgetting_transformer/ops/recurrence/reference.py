"""The recurrences written as they are defined, one step per token: what every other implementation is compared with.

Also the fastest way to take a single step, so decoding uses it. Axes: `forgetting_transformer/ops/__init__.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Gates(NamedTuple):
    """Gates by which a token changes the state. At least one of the two is given.

    Attributes:
        beta: strength of the delta rule `(B, T, H)`. None for linear attention, which only adds to the state.
        log_decay: natural logarithms of the decays, `(B, T, H)` or `(B, T, H, K)`. None for no decay.
    """

    beta: Tensor | None = None
    log_decay: Tensor | None = None

    @property
    def op(self) -> str:
        """The name of the op that has these gates."""
        if self.beta is not None and self.log_decay is not None:
            return "kda" if self.log_decay.ndim == 4 else "gated_delta_rule"
        if self.beta is not None:
            return "delta_rule"
        return "gla" if self.filled_log_decay().ndim == 4 else "simple_gla"

    def filled_log_decay(self) -> Tensor:
        """log_decay, or zeros for no decay."""
        if self.log_decay is not None:
            return self.log_decay
        if self.beta is None:
            raise ValueError("beta and log_decay are both None; give one of them")
        return torch.zeros_like(self.beta)


def linear_recurrence(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, gates: Gates, scale: float, initial_state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`S_t = diag(a_t) S_{t-1} + k_t v_tᵀ`, in which `β_t (v_t - (diag(a_t) S_{t-1})ᵀ k_t)` replaces v_t if β is given.

    Returns:
        The output `(B, T, H, V)` in v's dtype, and the final state, always.
    """
    dtype = compute_dtype(q_BTHK)
    state_BHKV = start_state(q_BTHK, v_BTHV, initial_state_BHKV)
    log_decay = gates.filled_log_decay()
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    given = (log_decay,) if gates.beta is None else (log_decay, gates.beta)
    outs = []
    for q_BHK, k_BHK, v_BHV, log_decay_BHK, *strength in _steps(dtype, q_BTHK, k_BTHK, v_BTHV, *given):
        state_BHKV = log_decay_BHK.exp()[..., None] * state_BHKV
        if strength:
            v_BHV = v_BHV - _read(state_BHKV, k_BHK)
            k_BHK = strength[0][..., None] * k_BHK
        state_BHKV = state_BHKV + k_BHK[..., :, None] * v_BHV[..., None, :]
        outs.append(_read(state_BHKV, q_BHK))
    return (scale * torch.stack(outs, dim=1)).to(v_BTHV.dtype), state_BHKV


def selective_scan(
    x_BTI: Tensor, dt_BTI: Tensor, A_IK: Tensor, B_BTK: Tensor, C_BTK: Tensor, initial_state_BIK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`s_t = exp(dt_t A) ⊙ s_{t-1} + (dt_t x_t) B_tᵀ`, `y_t = s_t C_t`."""
    dtype = compute_dtype(x_BTI)
    A_IK = A_IK.to(dtype)
    if initial_state_BIK is None:
        state_BIK = A_IK.new_zeros(x_BTI.shape[0], *A_IK.shape)
    else:
        state_BIK = initial_state_BIK.to(dtype)
    outs = []
    for x_BI, dt_BI, B_BK, C_BK in _steps(dtype, x_BTI, dt_BTI, B_BTK, C_BTK):
        decay_BIK = (dt_BI[..., None] * A_IK).exp()
        state_BIK = decay_BIK * state_BIK + (dt_BI * x_BI)[..., None] * B_BK[:, None]
        outs.append((state_BIK * C_BK[:, None]).sum(-1))
    return torch.stack(outs, dim=1).to(x_BTI.dtype), state_BIK


def compute_dtype(x: Tensor) -> torch.dtype:
    """States and sums are float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def start_state(q_BTHK: Tensor, v_BTHV: Tensor, initial_state_BHKV: Tensor | None) -> Tensor:
    """The initial state in the dtype of the computation, zeros if there is none."""
    if initial_state_BHKV is not None:
        return initial_state_BHKV.to(compute_dtype(q_BTHK))
    batch, _, heads, key_dim = q_BTHK.shape
    return q_BTHK.new_zeros(batch, heads, key_dim, v_BTHV.shape[-1], dtype=compute_dtype(q_BTHK))


def _steps(dtype: torch.dtype, *sequences: Tensor) -> zip:
    """One tuple of slices per position."""
    return zip(*(x.to(dtype).unbind(1) for x in sequences), strict=True)


def _read(state_BHKV: Tensor, query_BHK: Tensor) -> Tensor:
    """`Sᵀ q`."""
    return (query_BHK[..., None, :] @ state_BHKV).squeeze(-2)
