"""Forgetting attention in Triton: FlashAttention-2 (Dao 2023) with one addition per score.

Softmax does not change when a constant is added to a row, so the decay Σ_{l=j+1..i} log f_l may be measured from any
reference r instead of from i: the bias of a score then depends on the key alone. Here r is the end of the stretch of
128 positions in which the last query of the query's block of 128 lies; `decay.py` computes biases from it, `kernels.py`
attends.

The operators `forgetting_transformer::forgetting_attention_bounds`, `…_decay`, `…_forward` and `…_backward` are opaque
to torch.compile and activation checkpointing, know their FLOPs, never wait for the GPU, and give the same bits every
time. They are called in that order; what the first two find serves the forward and the backward pass. Where nothing but
autograd looks on (`ops/eager.py`), `attend` calls the functions behind them instead: `find_bounds`, `sum_decay`,
`forward` and `backward`. Sizes and launches are prepared at the first call with tensors of a signature, and kept.

Axes: B batch, H query heads, G key and value heads, M queries, N keys, D channels of a head, Z = B·H, S stretches of
keys, Q blocks of queries.
"""

import functools
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.eager import runs_eagerly
from forgetting_transformer.ops.forgetting_attention.constants import LOG2_E, MIN_LOG_FGATE, STRETCH
from forgetting_transformer.ops.forgetting_attention.decay import (
    bound_kernel,
    delta_kernel,
    gate_gradient_kernel,
    gate_sum_kernel,
    running_kernel,
    stretch_kernel,
)
from forgetting_transformer.ops.forgetting_attention.kernels import (
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from forgetting_transformer.ops.forgetting_attention.layout import (
    FUSED,
    KEPT,
    Decay,
    Heads,
    Inputs,
    Launch,
    Located,
    Signature,
    Sizes,
    alignments,
    ceil_div,
    empty_gates_like,
    empty_heads_like,
    fits_descriptor,
    on_device_of_first,
    side_by_side,
    signature,
    with_whole_channels,
)

_HOPPER_KERNELS = ("forward", "backward")
_MAX_CHUNK = 1024  # stretches or blocks that `running_kernel` works on at a time


class _Bounds:
    def __init__(self, q: Signature, k: Signature, first_key: tuple[bool | None, ...], device: torch.device) -> None:
        self.q, self.k = Located(Heads(*q)), Located(Heads(*k))
        self.sizes = sizes = Sizes.of(q[0], k[0])
        self.numbers = sizes.heads, sizes.group, *sizes.lengths
        self.launch = Launch(
            bound_kernel, max(sizes.blocks, sizes.stretches) * sizes.rows, HAS_FIRST=first_key[0] is not None,
            HEAD_DIM=_padded(q[0][3]), CHANNELS=q[0][3], STRETCH=STRETCH, num_warps=8, **FUSED,
        )  # fmt: skip


_prepare_bounds = functools.lru_cache(maxsize=KEPT)(_Bounds)


@on_device_of_first
def find_bounds(q: Tensor, k: Tensor, first_key: Tensor | None, sm_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of the scores of blocks of 128 queries and stretches of 128 keys; arguments as `forward`'s.

    Returns:
        float32, base 2: the largest norm of a query times the scale `(Z, Q)`, the least score of a query with itself
        `(Z, Q)`, the largest norm of a key `(Z, S)`.
    """
    q, k, first_key = with_whole_channels(q), with_whole_channels(k), side_by_side(first_key)
    prepared = _prepare_bounds(signature(q), signature(k), alignments(first_key), q.device)
    query_norm, self_score, key_norm = _bounds_like(prepared.sizes, q.device)
    prepared.launch(
        *prepared.q.of(q), *prepared.k.of(k), first_key, query_norm, self_score, key_norm, *prepared.numbers,
        sm_scale * LOG2_E,
    )  # fmt: skip
    return query_norm, self_score, key_norm


def _bounds_like(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    def empty(length: int) -> Tensor:
        return torch.empty(sizes.rows, length, dtype=torch.float32, device=device)

    return empty(sizes.blocks), empty(sizes.blocks), empty(sizes.stretches)


_bounds = operator("forgetting_attention_bounds")(find_bounds)


@_bounds.register_fake
def _(q, k, first_key, sm_scale):
    return _bounds_like(Sizes.of(q.shape, k.shape), q.device)


class _Sums:
    def __init__(
        self, gates: Signature, num_queries: int, others: tuple[bool | None, ...], max_chunk: int, device: torch.device
    ) -> None:
        shape, self.strides, _, _ = gates
        threshold, _, _, key_norm, first_key = others
        sizes = Sizes.of_gates(shape, num_queries)
        self.fields = _fields_of_decay(sizes)
        self.numbers = sizes.heads, sizes.queries, sizes.keys, sizes.stretches, MIN_LOG_FGATE
        self.stretch = Launch(
            stretch_kernel, sizes.rows * ceil_div(sizes.stretches, 8), HAS_FIRST=first_key is not None,
            STRETCH=STRETCH, CHUNK=8, **FUSED,
        )  # fmt: skip
        self.running_numbers = *sizes.lengths, max(sizes.stretches, sizes.blocks).bit_length() + 1
        self.running = Launch(
            running_kernel, sizes.rows, HAS_THRESHOLD=threshold is not None, HAS_BOUNDS=key_norm is not None,
            STRETCH=STRETCH, CHUNK=min(max_chunk, triton.next_power_of_2(sizes.stretches)), **FUSED,
        )  # fmt: skip


_prepare_sums = functools.lru_cache(maxsize=KEPT)(_Sums)


@on_device_of_first
def sum_decay(
    log_fgate: Tensor,
    num_queries: int,
    limit: Tensor | None,
    query_norm: Tensor | None,
    self_score: Tensor | None,
    key_norm: Tensor | None,
    first_key: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sums of log2 f and what pruning keeps.

    Args:
        log_fgate: `(B, H, N)`.
        limit: `(B, H)`, nats: without bounds a threshold, pairs whose decay bias is below it may be left out. With
            bounds a log-tolerance, pairs may be left out as long as the weights of all that a row leaves out add up to
            less than its exponential. None leaves out nothing.
        query_norm, self_score, key_norm: results of `find_bounds`, or None.
        first_key: as in `forward`.

    Returns:
        The fields of `Decay`.
    """
    if limit is not None:
        limit = limit.float().contiguous()
    first_key = side_by_side(first_key)
    others = alignments(limit, query_norm, self_score, key_norm, first_key)
    prepared = _prepare_sums(signature(log_fgate), num_queries, others, _MAX_CHUNK, log_fgate.device)
    decay = _empty_decay(prepared.fields, log_fgate.device)
    prepared.stretch(log_fgate, *prepared.strides, first_key, decay.suffix, decay.running, *prepared.numbers)
    largest_key, log_mass = (
        (None, None) if key_norm is None else (torch.empty_like(key_norm), torch.empty_like(key_norm))
    )
    prepared.running(limit, query_norm, self_score, key_norm, largest_key, log_mass, *decay, *prepared.running_numbers)
    return (*decay,)


def _fields_of_decay(sizes: Sizes) -> tuple[tuple[tuple[int, int], torch.dtype], ...]:
    """Shape and dtype of each field of `Decay`."""
    rows, stretches, blocks = sizes.rows, sizes.stretches, sizes.blocks
    return (
        ((rows, stretches * STRETCH), torch.float32),
        ((rows, stretches + 1), torch.float64),
        ((rows, blocks), torch.float64),
        ((rows, blocks), torch.int32),
        ((rows, stretches), torch.int32),
    )


def _empty_decay(fields: tuple[tuple[tuple[int, int], torch.dtype], ...], device: torch.device) -> Decay:
    return Decay(*[torch.empty(shape, dtype=dtype, device=device) for shape, dtype in fields])


def _decay_like(log_fgate: Tensor, num_queries: int) -> Decay:
    return _empty_decay(_fields_of_decay(Sizes.of_gates(log_fgate.shape, num_queries)), log_fgate.device)


_decay = operator("forgetting_attention_decay")(sum_decay)


@_decay.register_fake
def _(log_fgate, num_queries, limit, query_norm, self_score, key_norm, first_key):
    return tuple(_decay_like(log_fgate, num_queries))


class _Inputs(Inputs):
    """`Inputs`, and the kernels that take them.

    Attributes:
        hopper: names of the kernels for Hopper GPUs that take these inputs, unless they have been ruled out.
    """

    def __init__(self, tensors: tuple[Signature, ...], others: tuple[bool | None, ...], device: torch.device) -> None:
        """others: alignments of all that kernels read beside these tensors; of the first visible keys comes first."""
        super().__init__(tensors, others[0] is not None, device)
        q = self.heads[0]
        fits = q.dtype.itemsize == 2 and all(fits_descriptor(x) for x in self.heads)
        self.hopper: set[str] = set()
        if device.type == "cuda" and fits and _loads_hopper(device.index):
            self.hopper = {name for name in _HOPPER_KERNELS if (name, q.size[3]) in _hopper(name).TILES}


_prepare_forward = functools.lru_cache(maxsize=KEPT)(_Inputs)


def _locate(inputs: Inputs, tiles: dict[str, Any]) -> list[Located]:
    """The tensors as a kernel of `kernels.py` takes them that has these launch options."""
    block_m, block_n = (tiles[name] if tiles["TMA"] else 0 for name in ("BLOCK_M", "BLOCK_N"))
    return [Located(x, block) for x, block in zip(inputs.heads, (block_m, block_n, block_n, block_m), strict=False)]


class _Forward:
    def __init__(self, inputs: Inputs) -> None:
        sizes, tiles = inputs.sizes, _tiles("forward", inputs)
        self.located, self.out = _locate(inputs, tiles), Located(inputs.heads[0].like())
        self.numbers = sizes.heads, sizes.group, *sizes.lengths
        programs = ceil_div(sizes.queries, tiles["BLOCK_M"]) * sizes.rows
        self.launch = Launch(forward_kernel, programs, HAS_FIRST=inputs.has_first, **tiles)


@on_device_of_first
def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, decay: Decay, first_key: Tensor | None, sm_scale: float
) -> Tensor:
    """Attend; return log-normalisers `(B, H, M)`, nats, float32.

    Args:
        q: `(B, H, M, D)`, D up to 256.
        k, v: `(B, G, N, D)`, N ≥ M, H a multiple of G.
        out: the output is written to it, `(B, H, M, D)`, strides as of `empty_heads_like`.
        decay: result of `sum_decay`.
        first_key: `(B, M)` int32, the first key each query sees, not falling along a sequence, up to N; None is 0.
            Queries that see nothing give 0 and a log-normaliser of -inf.
    """
    q, k, v = with_whole_channels(q), with_whole_channels(k), with_whole_channels(v)
    first_key = side_by_side(first_key)
    tensors = signature(q), signature(k), signature(v)
    inputs = _prepare_forward(tensors, alignments(first_key, *decay), q.device)
    log_normaliser = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if _on_hopper("forward", inputs, q, k, v, decay, first_key, sm_scale, out, log_normaliser) is not None:
        return log_normaliser
    prepared = inputs.kept(_Forward)
    in_q, in_k, in_v = prepared.located
    prepared.launch(
        *in_q.of(q), *in_k.of(k), *in_v.of(v), *prepared.out.of(out),
        decay.suffix, decay.running, decay.reference, decay.first_stretch, first_key, log_normaliser,
        *prepared.numbers, sm_scale * LOG2_E,
    )  # fmt: skip
    return log_normaliser


@operator("forgetting_attention_forward")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    suffix: Tensor,
    running: Tensor,
    reference: Tensor,
    first_stretch: Tensor,
    end_block: Tensor,
    first_key: Tensor | None,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """The output `(B, H, M, D)`, in memory `(B, M, H, D)`, and what `forward` returns.

    What is computed comes from what `sum_decay` made of the gates; they are here for their gradient.
    """
    out, decay = empty_heads_like(q), Decay(suffix, running, reference, first_stretch, end_block)
    return out, forward(q, k, v, out, decay, first_key, sm_scale)


@_forward.register_fake
def _(q, k, v, log_fgate, suffix, running, reference, first_stretch, end_block, first_key, sm_scale):
    return empty_heads_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


class _Gradients(_Inputs):
    """`_Inputs`, and the kernels that the backward pass launches around these."""

    def __init__(
        self,
        tensors: tuple[Signature, ...],
        out: Signature,
        gates: Signature,
        others: tuple[bool | None, ...],
        device: torch.device,
    ) -> None:
        super().__init__(tensors, others, device)
        sizes, head_dim = self.sizes, self.heads[0].size[3]
        self.turns = 1 + 2 * sizes.rows * sizes.blocks
        self.column_sum = sizes.batch, sizes.heads, sizes.keys
        self.out, self.d_out = Located(Heads(*out)), Located(self.heads[3])
        self.delta_numbers = sizes.heads, *sizes.lengths
        self.delta = Launch(
            delta_kernel, sizes.blocks * sizes.rows, HEAD_DIM=_padded(head_dim), CHANNELS=head_dim, STRETCH=STRETCH,
            **FUSED,
        )  # fmt: skip
        chunks = ceil_div(sizes.keys, 1024)
        self.sums = sizes.rows, chunks
        self.gate_sum = Launch(gate_sum_kernel, sizes.rows * chunks, CHUNK=1024, **FUSED)
        self.gate_gradient = Launch(
            gate_gradient_kernel, sizes.rows * chunks, HAS_FIRST=self.has_first, CHUNK=1024,
            CHUNKS=triton.next_power_of_2(chunks), **FUSED,
        )  # fmt: skip


_prepare_backward = functools.lru_cache(maxsize=KEPT)(_Gradients)


class _KeyGradient:
    def __init__(self, inputs: Inputs) -> None:
        sizes, tiles = inputs.sizes, _tiles("key_gradient", inputs)
        self.located = _locate(inputs, tiles)
        self.dk, self.dv = (Located(x.like()) for x in inputs.heads[1:3])
        self.numbers = sizes.heads, *sizes.lengths
        programs = ceil_div(sizes.keys, tiles["BLOCK_N"]) * sizes.rows // sizes.group
        self.launch = Launch(key_gradient_kernel, programs, GROUP=sizes.group, HAS_FIRST=inputs.has_first, **tiles)


class _QueryGradient:
    def __init__(self, inputs: Inputs) -> None:
        sizes, tiles = inputs.sizes, _tiles("query_gradient", inputs)
        self.located, self.dq = _locate(inputs, tiles), Located(inputs.heads[0].like())
        self.numbers = sizes.heads, sizes.group, *sizes.lengths
        programs = ceil_div(sizes.queries, tiles["BLOCK_M"]) * sizes.rows
        self.launch = Launch(query_gradient_kernel, programs, HAS_FIRST=inputs.has_first, **tiles)


@on_device_of_first
def backward(
    d_out: Tensor,
    d_log_normaliser: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    decay: Decay,
    first_key: Tensor | None,
    out: Tensor,
    log_normaliser: Tensor,
    sm_scale: float,
    wants_gates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and log f; the last is empty unless wanted, as for gates that are constants.

    Args:
        d_log_normaliser: None is zeros.
    """
    d_out, q, k, v = with_whole_channels(d_out), with_whole_channels(q), with_whole_channels(k), with_whole_channels(v)
    if d_log_normaliser is not None:
        d_log_normaliser = d_log_normaliser.contiguous()
    first_key = side_by_side(first_key)
    tensors = signature(q), signature(k), signature(v), signature(d_out)
    others = alignments(first_key, d_log_normaliser, log_normaliser, *decay)
    prepared = _prepare_backward(tensors, signature(out), signature(log_fgate), others, q.device)
    sizes, device = prepared.sizes, q.device
    delta, shifted, row_sum = (torch.empty_like(log_normaliser) for _ in range(3))
    turns = torch.empty(prepared.turns, dtype=torch.int32, device=device)
    prepared.delta(
        *prepared.out.of(out), *prepared.d_out.of(d_out), log_normaliser, d_log_normaliser,
        decay.suffix, decay.running, decay.reference, delta, shifted, turns, *prepared.delta_numbers,
    )  # fmt: skip

    dq, dk, dv = empty_heads_like(q), empty_heads_like(k), empty_heads_like(v)
    column_sum = torch.empty(prepared.column_sum, dtype=torch.float32, device=device)
    end_query = None
    if first_key is not None:
        positions = torch.arange(sizes.keys, dtype=torch.int32, device=device).expand(sizes.batch, -1)
        end_query = torch.searchsorted(first_key, positions.contiguous(), right=True, out_int32=True)
    arguments = q, k, v, d_out, shifted, delta, decay, end_query, sm_scale, turns, dq, dk, dv, row_sum, column_sum
    if _on_hopper("backward", prepared, *arguments) is None:
        scales = sm_scale * LOG2_E, sm_scale
        keys = prepared.kept(_KeyGradient)
        in_q, in_k, in_v, in_d_out = keys.located
        keys.launch(
            *in_q.of(q), *in_k.of(k), *in_v.of(v), *in_d_out.of(d_out), *keys.dk.of(dk), *keys.dv.of(dv),
            shifted, delta, decay.suffix, decay.running, decay.reference, decay.end_block,
            first_key, end_query, column_sum, *keys.numbers, *scales,
        )  # fmt: skip
        queries = prepared.kept(_QueryGradient)
        in_q, in_k, in_v, in_d_out = queries.located
        queries.launch(
            *in_q.of(q), *in_k.of(k), *in_v.of(v), *in_d_out.of(d_out), *queries.dq.of(dq),
            shifted, delta, decay.suffix, decay.running, decay.reference, decay.first_stretch, first_key, row_sum,
            *queries.numbers, *scales,
        )  # fmt: skip

    if not wants_gates:
        return dq, dk, dv, log_fgate.new_empty(0)
    d_log_fgate = empty_gates_like(log_fgate)
    sums = torch.empty(prepared.sums, dtype=torch.float64, device=device)
    prepared.gate_sum(column_sum, row_sum, sums, sizes.queries, sizes.keys)
    prepared.gate_gradient(
        column_sum, row_sum, sums, first_key, d_log_fgate, *d_log_fgate.stride(), sizes.heads, sizes.queries, sizes.keys
    )
    return dq, dk, dv, d_log_fgate


@operator("forgetting_attention_backward")
def _backward(
    d_out: Tensor,
    d_log_normaliser: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    suffix: Tensor,
    running: Tensor,
    reference: Tensor,
    first_stretch: Tensor,
    end_block: Tensor,
    first_key: Tensor | None,
    out: Tensor,
    log_normaliser: Tensor,
    sm_scale: float,
    wants_gates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`backward`."""
    decay = Decay(suffix, running, reference, first_stretch, end_block)
    return backward(
        d_out, d_log_normaliser, q, k, v, log_fgate, decay, first_key, out, log_normaliser, sm_scale, wants_gates
    )


@_backward.register_fake
def _(
    d_out, d_log_normaliser, q, k, v, log_fgate, suffix, running, reference, first_stretch, end_block, first_key, out,
    log_normaliser, sm_scale, wants_gates,
):  # fmt: skip
    d_log_fgate = empty_gates_like(log_fgate) if wants_gates else log_fgate.new_empty(0)
    return *(empty_heads_like(x) for x in (q, k, v)), d_log_fgate


def _save_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.sm_scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _autograd(ctx, d_out: Tensor | None, d_log_normaliser: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _gradients(d_out, d_log_normaliser, ctx.saved_tensors, ctx.sm_scale, ctx.needs_input_grad[3])
    return *gradients, *[None] * 7


def _gradients(
    d_out: Tensor | None, d_log_normaliser: Tensor | None, saved: tuple[Any, ...], sm_scale: float, wants_gates: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and log f. `saved`: arguments and results of `_forward`."""
    if d_out is None and d_log_normaliser is None:
        return None, None, None, None
    q, k, v, log_fgate, *decay, first_key, out, log_normaliser = saved
    d_out = torch.zeros_like(out) if d_out is None else d_out
    # With create_graph, the operator is what refuses to be differentiated twice.
    if torch.is_grad_enabled() or not runs_eagerly(d_out, q):
        *d_qkv, d_log_fgate = _backward(d_out, d_log_normaliser, *saved, sm_scale, wants_gates)
    else:
        *d_qkv, d_log_fgate = backward(
            d_out, d_log_normaliser, q, k, v, log_fgate, Decay(*decay), first_key, out, log_normaliser, sm_scale,
            wants_gates,
        )  # fmt: skip
    return *d_qkv, d_log_fgate if wants_gates else None


_forward.register_autograd(_autograd, setup_context=_save_for_backward)


class _Attention(torch.autograd.Function):
    """`attend` and its gradients. Axes are swapped in here, where autograd keeps no account of it."""

    @staticmethod
    def forward(ctx, *arguments):
        out, log_normaliser, decay = _attend(*arguments)
        q, k, v, log_fgate, first_key, _, _, sm_scale, ctx.head_first = arguments
        _save_for_backward(ctx, (q, k, v, log_fgate, *decay, first_key, sm_scale), (out, log_normaliser))
        return out, log_normaliser

    @staticmethod
    def backward(ctx, d_out, d_log_normaliser):
        saved, wants_gates = ctx.saved_tensors, ctx.needs_input_grad[3]
        if not ctx.head_first:
            *tensors, out, log_normaliser = saved
            swapped = [x.transpose(1, 2) for x in tensors[:4]]
            saved = *swapped, *tensors[4:], out.transpose(1, 2), log_normaliser
            d_out = None if d_out is None else d_out.transpose(1, 2)
        gradients = _gradients(d_out, d_log_normaliser, saved, ctx.sm_scale, wants_gates)
        if not ctx.head_first:
            gradients = tuple([None if x is None else x.transpose(1, 2) for x in gradients])
        return *gradients, None, None, None, None, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    first_key: Tensor | None,
    threshold: Tensor | None,
    log_tolerance: Tensor | None,
    sm_scale: float,
    head_first: bool,
) -> tuple[Tensor, Tensor]:
    """Attend in eager mode: the operators' numbers without the operators. Only where `runs_eagerly`.

    Args:
        q, k, v, log_fgate: as of `_forward`, or with the head axis behind the sequence axis where not `head_first`.
        first_key, sm_scale: as of `_forward`.
        threshold, log_tolerance: as of `dispatch.attend_with_kernel`.

    Returns:
        The output, axes as of q, and the log-normalisers `(B, H, M)`.
    """
    arguments = q, k, v, log_fgate, first_key, threshold, log_tolerance, sm_scale, head_first
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or log_fgate.requires_grad):
        return _Attention.apply(*arguments)
    return _attend(*arguments)[:2]


def _attend(
    q, k, v, log_fgate, first_key, threshold, log_tolerance, sm_scale, head_first
) -> tuple[Tensor, Tensor, Decay]:
    """Result of `attend`, and sums of the gates."""
    if head_first:
        result = out = empty_heads_like(q)
    else:
        result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        q, k, v, log_fgate, out = [x.transpose(1, 2) for x in (q, k, v, log_fgate, result)]
    limit, bounds = threshold, (None, None, None)
    if log_tolerance is not None:
        limit, bounds = log_tolerance, find_bounds(q, k, first_key, sm_scale)
    decay = Decay(*sum_decay(log_fgate, q.shape[2], limit, *bounds, first_key))
    return result, forward(q, k, v, out, decay, first_key, sm_scale), decay


def compile_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, sm_scale: float) -> None:
    """Compiles the kernels of the backward pass of such inputs, while another thread compiles the forward pass.

    Runs it with nothing pruned and made-up results of the forward pass; the gradients are not used.

    Args:
        d_out, q, k, v, log_fgate, sm_scale: as of `_backward`.
    """
    log_normaliser = torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
    decay = Decay(*(x.zero_() for x in _decay_like(log_fgate, q.shape[2])))
    decay.end_block.fill_(Sizes.of(q.shape, k.shape).blocks)
    out = empty_heads_like(q).zero_()
    # Without a gradient of the log-normaliser, as where only outputs are used.
    _backward(d_out, None, q, k, v, log_fgate, *decay, None, out, log_normaliser, sm_scale, True)


# (kernel, padded head dimension): queries and keys of a tile, warps, pipeline stages. The tables were measured on an
# H200 in 16 bits (docs/lab_notebook.md has what else was tried): Hopper and later through descriptors, and through
# pointers where descriptors do not fit the inputs.
_DESCRIPTORS = {
    ("forward", 64): (128, 128, 4, 2),
    ("forward", 128): (128, 128, 8, 3),
    ("forward", 256): (128, 64, 8, 2),
    ("key_gradient", 64): (128, 64, 4, 2),
    ("key_gradient", 128): (64, 64, 4, 2),
    ("key_gradient", 256): (64, 64, 8, 1),
    ("query_gradient", 64): (64, 128, 4, 2),
    ("query_gradient", 128): (128, 128, 8, 2),
    ("query_gradient", 256): (128, 64, 8, 1),
}
_POINTERS = {
    ("forward", 64): (128, 64, 4, 3),
    ("forward", 128): (128, 128, 8, 3),
    ("forward", 256): (128, 64, 8, 2),
    ("key_gradient", 64): (64, 64, 4, 2),
    ("key_gradient", 128): (64, 64, 4, 2),
    ("key_gradient", 256): (32, 64, 8, 1),
    ("query_gradient", 64): (64, 64, 4, 3),
    ("query_gradient", 128): (128, 64, 8, 3),
    ("query_gradient", 256): (64, 64, 8, 1),
}
# Other GPUs, within the 99 KiB of shared memory that the smallest of them have. Not measured.
_SAFE = {
    ("forward", 64): (128, 64, 4, 2),
    ("forward", 128): (64, 64, 4, 2),
    ("forward", 256): (64, 32, 4, 1),
    ("key_gradient", 64): (64, 64, 4, 1),
    ("key_gradient", 128): (32, 64, 4, 1),
    ("key_gradient", 256): (32, 32, 4, 1),
    ("query_gradient", 64): (64, 64, 4, 2),
    ("query_gradient", 128): (64, 32, 4, 1),
    ("query_gradient", 256): (32, 32, 4, 1),
}


def _padded(head_dim: int) -> int:
    """Channels of a tile: a power of two that tensor cores take."""
    return max(16, triton.next_power_of_2(head_dim))


def _tiles(kernel: str, inputs: Inputs) -> dict[str, Any]:
    """Launch options of a kernel for these inputs."""
    q = inputs.heads[0]
    head_dim = _padded(q.size[3])
    key, tma = (kernel, max(64, head_dim)), False
    if q.dtype.itemsize == 4:
        # Float32 is for correctness: products of float32 accuracy, small tiles.
        block_m, block_n, warps, stages = (32, 32, 4, 1) if head_dim <= 128 else (16, 16, 4, 1)
    elif inputs.device.type == "cuda" and _has_large_shared_memory(inputs.device.index):
        tma = not inputs.has_first and head_dim == q.size[3] and all(fits_descriptor(x) for x in inputs.heads)
        block_m, block_n, warps, stages = (_DESCRIPTORS if tma else _POINTERS)[key]
    else:
        block_m, block_n, warps, stages = _SAFE[key]
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages, "TMA": tma,
        "HEAD_DIM": head_dim, "CHANNELS": q.size[3], "STRETCH": STRETCH, "PRECISION": "ieee", **FUSED,
    }  # fmt: skip


@functools.cache
def _has_large_shared_memory(device_index: int) -> bool:
    """Hopper and the Blackwell GPUs of data centres, which also have a copy engine."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device_index) < (9, 0):
        return False
    properties: Any = torch.cuda.get_device_properties(device_index)  # PyTorch's type information lacks the field
    return properties.shared_memory_per_block_optin >= 220 * 1024


def _on_hopper(kernel: str, inputs: _Inputs, *arguments: Any) -> Any:
    """Result of the function of that name in `_hopper`; None where it has no kernel for these inputs."""
    if kernel not in inputs.hopper or not backends.is_usable("attention", backends.HOPPER):
        return None
    try:
        return getattr(_hopper(kernel), kernel)(inputs, *arguments)
    except Exception as error:  # names that are gone, and whatever a compiler raises
        if backends.is_failure_of_gpu(error):
            raise
        reason = f"its {kernel.replace('_', ' ')} kernel does not run with Triton {triton.__version__}"
        backends.rule_out("attention", backends.HOPPER, f"{reason}: {backends.describe_error(error)}")
        return None


def has_hopper_kernels(device_index: int, head_dim: int) -> bool:
    """Whether this GPU runs the Hopper kernels at this head dimension: it is one, and Triton has what they need."""
    usable = backends.is_usable("attention", backends.HOPPER) and _loads_hopper(device_index)
    return usable and ("forward", head_dim) in _hopper().TILES


@functools.cache
def _loads_hopper(device_index: int) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device_index) != (9, 0):
        return False
    try:
        _hopper()
    except Exception as error:  # names that are missing, a module that moved, an assertion in Triton
        reason = f"Triton {triton.__version__} lacks what it needs: {backends.describe_error(error)}"
        backends.rule_out("attention", backends.HOPPER, reason)
        return False
    return True


def _hopper(kernel: str = "forward") -> ModuleType:
    from forgetting_transformer.ops.forgetting_attention import hopper, hopper_backward

    return hopper_backward if kernel == "backward" else hopper
