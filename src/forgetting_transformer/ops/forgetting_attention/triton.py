"""Forgetting attention in Triton: FlashAttention-2 (Dao 2023) with one addition per score.

Softmax does not change when a constant is added to a row, so the decay Σ_{l=j+1..i} log f_l may be measured from any
reference r instead of from i: the bias of a score then depends on the key alone. Here r is the end of the stretch of
128 positions in which the last query of the query's block of 128 lies; `decay.py` computes biases from it, `kernels.py`
attends.

The operators `forgetting_transformer::forgetting_attention_bounds`, `…_decay`, `…_forward` and `…_backward` are opaque
to torch.compile and activation checkpointing, know their FLOPs, never wait for the GPU, and give the same bits every
time. They are called in that order; what the first two find serves the forward and the backward pass.

Axes: B batch, H query heads, G key and value heads, M queries, N keys, D channels of a head, Z = B·H, S stretches of
    keys, Q
blocks of queries.
"""

import functools
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from forgetting_transformer.ops import backends
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
    Decay,
    Sizes,
    empty_heads_like,
    fits_descriptor,
    locate,
    on_device_of_first,
    with_whole_channels,
)

_MAX_CHUNK = 1024  # stretches or blocks that `running_kernel` works on at a time


@torch.library.custom_op("forgetting_transformer::forgetting_attention_bounds", mutates_args=())
@on_device_of_first
def _bounds(q: Tensor, k: Tensor, first_key: Tensor | None, sm_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """What bounds the scores of blocks of 128 queries and stretches of 128 keys; arguments as `_forward`'s.

    Returns:
        float32, base 2: the largest norm of a query times the scale `(Z, Q)`, the least score of a query with itself
        `(Z, Q)`, the largest norm of a key `(Z, S)`.
    """
    q, k = with_whole_channels(q), with_whole_channels(k)
    sizes = Sizes.of(q, k)
    query_norm, self_score, key_norm = _bounds_like(q, k)
    bound_kernel[(max(sizes.blocks, sizes.stretches) * sizes.rows,)](
        *locate(q), *locate(k), first_key, query_norm, self_score, key_norm, sizes.heads, sizes.group, *sizes.lengths,
        sm_scale * LOG2_E, HAS_FIRST=first_key is not None, HEAD_DIM=_padded(q.shape[3]), CHANNELS=q.shape[3],
        STRETCH=STRETCH, num_warps=8, **FUSED,
    )  # fmt: skip
    return query_norm, self_score, key_norm


def _bounds_like(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sizes = Sizes.of(q, k)

    def empty(length: int) -> Tensor:
        return torch.empty(sizes.rows, length, dtype=torch.float32, device=q.device)

    return empty(sizes.blocks), empty(sizes.blocks), empty(sizes.stretches)


@_bounds.register_fake
def _(q, k, first_key, sm_scale):
    return _bounds_like(q, k)


@torch.library.custom_op("forgetting_transformer::forgetting_attention_decay", mutates_args=())
@on_device_of_first
def _decay(
    log_fgate: Tensor,
    num_queries: int,
    threshold: Tensor | None,
    query_norm: Tensor | None,
    self_score: Tensor | None,
    key_norm: Tensor | None,
    first_key: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sums of log2 f and what pruning keeps.

    Args:
        log_fgate: `(B, H, N)`.
        threshold: `(B, H)`, nats. Without bounds, pairs whose decay bias is below it may be left out. With them, pairs
            may be left out as long as the weights of all that a row leaves out add up to less than its exponential.
            None leaves out nothing.
        query_norm, self_score, key_norm: what `_bounds` returned, or None.
        first_key: as in `_forward`.

    Returns:
        The fields of `Decay`.
    """
    decay, sizes = _decay_like(log_fgate, num_queries), Sizes.of_gates(log_fgate, num_queries)
    has_first, has_bounds = first_key is not None, key_norm is not None
    stretch_kernel[(sizes.rows * triton.cdiv(sizes.stretches, 8),)](
        log_fgate, *log_fgate.stride(), first_key, decay.suffix, decay.running,
        sizes.heads, sizes.queries, sizes.keys, sizes.stretches, MIN_LOG_FGATE, HAS_FIRST=has_first, STRETCH=STRETCH,
        CHUNK=8,
        **FUSED,
    )  # fmt: skip
    largest_key, log_mass = (
        (None, None) if key_norm is None else (torch.empty_like(key_norm), torch.empty_like(key_norm))
    )
    running_kernel[(sizes.rows,)](
        None if threshold is None else threshold.contiguous(), query_norm, self_score, key_norm, largest_key,
        log_mass, *decay,
        *sizes.lengths, max(sizes.stretches, sizes.blocks).bit_length() + 1,
        HAS_THRESHOLD=threshold is not None, HAS_BOUNDS=has_bounds, STRETCH=STRETCH,
        CHUNK=min(_MAX_CHUNK, triton.next_power_of_2(sizes.stretches)), **FUSED,
    )  # fmt: skip
    return (*decay,)


def _decay_like(log_fgate: Tensor, num_queries: int) -> Decay:
    sizes = Sizes.of_gates(log_fgate, num_queries)

    def empty(length: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes.rows, length, dtype=dtype, device=log_fgate.device)

    return Decay(
        empty(sizes.stretches * STRETCH, torch.float32),
        empty(sizes.stretches + 1, torch.float64),
        empty(sizes.blocks, torch.float64),
        empty(sizes.blocks, torch.int32),
        empty(sizes.stretches, torch.int32),
    )


@_decay.register_fake
def _(log_fgate, num_queries, threshold, query_norm, self_score, key_norm, first_key):
    return tuple(_decay_like(log_fgate, num_queries))


@torch.library.custom_op("forgetting_transformer::forgetting_attention_forward", mutates_args=())
@on_device_of_first
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
    """Attend; return the output `(B, H, M, D)`, in memory `(B, M, H, D)`, and log-normalisers `(B, H, M)`, nats,
    float32.

    Args:
        q: `(B, H, M, D)`, D up to 256.
        k, v: `(B, G, N, D)`, N ≥ M, H a multiple of G.
        log_fgate: `(B, H, N)`. What is computed comes from what `_decay` made of it; it is here for its gradient.
        suffix, running, reference, first_stretch, end_block: what `_decay` returned.
        first_key: `(B, M)` int32, the first key each query sees, not falling along a sequence, up to N; None is 0.
            Queries that see nothing give 0 and a log-normaliser of -inf.
    """
    q, k, v = (with_whole_channels(x) for x in (q, k, v))
    sizes = Sizes.of(q, k)
    decay = Decay(suffix, running, reference, first_stretch, end_block)
    if (found := _on_hopper("forward", (q, k, v), first_key, decay, sizes, sm_scale)) is not None:
        return found
    out = empty_heads_like(q)
    log_normaliser = torch.empty(sizes.batch, sizes.heads, sizes.queries, dtype=torch.float32, device=q.device)
    tiles = _tiles("forward", (q, k, v), first_key)
    (block_m, block_n), tma = (tiles["BLOCK_M"], tiles["BLOCK_N"]), tiles["TMA"]
    forward_kernel[(triton.cdiv(sizes.queries, block_m) * sizes.rows,)](
        *locate(q, block_m, tma), *locate(k, block_n, tma), *locate(v, block_n, tma), *locate(out, block_m, False),
        suffix, running, reference, first_stretch, first_key, log_normaliser,
        sizes.heads, sizes.group, *sizes.lengths, sm_scale * LOG2_E, HAS_FIRST=first_key is not None, **tiles,
    )  # fmt: skip
    return out, log_normaliser


@_forward.register_fake
def _(q, k, v, log_fgate, suffix, running, reference, first_stretch, end_block, first_key, sm_scale):
    return empty_heads_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


@torch.library.custom_op("forgetting_transformer::forgetting_attention_backward", mutates_args=())
@on_device_of_first
def _backward(
    d_out: Tensor,
    d_log_normaliser: Tensor,
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
    """Gradients of q, k, v and log f; the last is empty unless wanted, as for gates that are constants."""
    d_out, q, k, v = (with_whole_channels(x) for x in (d_out, q, k, v))
    sizes = Sizes.of(q, k)
    has_first = first_key is not None
    end_query = None
    if first_key is not None:
        positions = torch.arange(sizes.keys, dtype=torch.int32, device=q.device).expand(sizes.batch, -1).contiguous()
        end_query = torch.searchsorted(first_key.contiguous(), positions, right=True, out_int32=True)
    delta, shifted = torch.empty_like(log_normaliser), torch.empty_like(log_normaliser)
    turns = torch.empty(1 + 2 * sizes.rows * sizes.blocks, dtype=torch.int32, device=q.device)
    delta_kernel[(sizes.blocks * sizes.rows,)](
        *locate(out), *locate(d_out), log_normaliser, d_log_normaliser.contiguous(),
        suffix, running, reference, delta, shifted, turns, sizes.heads, *sizes.lengths,
        HEAD_DIM=_padded(q.shape[3]), CHANNELS=q.shape[3], STRETCH=STRETCH, **FUSED,
    )  # fmt: skip

    dq, dk, dv = (empty_heads_like(x) for x in (q, k, v))
    row_sum = torch.empty_like(log_normaliser)
    column_sum = torch.empty(sizes.batch, sizes.heads, sizes.keys, dtype=torch.float32, device=q.device)
    inputs, scales = (q, k, v, d_out), (sm_scale * LOG2_E, sm_scale)
    decay = Decay(suffix, running, reference, first_stretch, end_block)
    rows = shifted, delta, decay, sizes, sm_scale
    if _on_hopper("backward", inputs, first_key, *rows, turns, dq, dk, dv, row_sum, column_sum) is None:
        if _on_hopper("key_gradient", inputs, first_key, *rows, dk, dv, column_sum) is None:
            tiles = _tiles("key_gradient", inputs, first_key)
            (block_m, block_n), tma = (tiles["BLOCK_M"], tiles["BLOCK_N"]), tiles["TMA"]
            key_gradient_kernel[(triton.cdiv(sizes.keys, block_n) * sizes.rows // sizes.group,)](
                *locate(q, block_m, tma), *locate(k, block_n, tma), *locate(v, block_n, tma),
                *locate(d_out, block_m, tma),
                *locate(dk), *locate(dv), shifted, delta, suffix, running, reference, end_block,
                first_key, end_query, column_sum, sizes.heads, *sizes.lengths, *scales,
                GROUP=sizes.group, HAS_FIRST=has_first, **tiles,
            )  # fmt: skip
        if _on_hopper("query_gradient", inputs, first_key, *rows, dq, row_sum) is None:
            tiles = _tiles("query_gradient", inputs, first_key)
            (block_m, block_n), tma = (tiles["BLOCK_M"], tiles["BLOCK_N"]), tiles["TMA"]
            query_gradient_kernel[(triton.cdiv(sizes.queries, block_m) * sizes.rows,)](
                *locate(q, block_m, tma), *locate(k, block_n, tma), *locate(v, block_n, tma),
                *locate(d_out, block_m, tma),
                *locate(dq), shifted, delta, suffix, running, reference, first_stretch, first_key, row_sum,
                sizes.heads, sizes.group, *sizes.lengths, *scales, HAS_FIRST=has_first, **tiles,
            )  # fmt: skip

    if not wants_gates:
        return dq, dk, dv, log_fgate.new_empty(0)
    d_log_fgate = torch.empty_like(log_fgate)
    num_chunks = triton.cdiv(sizes.keys, 1024)
    sums = torch.empty(sizes.rows, num_chunks, dtype=torch.float64, device=q.device)
    gate_sum_kernel[(sizes.rows * num_chunks,)](
        column_sum, row_sum, sums, sizes.queries, sizes.keys, CHUNK=1024, **FUSED
    )
    gate_gradient_kernel[(sizes.rows * num_chunks,)](
        column_sum, row_sum, sums, first_key, d_log_fgate, *d_log_fgate.stride(), sizes.heads, sizes.queries,
        sizes.keys,
        HAS_FIRST=has_first, CHUNK=1024, CHUNKS=triton.next_power_of_2(num_chunks),
        **FUSED,
    )  # fmt: skip
    return dq, dk, dv, d_log_fgate


@_backward.register_fake
def _(
    d_out, d_log_normaliser, q, k, v, log_fgate, suffix, running, reference, first_stretch, end_block, first_key, out,
    log_normaliser, sm_scale, wants_gates,
):  # fmt: skip
    d_log_fgate = torch.empty_like(log_fgate) if wants_gates else log_fgate.new_empty(0)
    return *(empty_heads_like(x) for x in (q, k, v)), d_log_fgate


def _save_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.sm_scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _autograd(ctx, d_out: Tensor, d_log_normaliser: Tensor) -> tuple[Tensor | None, ...]:
    wants_gates = ctx.needs_input_grad[3]
    *d_qkv, d_log_fgate = _backward(d_out, d_log_normaliser, *ctx.saved_tensors, ctx.sm_scale, wants_gates)
    return *d_qkv, d_log_fgate if wants_gates else None, *[None] * 7


_forward.register_autograd(_autograd, setup_context=_save_for_backward)


def compile_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, sm_scale: float) -> None:
    """Compiles what the backward pass of such inputs launches, while another thread compiles the forward pass.

    Runs it with nothing pruned and made-up results of the forward pass; nobody reads the gradients.

    Args:
        d_out, q, k, v, log_fgate, sm_scale: as of `_backward`.
    """
    log_normaliser = torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
    decay = Decay(*(x.zero_() for x in _decay_like(log_fgate, q.shape[2])))
    decay.end_block.fill_(Sizes.of(q, k).blocks)
    out = empty_heads_like(q).zero_()
    _backward(d_out, log_normaliser, q, k, v, log_fgate, *decay, None, out, log_normaliser, sm_scale, True)


def attention_flops(q_shape: torch.Size, k_shape: torch.Size) -> int:
    """FLOPs of the forward pass as if nothing were pruned or hidden: two products over the causal pairs."""
    batch, heads, queries, head_dim = q_shape
    pairs = queries * k_shape[2] - queries * (queries - 1) // 2
    return 4 * batch * heads * head_dim * pairs


@register_flop_formula(torch.ops.forgetting_transformer.forgetting_attention_forward)
def _forward_flops(q_shape, k_shape, *args, **kwargs) -> int:
    return attention_flops(q_shape, k_shape)


@register_flop_formula(torch.ops.forgetting_transformer.forgetting_attention_backward)
def _backward_flops(d_out_shape, d_log_normaliser_shape, q_shape, k_shape, *args, **kwargs) -> int:
    """Two and a half times the forward pass: five products, of which one repeats the scores."""
    return attention_flops(q_shape, k_shape) * 5 // 2


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


def _tiles(kernel: str, inputs: tuple[Tensor, ...], first_key: Tensor | None) -> dict[str, Any]:
    """Launch options of a kernel for these inputs, queries first."""
    q, head_dim = inputs[0], _padded(inputs[0].shape[3])
    key, tma = (kernel, max(64, head_dim)), False
    if q.element_size() == 4:
        # Float32 is for correctness: products of float32 accuracy, small tiles.
        block_m, block_n, warps, stages = (32, 32, 4, 1) if head_dim <= 128 else (16, 16, 4, 1)
    elif q.is_cuda and _has_large_shared_memory(q.device.index):
        tma = first_key is None and head_dim == q.shape[3] and all(fits_descriptor(x) for x in inputs)
        block_m, block_n, warps, stages = (_DESCRIPTORS if tma else _POINTERS)[key]
    else:
        block_m, block_n, warps, stages = _SAFE[key]
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages, "TMA": tma,
        "HEAD_DIM": head_dim, "CHANNELS": q.shape[3], "STRETCH": STRETCH, "PRECISION": "ieee", **FUSED,
    }  # fmt: skip


@functools.cache
def _has_large_shared_memory(device_index: int) -> bool:
    """Hopper and the Blackwell GPUs of data centres, which also have a copy engine."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device_index) < (9, 0):
        return False
    properties: Any = torch.cuda.get_device_properties(device_index)  # PyTorch's type information lacks the field
    return properties.shared_memory_per_block_optin >= 220 * 1024


def _on_hopper(kernel: str, inputs: tuple[Tensor, ...], first_key: Tensor | None, *arguments: Any) -> Any:
    """What `hopper.py`'s function of that name returns; None where it has no kernel for these inputs, queries first."""
    q = inputs[0]
    if (
        first_key is not None
        or q.element_size() != 2
        or not (q.is_cuda and has_gluon(q.device.index, q.shape[3], kernel))
    ):
        return None
    if not all(fits_descriptor(x) for x in inputs):
        return None
    try:
        return getattr(_hopper(kernel), kernel)(*inputs, *arguments)
    except Exception as error:  # names that are gone, and whatever a compiler raises
        if backends.is_failure_of_gpu(error):
            raise
        reason = f"its {kernel.replace('_', ' ')} kernel does not run with Triton {triton.__version__}"
        backends.rule_out("attention", backends.GLUON, f"{reason}: {backends.describe_error(error)}")
        return None


def has_gluon(device_index: int, head_dim: int, kernel: str = "forward") -> bool:
    """Whether this GPU runs a Gluon kernel at this head dimension: a Hopper GPU, a Triton that has what it needs."""
    usable = backends.is_usable("attention", backends.GLUON) and _loads_hopper(device_index)
    return usable and (kernel, head_dim) in _hopper(kernel).TILES


@functools.cache
def _loads_hopper(device_index: int) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device_index) != (9, 0):
        return False
    try:
        _hopper()
    except Exception as error:  # names that are missing, a module that moved, an assertion in Triton
        reason = f"Triton {triton.__version__} lacks what it needs: {backends.describe_error(error)}"
        backends.rule_out("attention", backends.GLUON, reason)
        return False
    return True


def _hopper(kernel: str = "forward") -> ModuleType:
    from forgetting_transformer.ops.forgetting_attention import hopper, hopper_backward

    return hopper_backward if kernel == "backward" else hopper
