"""Linear attention with one decay per head and token in Triton: the state space duality of Mamba-2.

    S_t = a_t S_{t-1} + step_t k_t v_tᵀ,        out_t = scale · S_tᵀ q_t + skip · v_t

Heads g·H/G … (g + 1)·H/G - 1 share the queries and keys of group g, without copies: q·k is computed once per group and
chunk, and its gradient is summed over heads before it is multiplied by keys and queries. `ssd_kernels.py` has the
formulas.

The operators `forgetting_transformer::ssd` and `…_backward` are opaque to torch.compile and activation checkpointing,
know their FLOPs, never wait for the GPU, and give the same bits every time. Only their inputs are kept for the backward
pass, which computes scores and states again.

States are carried from chunk to chunk in float32, and rounded to the dtype of the inputs where they are multiplied by
queries. Log decays below -104 count as -104: exp(-104) is 0 in float32.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.forgetting_attention.layout import (
    FUSED,
    on_device_of_first,
    side_by_side,
    with_whole_channels,
)
from forgetting_transformer.ops.recurrence import ssd_kernels as kernels

#: Smaller log2 decays give the same results, and cost differences of sums their last digits.
_MIN_LOG2_DECAY = -150.0
# Heads that one program of `decay_kernel` and `decay_gradient_kernel` serves: what a row of 32 bytes holds.
_HEADS_OF_A_ROW = 8
# Heads that share a key and whose gradients one program adds up, at most.
_MAX_HEADS_OF_A_BLOCK = 8


class Tiles(NamedTuple):
    """Tiles of a call. What changes the last bits of results depends on dtypes and shapes alone.

    Attributes:
        chunk: tokens between states.
        tile: rows of a tile of pairs of tokens.
        state_block: key channels and value channels of a program of `state_kernel`, at most.
        launches: kernel: warps and stages.
    """

    chunk: int
    tile: int
    state_block: tuple[int, int]
    launches: dict[str, tuple[int, int]]

    def options(self, kernel: str) -> dict[str, Any]:
        """Launch options of a kernel."""
        warps, stages = self.launches.get(kernel, (4, 1))
        return {"CHUNK": self.chunk, "num_warps": warps, "num_stages": stages, **FUSED}


#: By bytes per number of the inputs. Float32 is for correctness: products of float32 accuracy, small tiles.
TILES = {
    2: Tiles(
        128,
        64,
        (64, 64),
        {
            "score": (4, 2),
            "state": (4, 3),
            "output": (4, 2),
            "value_gradient": (4, 2),
            "key_gradient": (4, 3),
            "score_gradient": (4, 1),
            "group_gradient": (4, 2),
        },
    ),
    4: Tiles(64, 32, (32, 32), {}),
}


class _Call(NamedTuple):
    """Sizes of a call, and what all its kernels take."""

    batch: int
    length: int
    heads: int
    groups: int
    keys: int
    values: int
    tiles: Tiles

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> "_Call":
        batch, length, groups, keys = q.shape
        return cls(batch, length, v.shape[2], groups, keys, v.shape[3], TILES[q.element_size()])

    def options(self, kernel: str) -> dict[str, Any]:
        """Launch options of a kernel that has tiles of pairs."""
        return {"TILE": self.tiles.tile, **self.tiles.options(kernel)}

    @property
    def group(self) -> int:
        """Heads of a group."""
        return self.heads // self.groups

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.length, self.tiles.chunk)

    @property
    def block(self) -> int:
        """Heads of a group whose gradients of keys one program adds up."""
        return max(n for n in range(1, _MAX_HEADS_OF_A_BLOCK + 1) if self.group % n == 0)

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    @property
    def per_row(self) -> int:
        """Programs of a kernel that has one per tile of a chunk."""
        return self.batch * self.chunks * (self.tiles.chunk // self.tiles.tile)


@operator("ssd")
@on_device_of_first
def ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    step: Tensor,
    skip: Tensor | None,
    initial_state: Tensor | None,
    documents: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Outputs `(B, T, H, V)` in v's dtype and the final state `(B, H, K, V)`, float32.

    Args:
        q, k: `(B, T, G, K)`, K a power of two from 16 to 256; float16, bfloat16 or float32.
        v: `(B, T, H, V)`, V a power of two from 16 to 128, H a multiple of G; in q's dtype.
        log_decay: `(B, T, H)`, ≤ 0, any floating dtype.
        step: `(B, T, H)`, float32.
        skip: `(H,)`, float32. None is 0.
        initial_state: `(B, H, K, V)`, float32. None is 0.
        documents: `(B, T)` int32, the number of the document that a token belongs to; a state ends with its document.
            The initial state belongs to the first token's. None is one document.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    return out, forward_into(out, q, k, v, log_decay, step, skip, initial_state, documents, scale)


@ssd.register_fake
def _(q, k, v, log_decay, step, skip, initial_state, documents, scale):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device), _state_like(q, v)


def _state_like(q: Tensor, v: Tensor) -> Tensor:
    return torch.empty(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32, device=v.device)


def forward_into(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    step: Tensor,
    skip: Tensor | None,
    initial_state: Tensor | None,
    documents: Tensor | None,
    scale: float,
) -> Tensor:
    """Writes the outputs into `out`, whose channels lie side by side, and returns the final state."""
    q, k, v = (with_whole_channels(x) for x in (q, k, v))
    skip, documents = side_by_side(skip), side_by_side(documents)
    call = _Call.of(q, v)
    sums, steps = _decays(call, log_decay, step, q)
    scores = _scores(call, q, k)
    states, final_state = _states(call, k, v, sums, steps, documents, initial_state, 1.0, reverse=False)
    kernels.output_kernel[(call.per_row, call.heads // call.block)](
        *_locate(q), *_locate(v), *_locate(out), scores, states, sums, steps, documents, skip,
        call.heads, call.group, call.length, call.chunks, scale, HAS_SKIP=skip is not None, HEADS=call.block,
        HAS_DOCUMENTS=documents is not None, KEYS=call.keys, VALUES=call.values, PRECISION="ieee",
        **call.options("output"),
    )  # fmt: skip
    return final_state


@operator("ssd_backward")
@on_device_of_first
def _backward(
    d_out: Tensor,
    d_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    step: Tensor,
    skip: Tensor | None,
    initial_state: Tensor | None,
    documents: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log decays, steps, skip (empty without one) and the initial state."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return (
        dq,
        dk,
        dv,
        *backward_into(
            dq, dk, dv, d_out, d_final_state, q, k, v, log_decay, step, skip, initial_state, documents, scale
        ),
    )


@_backward.register_fake
def _(d_out, d_final_state, q, k, v, log_decay, step, skip, initial_state, documents, scale):
    d_skip = v.new_empty(0 if skip is None else skip.shape, dtype=torch.float32)
    d_qkv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_gates = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (log_decay, step))
    return *d_qkv, *d_gates, d_skip, _state_like(q, v)


def backward_into(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    d_out: Tensor,
    d_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    step: Tensor,
    skip: Tensor | None,
    initial_state: Tensor | None,
    documents: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Writes gradients of q, k and v into dq, dk and dv, whose channels lie side by side; returns the others."""
    d_out, q, k, v = (with_whole_channels(x) for x in (d_out, q, k, v))
    skip, documents = side_by_side(skip), side_by_side(documents)
    call = _Call.of(q, v)
    sums, steps = _decays(call, log_decay, step, q)
    scores = _scores(call, q, k)
    states, _ = _states(call, k, v, sums, steps, documents, initial_state, 1.0, reverse=False)
    d_states, d_initial = _states(call, q, d_out, sums, steps, documents, d_final_state, scale, reverse=True)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    chunk, tile = call.tiles.chunk, call.tiles.tile
    lengths = call.heads, call.group, call.length, call.chunks
    has = {"HAS_DOCUMENTS": documents is not None, "PRECISION": "ieee"}
    sizes = {"KEYS": call.keys, "VALUES": call.values}
    d_log_decay, d_step = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (log_decay, step))
    d_skip, through = (empty(call.batch, call.heads, call.chunks * (chunk // tile)) for _ in range(2))
    kernels.value_gradient_kernel[(call.per_row, call.heads // call.block)](
        *_locate(k), *_locate(v), *_locate(d_out), *_locate(dv), d_step, *d_step.stride(),
        scores, states, d_states, sums, steps, documents, skip, d_skip, through, *lengths, scale,
        HAS_SKIP=skip is not None, HEADS=call.block, **has, **sizes,
        **call.options("value_gradient"),
    )  # fmt: skip

    blocks = call.heads // call.block
    parts, gates = [], []
    for reads, keys, values, of_values in ((True, q, d_out, states), (False, k, v, d_states)):
        parts.append(empty(blocks, call.batch, call.chunks * chunk, call.keys))
        gates.append(empty(call.rows, call.chunks * chunk))
        kernels.key_gradient_kernel[(call.per_row, blocks)](
            *_locate(keys), *_locate(values), of_values, sums, steps, documents, parts[-1], gates[-1],
            call.batch, *lengths, scale, READS=reads, HEADS=call.block, **has, **sizes,
        **call.options("key_gradient"),
        )  # fmt: skip
    d_scores = empty(blocks, call.batch, call.chunks, chunk, chunk)
    row, column = (empty(chunk // tile, call.rows, call.chunks * chunk) for _ in range(2))
    kernels.score_gradient_kernel[(call.per_row * (chunk // tile), blocks)](
        *_locate(v), *_locate(d_out), scores, sums, steps, documents, d_scores, row, column,
        call.batch, *lengths, scale, HEADS=call.block, VALUES=call.values, **has,
        **call.options("score_gradient"),
    )  # fmt: skip
    kernels.group_gradient_kernel[(call.per_row, call.groups)](
        *_locate(q), *_locate(k), *_locate(dq), *_locate(dk), *parts, d_scores, call.batch, call.length, call.chunks,
        BLOCKS=call.group // call.block, KEYS=call.keys, PRECISION="ieee",
        **call.options("group_gradient"),
    )  # fmt: skip
    kernels.decay_gradient_kernel[(call.batch * call.chunks, triton.cdiv(call.heads, _HEADS_OF_A_ROW))](
        row, column, *gates, through, d_log_decay, *d_log_decay.stride(),
        call.batch, call.heads, call.length, call.chunks, HEADS=_HEADS_OF_A_ROW,
        **call.options("decay_gradient"),
    )  # fmt: skip
    d_skip = d_skip.sum((0, 2)) if skip is not None else d_skip.new_empty(0)
    return d_log_decay, d_step, d_skip, d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx: Any, d_out: Tensor | None, d_final_state: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, step, skip, initial_state, documents = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(v)
    *d_sequences, d_skip, d_initial = _backward(
        d_out, d_final_state, q, k, v, log_decay, step, skip, initial_state, documents, ctx.scale
    )
    d_initial = d_initial if initial_state is not None else None
    return *d_sequences, d_skip if skip is not None else None, d_initial, None, None


ssd.register_autograd(_autograd, setup_context=_save)


def _decays(call: _Call, log_decay: Tensor, step: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of log2 decays within chunks, float64 beside float32 inputs, and steps; `(Z, n·chunk)` both."""
    shape = call.rows, call.chunks * call.tiles.chunk
    dtype = torch.float64 if q.dtype == torch.float32 else torch.float32
    sums = torch.empty(shape, dtype=dtype, device=q.device)
    steps = torch.empty(shape, dtype=torch.float32, device=q.device)
    kernels.decay_kernel[(call.batch * call.chunks, triton.cdiv(call.heads, _HEADS_OF_A_ROW))](
        log_decay, *log_decay.stride(), step, *step.stride(), sums, steps, call.heads, call.length, call.chunks,
        _MIN_LOG2_DECAY, HEADS=_HEADS_OF_A_ROW, **call.tiles.options("decay"),
    )  # fmt: skip
    return sums, steps


def _scores(call: _Call, q: Tensor, k: Tensor) -> Tensor:
    """`q_i·k_j` within chunks, float32 `(B, n, G, chunk, chunk)`."""
    chunk, tiles = call.tiles.chunk, call.tiles.chunk // call.tiles.tile
    scores = torch.empty(call.batch, call.chunks, call.groups, chunk, chunk, dtype=torch.float32, device=q.device)
    kernels.score_kernel[(tiles**2 * call.batch * call.chunks, call.groups)](
        *_locate(q), *_locate(k), scores, call.length, call.chunks, call.groups,
        KEYS=call.keys, PRECISION="ieee",
        **call.options("score"),
    )  # fmt: skip
    return scores


def _states(
    call: _Call, k: Tensor, v: Tensor, sums: Tensor, steps: Tensor, documents: Tensor | None, start: Tensor | None,
    scale: float, reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Results of `state_kernel`: states `(Z, n, K, V)` in k's dtype, and the last one `(B, H, K, V)`, float32."""
    states = torch.empty(call.rows, call.chunks, call.keys, call.values, dtype=k.dtype, device=k.device)
    end = torch.empty(call.batch, call.heads, call.keys, call.values, dtype=torch.float32, device=k.device)
    tiles = call.tiles
    block_k, block_v = min(tiles.state_block[0], call.keys), min(tiles.state_block[1], call.values)
    kernels.state_kernel[(call.keys // block_k * (call.values // block_v) * call.rows,)](
        *_locate(k), *_locate(v), sums, steps, documents, None if start is None else start.float().contiguous(),
        states, end, call.heads, call.group, call.length, call.chunks, scale,
        REVERSE=reverse, HAS_START=start is not None, HAS_DOCUMENTS=documents is not None,
        KEYS=call.keys, VALUES=call.values, BLOCK_K=block_k, BLOCK_V=block_v, PRECISION="ieee",
        **tiles.options("state"),
    )  # fmt: skip
    return states, end


def _locate(x: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor `(B, T, heads, channels)` and its strides but the last, which is 1."""
    return x, x.stride(0), x.stride(1), x.stride(2)
