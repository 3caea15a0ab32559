"""Mamba's selective scan in Triton: chunks of the sequence side by side, their states one after another.

Forward: (1) `forward_kernel` takes every chunk from a state of 0 and writes the state at its end and the sum of its
step sizes, (2) `carry_kernel` walks the chunks and leaves the state before each, (3) `forward_kernel` takes every chunk
again from that state and writes outputs. Softplus of the step sizes and `D·x` are computed on the way.

Backward, in the mirror: (1) what each chunk's outputs add to the gradient of the state before it, (2) `carry_kernel`
from the last chunk to the first, (3) `backward_kernel` with the states of (2) of the forward pass, which are all that
is kept besides the inputs. Gradients of B and C are sums over channels: every block of channels writes its own, and one
sum in a fixed order adds them; so for A, D and the bias over chunks. There are no atomic operations and nothing is
tuned while it runs, so the same inputs give the same bits.

The operators `forgetting_transformer::scan_forward` and `…_backward` are opaque to torch.compile.

Axes: `forgetting_transformer/ops/__init__.py`. n numbers chunks.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.forgetting_attention.layout import (
    FUSED,
    multiprocessors,
    on_device_of_first,
    side_by_side,
    with_whole_channels,
)
from forgetting_transformer.ops.recurrence.scan_kernels import (
    backward_kernel,
    carry_kernel,
    forward_kernel,
    state_gradient_kernel,
)

#: Tokens of a chunk. It decides what is added in which order, so it is the same on every GPU.
CHUNK = 128
_CARRY_BLOCK = 64
# Programs of the backward pass at work together, each with scratch memory of its own, as a multiple of multiprocessors.
_PROGRAMS_PER_MULTIPROCESSOR = 16


class Tile(NamedTuple):
    """Layout of a block of channels over the lanes of a program.

    Attributes:
        channels: channels of a block.
        state_lanes: lanes among which the states of a channel are divided.
    """

    channels: int
    state_lanes: int

    def sizes(self, states: int) -> dict[str, int]:
        """Constants of the kernels, for this many states."""
        padded = triton.next_power_of_2(states)
        lanes = min(self.state_lanes, padded)
        return {"K0": padded // lanes, "K1": lanes, "I0": self.channels * lanes // 32, "I1": 32 // lanes}


#: Measured on an H200 (docs/lab_notebook.md). The backward pass adds over channels, so its tile decides bits as well.
FORWARD_TILE = Tile(32, 1)
GRADIENT_TILE = Tile(32, 1)
BACKWARD_TILE = Tile(32, 4)
# Tokens whose states the backward pass holds in registers together.
_STEPS = 4
_LAUNCH: dict[str, Any] = {"num_warps": 1, "num_stages": 1, **FUSED}
_BACKWARD_LAUNCH = _LAUNCH


@operator("scan_forward")
@on_device_of_first
def _forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    starts: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `(B, T, I)` in x's dtype, the final state, and the state before each chunk `(B, n, I, K)`, float32.

    Args:
        x, dt, A, B, C, D, dt_bias, initial_state: as of the package's `selective_scan`, not float64; A and the initial
            state float32, of at most 16 states per channel.
        starts: `(B, T)` int8, 1 for the first token of each packed document.
    """
    x, dt, B, C = (with_whole_channels(tensor) for tensor in (x, dt, B, C))
    A, D, dt_bias = A.contiguous(), side_by_side(D), side_by_side(dt_bias)
    starts, initial_state = side_by_side(starts), side_by_side(initial_state)
    batch, length, channels = x.shape
    states = A.shape[1]
    chunks = triton.cdiv(length, CHUNK)
    y, final_state, before = _forward_like(x, A)
    spans = torch.empty(batch, chunks, channels, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(channels, FORWARD_TILE.channels) * chunks * batch,)

    def walk(states_only: bool) -> None:
        forward_kernel[grid](
            x, dt, A, B, C, D, dt_bias, starts, before, spans, y,
            *x.stride()[:2], *dt.stride()[:2], *B.stride()[:2], *C.stride()[:2], length, chunks, channels,
            STATES=states, STATES_ONLY=states_only, HAS_D=D is not None, SOFTPLUS=dt_bias is not None,
            HAS_STARTS=starts is not None, CHUNK=CHUNK, **FORWARD_TILE.sizes(states), **_LAUNCH,
        )  # fmt: skip

    walk(True)
    _carry(A, spans, before, initial_state, final_state, reverse=False)
    walk(False)
    return y, final_state, before


def _forward_like(x: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, channels = x.shape
    before_shape = (batch, -(-length // CHUNK), *A.shape)
    return (
        torch.empty(batch, length, channels, dtype=x.dtype, device=x.device),
        torch.empty(batch, *A.shape, dtype=torch.float32, device=x.device),
        torch.empty(before_shape, dtype=torch.float32, device=x.device),
    )


@_forward.register_fake
def _(x, dt, A, B, C, D, dt_bias, starts, initial_state):
    return _forward_like(x, A)


def _carry(A: Tensor, spans: Tensor, states: Tensor, first: Tensor | None, last: Tensor, *, reverse: bool) -> None:
    batch, chunks = states.shape[:2]
    carry_kernel[(triton.cdiv(A.numel(), _CARRY_BLOCK) * batch,)](
        A, spans, states, first, last, chunks, A.numel(), STATES=A.shape[1], REVERSE=reverse,
        HAS_FIRST=first is not None, BLOCK=_CARRY_BLOCK, num_warps=_CARRY_BLOCK // 32, **FUSED,
    )  # fmt: skip


@operator("scan_backward")
@on_device_of_first
def _backward(
    dy: Tensor,
    d_final_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    starts: Tensor | None,
    before: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C, D, dt_bias and the initial state; those of a missing D or bias are empty."""
    x, dt, B, C = (with_whole_channels(tensor) for tensor in (x, dt, B, C))
    A, D, dt_bias = A.contiguous(), side_by_side(D), side_by_side(dt_bias)
    dy, starts = dy.contiguous(), side_by_side(starts)
    batch, length, channels = x.shape
    states, chunks = A.shape[1], before.shape[1]
    options = {"SOFTPLUS": dt_bias is not None, "HAS_STARTS": starts is not None, "CHUNK": CHUNK, "STATES": states}

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    gradients, spans, steps = torch.empty_like(before), empty(batch, chunks, channels), empty(*x.shape)
    state_gradient_kernel[(triton.cdiv(channels, GRADIENT_TILE.channels) * chunks * batch,)](
        dy, dt, A, C, dt_bias, starts, gradients, spans, steps,
        *dt.stride()[:2], *C.stride()[:2], length, chunks, channels,
        **options, **GRADIENT_TILE.sizes(states), **_LAUNCH,
    )  # fmt: skip
    d_initial_state = empty(batch, channels, states)
    _carry(A, spans, gradients, d_final_state.contiguous(), d_initial_state, reverse=True)

    blocks = triton.cdiv(channels, BACKWARD_TILE.channels)
    items = blocks * chunks * batch
    programs = min(items, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x.device))
    sizes = BACKWARD_TILE.sizes(states)
    scratch = empty(programs, CHUNK // _STEPS, BACKWARD_TILE.channels * sizes["K0"] * sizes["K1"])
    dx, d_dt = (torch.empty(x.shape, dtype=like.dtype, device=x.device) for like in (x, dt))
    dA, dB, dC = torch.empty_like(before), empty(blocks, *B.shape), empty(blocks, *C.shape)
    dD, d_bias = (None if like is None else torch.empty_like(spans) for like in (D, dt_bias))
    backward_kernel[(programs,)](
        x, steps, dy, A, B, C, D, starts, before, gradients, scratch, dx, d_dt, dA, dB, dC, dD, d_bias,
        *x.stride()[:2], *B.stride()[:2], *C.stride()[:2], length, chunks, channels, items,
        HAS_D=D is not None, STEPS=_STEPS, **options, **sizes, **_BACKWARD_LAUNCH,
    )  # fmt: skip
    return (
        dx, d_dt, dA.sum((0, 1)), dB.sum(0).to(B.dtype), dC.sum(0).to(C.dtype),
        x.new_empty(0) if D is None or dD is None else dD.sum((0, 1)).to(D.dtype),
        x.new_empty(0) if dt_bias is None or d_bias is None else d_bias.sum((0, 1)).to(dt_bias.dtype),
        d_initial_state,
    )  # fmt: skip


@_backward.register_fake
def _(dy, d_final_state, x, dt, A, B, C, D, dt_bias, starts, before):
    shaped = (torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in (x, dt, A, B, C))
    optional = (x.new_empty(0) if like is None else torch.empty_like(like) for like in (D, dt_bias))
    return (*shaped, *optional, before.new_empty(before.shape[0], *before.shape[2:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, initial_state = inputs
    ctx.starts_from_a_state = initial_state is not None
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])


def _autograd(ctx: Any, dy: Tensor, d_final_state: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing gives them away
    D, dt_bias = saved[5:7]
    *d_inputs, dD, d_bias, d_initial_state = _backward(dy, d_final_state, *saved)
    return (
        *d_inputs,
        None if D is None else dD,
        None if dt_bias is None else d_bias,
        None,
        d_initial_state if ctx.starts_from_a_state else None,
    )


_forward.register_autograd(_autograd, setup_context=_save)
