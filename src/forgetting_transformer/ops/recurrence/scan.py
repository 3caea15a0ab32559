"""Mamba's selective scan on any device: elementwise, as every state has a decay of its own (Gu and Dao 2023, section 3.3).

The sequence is walked in segments. Within one, all chunks of 16 tokens take their 16 steps side by side from zero
states, and then the true state before each chunk is added, decayed. Every decay is an exponential ≤ 1, so nothing
overflows.

The backward pass is written out, because recording every step would take several numbers per state and token. With h
the states, `y_t = h_t C_t` and `h_t = a_t ⊙ h_{t-1} + u_t`, where `a_t = exp(dt_t A)` and `u_t = (dt_t x_t) B_tᵀ`, the
gradient g of the states is the same recurrence from right to left,

    g_t = a_{t+1} ⊙ g_{t+1} + dy_t C_tᵀ,        du_t = g_t,        d(dt_t A) = g_t ⊙ h_{t-1} ⊙ a_t.

Memory: the inputs and the state before each segment are kept; the states of one segment at a time are computed again.

The operators `forgetting_transformer::selective_scan` and `…_backward` are opaque to torch.compile: traced, the steps
of all segments would become a graph of thousands of nodes.

Axes: see `__init__.py`; sequences are time first in here. S: positions of a segment; c: positions of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from forgetting_transformer.ops.recurrence.reference import compute_dtype

_CHUNK_LENGTH = 16
# States (B·S·E·N) held at once: what fits a CPU's cache, and 256 MiB in float32 where memory is fast.
_CPU_STATES = 2**19
_ACCELERATOR_STATES = 2**26


def selective_scan(
    x_BTE: Tensor, dt_BTE: Tensor, A_EN: Tensor, B_BTN: Tensor, C_BTN: Tensor, initial_state_BEN: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in the package's `selective_scan`; the final state always."""
    dtype, length = compute_dtype(x_BTE), x_BTE.shape[1]
    if initial_state_BEN is None:
        initial_state_BEN = A_EN.new_zeros(x_BTE.shape[0], *A_EN.shape, dtype=dtype)
    # Zeros behind the end change no state: dt = 0 is decay 1 and input 0.
    missing = -length % _CHUNK_LENGTH
    x_TBE, dt_TBE, B_TBN, C_TBN = (
        F.pad(x.transpose(0, 1), (0, 0, 0, 0, 0, missing)) for x in (x_BTE, dt_BTE, B_BTN, C_BTN)
    )
    y_TBE, state_BEN, _ = _selective_scan(x_TBE, dt_TBE, A_EN.to(dtype), B_TBN, C_TBN, initial_state_BEN.to(dtype))
    return y_TBE[:length].transpose(0, 1), state_BEN


def selective_scan_flops_per_token(channels: int, states: int) -> int:
    """Forward FLOPs per token: per state two for the decay dt·A and its exponential, one for the input, two for the update and
    two for the output, `7·E·N`; and dt·x, `E`. Work of the chunked form beyond the definition is not counted.
    """
    return 7 * channels * states + channels


@torch.library.custom_op("forgetting_transformer::selective_scan", mutates_args=())
def _selective_scan(
    x_TBE: Tensor, dt_TBE: Tensor, A_EN: Tensor, B_TBN: Tensor, C_TBN: Tensor, state_BEN: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `(T, B, E)` in x's dtype, the final state, and the state before each segment `(segments, B, E, N)`."""
    outs, states = [], []
    for x, dt, B, C in _segments(A_EN, x_TBE, dt_TBE, B_TBN, C_TBN):
        states.append(state_BEN)
        h = _scan(dt, A_EN, _outer(dt * x, B), state_BEN)
        outs.append(_contract_states(h, C).to(x_TBE.dtype))
        state_BEN = h[-1].clone()
    return torch.cat(outs), state_BEN, torch.stack(states)


@_selective_scan.register_fake
def _(x_TBE, dt_TBE, A_EN, B_TBN, C_TBN, state_BEN):
    states = state_BEN.new_empty(-(-x_TBE.shape[0] // _segment_length(x_TBE, A_EN)), *state_BEN.shape)
    return x_TBE.new_empty(x_TBE.shape), torch.empty_like(state_BEN), states


@torch.library.custom_op("forgetting_transformer::selective_scan_backward", mutates_args=())
def _selective_scan_backward(
    dy_TBE: Tensor,
    dstate_BEN: Tensor,
    x_TBE: Tensor,
    dt_TBE: Tensor,
    A_EN: Tensor,
    B_TBN: Tensor,
    C_TBN: Tensor,
    states_sBEN: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C and the initial state, each in its own dtype."""
    dA_EN, gradients = torch.zeros_like(A_EN), []
    segments = _segments(A_EN, x_TBE, dt_TBE, B_TBN, C_TBN, dy_TBE)
    for (x, dt, B, C, dy), state_BEN in reversed(list(zip(segments, states_sBEN, strict=True))):
        h = _scan(dt, A_EN, _outer(dt * x, B), state_BEN)
        # dstate is already the gradient of the last state, so the first step from the right does not decay it.
        dt_reversed = torch.cat((torch.zeros_like(dt[:1]), dt.flip(0)[:-1]))
        g = _scan(dt_reversed, A_EN, _outer(dy.flip(0), C.flip(0)), dstate_BEN).flip(0)
        d_dt_x, dB, dC = _contract_states(g, B), _contract_channels(g, dt * x), _contract_channels(h, dy)
        # From here on g holds g_t a_t: the gradient of the state before t, and all but a factor of d(dt A).
        g.mul_((dt[..., None] * A_EN).exp_())
        dstate_BEN = g[0].clone()
        g[0].mul_(state_BEN)
        g[1:].mul_(h[:-1])
        dA_EN += torch.einsum("sben,sbe->en", g, dt)
        ddt = d_dt_x * x + torch.einsum("sben,en->sbe", g, A_EN)
        inputs = ((d_dt_x * dt, x_TBE), (ddt, dt_TBE), (dB, B_TBN), (dC, C_TBN))
        gradients.append([gradient.to(like.dtype) for gradient, like in inputs])
    dx_TBE, ddt_TBE, dB_TBN, dC_TBN = (torch.cat(parts[::-1]) for parts in zip(*gradients, strict=True))
    return dx_TBE, ddt_TBE, dA_EN, dB_TBN, dC_TBN, dstate_BEN


@_selective_scan_backward.register_fake
def _(dy_TBE, dstate_BEN, x_TBE, dt_TBE, A_EN, B_TBN, C_TBN, states_sBEN):
    return tuple(x.new_empty(x.shape) for x in (x_TBE, dt_TBE, A_EN, B_TBN, C_TBN, dstate_BEN))


def _save(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:-1], output[2])
    ctx.mark_non_differentiable(output[2])


def _backward(ctx: Any, dy_TBE: Tensor, dstate_BEN: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    return _selective_scan_backward(dy_TBE, dstate_BEN, *ctx.saved_tensors)


_selective_scan.register_autograd(_backward, setup_context=_save)


def _segments(A_EN: Tensor, *sequences: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Slices in A's dtype, equally long (a multiple of the chunk length) but for the last."""
    length = _segment_length(sequences[0], A_EN)
    for slices in zip(*(x.split(length) for x in sequences), strict=True):
        yield tuple(x.to(A_EN.dtype) for x in slices)


def _segment_length(x_TBE: Tensor, A_EN: Tensor) -> int:
    states_per_position = x_TBE.shape[1] * A_EN.numel()
    budget = _CPU_STATES if A_EN.device.type == "cpu" else _ACCELERATOR_STATES
    return max(1, budget // (states_per_position * _CHUNK_LENGTH)) * _CHUNK_LENGTH


def _scan(dt_SBE: Tensor, A_EN: Tensor, inputs_SBEN: Tensor, state_BEN: Tensor) -> Tensor:
    """Turn the inputs u, in place, into `h_t = exp(dt_t A) ⊙ h_{t-1} + u_t`; `state` is h before the first."""
    h_ncBEN = inputs_SBEN.unflatten(0, (-1, _CHUNK_LENGTH))
    # Becomes the product of the decays from the start of the chunk on.
    decay_ncBEN = (dt_SBE[..., None] * A_EN).exp_().unflatten(0, (-1, _CHUNK_LENGTH))
    for t in range(1, _CHUNK_LENGTH):
        h_ncBEN[:, t].addcmul_(decay_ncBEN[:, t], h_ncBEN[:, t - 1])
        decay_ncBEN[:, t].mul_(decay_ncBEN[:, t - 1])
    for h_cBEN, decay_cBEN in zip(h_ncBEN, decay_ncBEN, strict=True):
        h_cBEN.addcmul_(decay_cBEN, state_BEN)
        state_BEN = h_cBEN[-1]
    return inputs_SBEN


def _outer(channels_SBE: Tensor, states_SBN: Tensor) -> Tensor:
    return channels_SBE[..., None] * states_SBN[:, :, None]


def _contract_states(h_SBEN: Tensor, states_SBN: Tensor) -> Tensor:
    return (h_SBEN @ states_SBN[..., None]).squeeze(-1)


def _contract_channels(h_SBEN: Tensor, channels_SBE: Tensor) -> Tensor:
    return (channels_SBE[:, :, None] @ h_SBEN).squeeze(-2)
