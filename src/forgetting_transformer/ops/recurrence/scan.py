"""Mamba's selective scan on any device: elementwise, as every state has its own decay (Gu and Dao 2023, section 3.3).

The sequence is walked in segments. Within one, all chunks of 16 tokens take their 16 steps side by side from zero
states, and then the true state before each chunk is added, decayed. Every decay is an exponential ≤
1, so nothing overflows.

The backward pass is written out, because recording every step would take several numbers per state and token. With h
the states, `y_t = h_t C_t` and `h_t = a_t ⊙ h_{t-1} + u_t`, where `a_t = exp(dt_t A)` and `u_t = (dt_t x_t) B_tᵀ`, the
gradient g of the states is the same recurrence from right to left,

    g_t = a_{t+1} ⊙ g_{t+1} + dy_t C_tᵀ,        du_t = g_t,        d(dt_t A) = g_t ⊙ h_{t-1} ⊙ a_t.

Memory: the inputs and the state before each segment are kept; the states of one segment at a time are computed again.

The operators `forgetting_transformer::selective_scan` and `…_backward` are opaque to torch.compile: traced, the steps
of all segments would become a graph of thousands of nodes.

Axes: `forgetting_transformer/ops/__init__.py`. Sequences are time first in here; t is a segment, s numbers segments.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from forgetting_transformer.ops.recurrence.reference import compute_dtype

_CHUNK_LENGTH = 16
# States (B·t·I·K) held at once: what fits a CPU's cache, and 256 MiB in float32 where memory is fast.
_CPU_STATES = 2**19
_ACCELERATOR_STATES = 2**26


def selective_scan(
    x_BTI: Tensor, dt_BTI: Tensor, A_IK: Tensor, B_BTK: Tensor, C_BTK: Tensor, initial_state_BIK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in the package's `selective_scan`; the final state always."""
    dtype, length = compute_dtype(x_BTI), x_BTI.shape[1]
    if initial_state_BIK is None:
        initial_state_BIK = A_IK.new_zeros(x_BTI.shape[0], *A_IK.shape, dtype=dtype)
    # Zeros behind the end change no state: dt = 0 is decay 1 and input 0.
    missing = -length % _CHUNK_LENGTH
    x_TBI, dt_TBI, B_TBK, C_TBK = (
        F.pad(x.transpose(0, 1), (0, 0, 0, 0, 0, missing)) for x in (x_BTI, dt_BTI, B_BTK, C_BTK)
    )
    y_TBI, state_BIK, _ = _selective_scan(x_TBI, dt_TBI, A_IK.to(dtype), B_TBK, C_TBK, initial_state_BIK.to(dtype))
    return y_TBI[:length].transpose(0, 1), state_BIK


def selective_scan_flops_per_token(channels: int, states: int) -> int:
    """Forward FLOPs per token, `7·I·K + I`. What the chunked form computes beyond the definition is not counted.

    Per state: two for the decay dt·A and its exponential, one for the input, two for the update, two for the output.
    Per channel: one for dt·x.
    """
    return 7 * channels * states + channels


@torch.library.custom_op("forgetting_transformer::selective_scan", mutates_args=())
def _selective_scan(
    x_TBI: Tensor, dt_TBI: Tensor, A_IK: Tensor, B_TBK: Tensor, C_TBK: Tensor, state_BIK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `(T, B, I)` in x's dtype, the final state, and the state before each segment `(segments, B, I, K)`."""
    outs, states = [], []
    for x, dt, B, C in _segments(A_IK, x_TBI, dt_TBI, B_TBK, C_TBK):
        states.append(state_BIK)
        h = _scan(dt, A_IK, _outer(dt * x, B), state_BIK)
        outs.append(_contract_states(h, C).to(x_TBI.dtype))
        state_BIK = h[-1].clone()
    return torch.cat(outs), state_BIK, torch.stack(states)


@_selective_scan.register_fake
def _(x_TBI, dt_TBI, A_IK, B_TBK, C_TBK, state_BIK):
    states = state_BIK.new_empty(-(-x_TBI.shape[0] // _segment_length(x_TBI, A_IK)), *state_BIK.shape)
    return x_TBI.new_empty(x_TBI.shape), torch.empty_like(state_BIK), states


@torch.library.custom_op("forgetting_transformer::selective_scan_backward", mutates_args=())
def _selective_scan_backward(
    dy_TBI: Tensor,
    dstate_BIK: Tensor,
    x_TBI: Tensor,
    dt_TBI: Tensor,
    A_IK: Tensor,
    B_TBK: Tensor,
    C_TBK: Tensor,
    states_sBIK: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C and the initial state, each in its own dtype."""
    dA_IK, gradients = torch.zeros_like(A_IK), []
    segments = _segments(A_IK, x_TBI, dt_TBI, B_TBK, C_TBK, dy_TBI)
    for (x, dt, B, C, dy), state_BIK in reversed(list(zip(segments, states_sBIK, strict=True))):
        h = _scan(dt, A_IK, _outer(dt * x, B), state_BIK)
        # dstate is already the gradient of the last state, so the first step from the right does not decay it.
        dt_reversed = torch.cat((torch.zeros_like(dt[:1]), dt.flip(0)[:-1]))
        g = _scan(dt_reversed, A_IK, _outer(dy.flip(0), C.flip(0)), dstate_BIK).flip(0)
        d_dt_x, dB, dC = _contract_states(g, B), _contract_channels(g, dt * x), _contract_channels(h, dy)
        # From here on g holds g_t a_t: the gradient of the state before t, and all but a factor of d(dt A).
        g.mul_((dt[..., None] * A_IK).exp_())
        dstate_BIK = g[0].clone()
        g[0].mul_(state_BIK)
        g[1:].mul_(h[:-1])
        dA_IK += torch.einsum("tbik,tbi->ik", g, dt)
        ddt = d_dt_x * x + torch.einsum("tbik,ik->tbi", g, A_IK)
        inputs = ((d_dt_x * dt, x_TBI), (ddt, dt_TBI), (dB, B_TBK), (dC, C_TBK))
        gradients.append([gradient.to(like.dtype) for gradient, like in inputs])
    dx_TBI, ddt_TBI, dB_TBK, dC_TBK = (torch.cat(parts[::-1]) for parts in zip(*gradients, strict=True))
    return dx_TBI, ddt_TBI, dA_IK, dB_TBK, dC_TBK, dstate_BIK


@_selective_scan_backward.register_fake
def _(dy_TBI, dstate_BIK, x_TBI, dt_TBI, A_IK, B_TBK, C_TBK, states_sBIK):
    return tuple(x.new_empty(x.shape) for x in (x_TBI, dt_TBI, A_IK, B_TBK, C_TBK, dstate_BIK))


def _save(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:-1], output[2])
    ctx.mark_non_differentiable(output[2])


def _backward(ctx: Any, dy_TBI: Tensor, dstate_BIK: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    return _selective_scan_backward(dy_TBI, dstate_BIK, *ctx.saved_tensors)


_selective_scan.register_autograd(_backward, setup_context=_save)


def _segments(A_IK: Tensor, *sequences: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Slices in A's dtype, equally long (a multiple of the chunk length) but for the last."""
    length = _segment_length(sequences[0], A_IK)
    for slices in zip(*(x.split(length) for x in sequences), strict=True):
        yield tuple(x.to(A_IK.dtype) for x in slices)


def _segment_length(x_TBI: Tensor, A_IK: Tensor) -> int:
    states_per_position = x_TBI.shape[1] * A_IK.numel()
    budget = _CPU_STATES if A_IK.device.type == "cpu" else _ACCELERATOR_STATES
    return max(1, budget // (states_per_position * _CHUNK_LENGTH)) * _CHUNK_LENGTH


def _scan(dt_tBI: Tensor, A_IK: Tensor, inputs_tBIK: Tensor, state_BIK: Tensor) -> Tensor:
    """Turn the inputs u, in place, into `h_t = exp(dt_t A) ⊙ h_{t-1} + u_t`; `state` is h before the first."""
    h_ncBIK = inputs_tBIK.unflatten(0, (-1, _CHUNK_LENGTH))
    # Becomes the product of the decays from the start of the chunk on.
    decay_ncBIK = (dt_tBI[..., None] * A_IK).exp_().unflatten(0, (-1, _CHUNK_LENGTH))
    for t in range(1, _CHUNK_LENGTH):
        h_ncBIK[:, t].addcmul_(decay_ncBIK[:, t], h_ncBIK[:, t - 1])
        decay_ncBIK[:, t].mul_(decay_ncBIK[:, t - 1])
    for h_cBIK, decay_cBIK in zip(h_ncBIK, decay_ncBIK, strict=True):
        h_cBIK.addcmul_(decay_cBIK, state_BIK)
        state_BIK = h_cBIK[-1]
    return inputs_tBIK


def _outer(channels_tBI: Tensor, states_tBK: Tensor) -> Tensor:
    return channels_tBI[..., None] * states_tBK[:, :, None]


def _contract_states(h_tBIK: Tensor, states_tBK: Tensor) -> Tensor:
    return (h_tBIK @ states_tBK[..., None]).squeeze(-1)


def _contract_channels(h_tBIK: Tensor, channels_tBI: Tensor) -> Tensor:
    return (channels_tBI[:, :, None] @ h_tBIK).squeeze(-2)
