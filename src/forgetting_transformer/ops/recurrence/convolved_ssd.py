"""Short convolution, SiLU and the state space duality as one operator, which keeps only the convolution's input.

Apart, the convolution's output would be kept too, for the backward pass of the second: here it is computed again, one
kernel. The kernels are those of `short_convolution_triton.py` and `ssd.py`.

Axes: `forgetting_transformer/ops/__init__.py`. C is H·V + 2·G·K: values, keys and queries, in this order.
"""

from typing import Any

import torch
from torch import Tensor

from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.forgetting_attention.layout import on_device_of_first
from forgetting_transformer.ops.layers.short_convolution_triton import convolve, convolve_backward
from forgetting_transformer.ops.recurrence import ssd

# No normalised heads, and no epsilon of theirs.
_NO_NORM = (0, 0.0)


@operator("convolved_ssd")
@on_device_of_first
def convolved_ssd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    previous: Tensor | None,
    log_decay: Tensor,
    step: Tensor,
    skip: Tensor | None,
    initial_state: Tensor | None,
    positions: Tensor | None,
    documents: Tensor | None,
    groups: int,
    key_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `(B, T, H, V)`, the final state `(B, H, K, V)`, and the last inputs of the convolution `(B, C, W - 1)`.

    Args:
        x: `(B, T, C)`; with weight, bias and previous as `convolve` takes them.
        log_decay, step, skip, initial_state, documents, scale: as `ssd` takes them.
        positions: as `convolve` takes them.
    """
    y, last = convolve(x, weight, bias, previous, positions, *_NO_NORM)
    v, k, q = _split(y, log_decay, groups, key_dim)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final_state = ssd.forward_into(out, q, k, v, log_decay, step, skip, initial_state, documents, scale)
    return out, final_state, last


@convolved_ssd.register_fake
def _(
    x, weight, bias, previous, log_decay, step, skip, initial_state, positions, documents, groups, key_dim, scale
):  # fmt: skip
    (batch, length, heads), values = log_decay.shape, x.shape[2] - 2 * groups * key_dim
    state = x.new_empty((batch, heads, key_dim, values // heads), dtype=torch.float32)
    last = x.new_empty((batch, x.shape[2], weight.shape[-1] - 1))
    return x.new_empty((batch, length, heads, values // heads)), state, last


@operator("convolved_ssd_backward")
@on_device_of_first
def _backward(
    d_out: Tensor,
    d_final_state: Tensor | None,
    d_last: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    previous: Tensor | None,
    log_decay: Tensor,
    step: Tensor,
    skip: Tensor | None,
    initial_state: Tensor | None,
    positions: Tensor | None,
    documents: Tensor | None,
    groups: int,
    key_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias, previous, log_decay, step, skip and initial_state; empty where there is none."""
    y, _ = convolve(x, weight, bias, previous, positions, *_NO_NORM)
    v, k, q = _split(y, log_decay, groups, key_dim)
    dy = torch.empty_like(y)
    dv, dk, dq = _split(dy, log_decay, groups, key_dim)
    d_others = ssd.backward_into(
        dq, dk, dv, d_out, d_final_state, q, k, v, log_decay, step, skip, initial_state, documents, scale
    )
    del y, v, k, q
    return *convolve_backward(dy, d_last, x, weight, bias, previous, positions, *_NO_NORM), *d_others


@_backward.register_fake
def _(
    d_out, d_final_state, d_last, x, weight, bias, previous, log_decay, step, skip, initial_state, positions, documents,
    groups, key_dim, scale,
):  # fmt: skip
    def like(given: Tensor | None) -> Tensor:
        return x.new_empty(0) if given is None else given.new_empty(given.shape)

    (batch, _, heads), values = log_decay.shape, x.shape[2] - 2 * groups * key_dim
    d_skip = x.new_empty(0 if skip is None else skip.shape, dtype=torch.float32)
    d_state = x.new_empty((batch, heads, key_dim, values // heads), dtype=torch.float32)
    d_gates = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for gate in (log_decay, step))
    return like(x), like(weight), like(bias), like(previous), *d_gates, d_skip, d_state


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.rest = inputs[10:]


def _autograd(
    ctx: Any, d_out: Tensor | None, d_final_state: Tensor | None, d_last: Tensor | None
) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors
    if d_out is None:
        groups, key_dim, _ = ctx.rest
        x, log_decay = inputs[0], inputs[4]
        values = x.shape[2] - 2 * groups * key_dim
        d_out = x.new_zeros((*log_decay.shape, values // log_decay.shape[2]))
    gradients = _backward(d_out, d_final_state, d_last, *inputs, *ctx.rest)
    given = zip(gradients, inputs[:8], strict=True)
    return *(d if x is not None else None for d, x in given), None, None, None, None, None


convolved_ssd.register_autograd(_autograd, setup_context=_save)


def _split(y: Tensor, log_decay: Tensor, groups: int, key_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values `(B, T, H, V)`, keys and queries `(B, T, G, K)`, of channels side by side."""
    keys = groups * key_dim
    v, k, q = y.split([y.shape[2] - 2 * keys, keys, keys], dim=-1)
    return v.unflatten(-1, (log_decay.shape[2], -1)), k.unflatten(-1, (groups, -1)), q.unflatten(-1, (groups, -1))
