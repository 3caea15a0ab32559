"""Forgetting attention on CUDA: FlashAttention-2 (Dao 2023) with one addition per score.

Softmax does not change when a constant is added to a row, so the decay Σ_{l=j+1..i} log f_l may be measured from any
reference r instead of from i: the bias of a score then depends on the key alone. Here r is the end of the *stretch* of
128 positions that the query lies in, and with stretches R of the query and S of the key

    bias_j = Σ_{l=j+1..r} log f_l = suffix_j + (C_R - C_S),

where suffix_j runs from j to the end of S and C are running sums over whole stretches. Sums over a stretch are small and
exact in float32; the running sums may be long, so they are kept in float64 and subtracted before they are rounded. Pairs
near the diagonal, which carry the weight, get accurate biases at any length.

Gradients: with dS the gradient of the scores, d log f_l = Σ_{i ≥ l > j} dS_ij, the exclusive running sum of the column
sums less the row sums. Row sums are zero in exact arithmetic; with outputs rounded to 16 bits they are not, their errors
would add up along the sequence, and subtracting the ones that were really computed cancels them.

Pruning: a pair of stretches is left out where the sum of log f over the stretches strictly between them, an upper bound
of every bias of the pair, is below the threshold. The running sums never rise, so for each query stretch the pairs left
out are the leftmost ones; a binary search finds them for all stretches at once, and all three kernels leave out the same.

Everything is in base 2 (scores, biases, log-normalisers), which saves a product per exponential.

Axes: B batch, H heads, Z = B·H, T positions, D channels of a head, S stretches. Tiles: M queries × N keys.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 128
_LOG2_E = math.log2(math.e)
# exp(-256) is 0 in float32; -inf itself would give -inf - (-inf) = NaN, and a larger number costs digits after a reset.
_MIN_LOG_FGATE = -256.0


# Custom operators are opaque to torch.compile and activation checkpointing: a graph goes through them unbroken.
@torch.library.custom_op("forgetting_transformer::forgetting_attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, threshold: Tensor | None, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Self-attention of T queries over the same T keys: the output, and log-normalisers `(Z, T)` in base 2.

    Args:
        q, k, v: `(B, H, T, D)`, one dtype, D a power of two from 16 to 128.
        log_fgate: `(B, H, T)`.
        threshold: `(B, H)`, pairs whose decay bias (nats) is below it may be left out; None leaves out nothing.
    """
    batch, heads, length, head_dim = q.shape
    q, k, v = (x.contiguous() for x in (q, k, v))
    suffix, running = _decay_sums(log_fgate)
    first_keys, _ = _kept_stretches(running, threshold)
    out = torch.empty_like(q)
    log_normaliser = torch.empty(batch * heads, length, dtype=torch.float32, device=q.device)
    tiles = _forward_tiles(head_dim, q.device)
    _forward_kernel[(triton.cdiv(length, tiles["BLOCK_M"]), batch * heads)](
        q, k, v, suffix, running, first_keys, out, log_normaliser, length, first_keys.shape[1], sm_scale * _LOG2_E,
        HEAD_DIM=head_dim, STRETCH_=STRETCH, **tiles,
    )  # fmt: skip
    return out, log_normaliser


@_forward.register_fake
def _(q, k, v, log_fgate, threshold, sm_scale):
    batch, heads, length, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(batch * heads, length, dtype=torch.float32, device=q.device)


@torch.library.custom_op("forgetting_transformer::forgetting_attention_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    threshold: Tensor | None,
    out: Tensor,
    log_normaliser: Tensor,
    sm_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and log f."""
    batch, heads, length, head_dim = q.shape
    d_out, q, k, v = (x.contiguous() for x in (d_out, q, k, v))
    suffix, running = _decay_sums(log_fgate)
    first_keys, end_queries = _kept_stretches(running, threshold)
    delta = (out.float() * d_out.float()).sum(-1).view(batch * heads, length)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    row_sum, column_sum = torch.empty_like(log_normaliser), torch.empty_like(log_normaliser)
    shared = (d_out, log_normaliser, delta, suffix, running)
    sizes = (length, first_keys.shape[1], sm_scale * _LOG2_E, sm_scale)
    tiles = _key_gradient_tiles(head_dim)
    _key_gradient_kernel[(triton.cdiv(length, tiles["BLOCK_N"]), batch * heads)](
        q, k, v, *shared, end_queries, dk, dv, column_sum, *sizes, HEAD_DIM=head_dim, STRETCH_=STRETCH, **tiles
    )
    tiles = _query_gradient_tiles(head_dim)
    _query_gradient_kernel[(triton.cdiv(length, tiles["BLOCK_M"]), batch * heads)](
        q, k, v, *shared, first_keys, dq, row_sum, *sizes, HEAD_DIM=head_dim, STRETCH_=STRETCH, **tiles
    )
    # Exclusive running sums in float64: their terms nearly cancel.
    difference = (column_sum - row_sum).double()
    d_log_fgate = (difference.cumsum(-1) - difference).view(batch, heads, length)
    return dq, dk, dv, d_log_fgate.to(log_fgate.dtype)


@_backward.register_fake
def _(d_out, q, k, v, log_fgate, threshold, out, log_normaliser, sm_scale):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, log_fgate))


def _save_for_backward(ctx, inputs, output) -> None:
    q, k, v, log_fgate, threshold, ctx.sm_scale = inputs
    out, log_normaliser = output
    ctx.save_for_backward(q, k, v, log_fgate, threshold, out, log_normaliser)


def _autograd(ctx, d_out: Tensor, _d_log_normaliser: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(d_out, *ctx.saved_tensors, ctx.sm_scale), None, None)


_forward.register_autograd(_autograd, setup_context=_save_for_backward)


def _decay_sums(log_fgate_BHT: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of log2 f after each position to the end of its stretch `(Z, S·128)`, float32, and over the stretches before
    each one `(Z, S + 1)`, float64."""
    batch, heads, length = log_fgate_BHT.shape
    log2_fgate = log_fgate_BHT.float().clamp(min=_MIN_LOG_FGATE).reshape(batch * heads, length) * _LOG2_E
    log2_fgate = torch.nn.functional.pad(log2_fgate, (0, -length % STRETCH)).unflatten(1, (-1, STRETCH))
    from_here = log2_fgate.flip(-1).cumsum(-1).flip(-1)
    suffix = torch.nn.functional.pad(from_here[..., 1:], (0, 1))
    running = torch.nn.functional.pad(from_here[..., 0].double().cumsum(-1), (1, 0))
    return suffix.flatten(1).contiguous(), running.contiguous()


def _kept_stretches(running: Tensor, threshold_BH: Tensor | None) -> tuple[Tensor, Tensor]:
    """What pruning keeps, `(Z, S)` int32 each: for every query stretch the first key stretch, and for every key stretch the
    end (exclusive) of the query stretches."""
    num_rows, num_stretches = running.shape[0], running.shape[1] - 1
    if threshold_BH is None:
        first_keys = torch.zeros(num_rows, num_stretches, dtype=torch.int32, device=running.device)
        return first_keys, torch.full_like(first_keys, num_stretches)
    threshold = threshold_BH.reshape(num_rows, 1).double() * _LOG2_E
    decay = -running  # never falls
    first_keys = torch.searchsorted(decay[:, 1:].contiguous(), decay[:, :-1] + threshold, out_int32=True)
    end_queries = torch.searchsorted(decay[:, :-1].contiguous(), decay[:, 1:] - threshold, out_int32=True, right=True)
    return first_keys, end_queries


# Tile sizes (queries, keys), warps and pipeline stages measured on an H200; head dimensions of 128 keep to less shared
# memory where a GPU has less.
def _forward_tiles(head_dim: int, device: torch.device) -> dict[str, int]:
    if head_dim <= 64:
        return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    if device.type == "cuda" and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 2**17 * 1.7:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}


def _key_gradient_tiles(head_dim: int) -> dict[str, int]:
    if head_dim <= 64:
        return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}


def _query_gradient_tiles(head_dim: int) -> dict[str, int]:
    if head_dim <= 64:
        return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}


@triton.jit
def _forward_tile(
    q, k_base, v_base, suffix_base, running_base, reference, start_n, length, rows, maximum, total, out, scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STRETCH_: tl.constexpr,
):  # fmt: skip
    """One tile of the forward pass: scores, online softmax, weighted sum."""
    columns = start_n + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, HEAD_DIM)
    in_range = columns < length
    k = tl.load(k_base + columns[:, None] * HEAD_DIM + channels[None, :], mask=in_range[:, None], other=0.0)
    offset = (reference - tl.load(running_base + start_n // STRETCH_ + 1)).to(tl.float32)
    bias = tl.load(suffix_base + columns) + offset
    score = tl.dot(q, tl.trans(k)) * scale + bias[None, :]
    if MASKED:
        score = tl.where((rows[:, None] >= columns[None, :]) & in_range[None, :], score, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(score, 1))
    weight = tl.math.exp2(score - new_maximum[:, None])
    rescale = tl.math.exp2(maximum - new_maximum)
    total = total * rescale + tl.sum(weight, 1)
    v = tl.load(v_base + columns[:, None] * HEAD_DIM + channels[None, :], mask=in_range[:, None], other=0.0)
    out = tl.dot(weight.to(v.dtype), v, out * rescale[:, None])
    return new_maximum, total, out


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, suffix_ptr, running_ptr, first_keys_ptr, out_ptr, log_normaliser_ptr, length, num_stretches, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRETCH_: tl.constexpr,
):  # fmt: skip
    # Long rows of tiles first: what starts last is what is short.
    start_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    z = tl.program_id(1).to(tl.int64)
    rows = start_m + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, HEAD_DIM)
    at_rows = z * length * HEAD_DIM + rows[:, None] * HEAD_DIM + channels[None, :]
    k_base, v_base = k_ptr + z * length * HEAD_DIM, v_ptr + z * length * HEAD_DIM
    suffix_base, running_base = suffix_ptr + z * num_stretches * STRETCH_, running_ptr + z * (num_stretches + 1)
    q = tl.load(q_ptr + at_rows, mask=rows[:, None] < length, other=0.0)
    reference = tl.load(running_base + start_m // STRETCH_ + 1)
    maximum = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    first_n = tl.load(first_keys_ptr + z * num_stretches + start_m // STRETCH_) * STRETCH_
    for start_n in range(first_n, start_m, BLOCK_N):
        maximum, total, out = _forward_tile(
            q, k_base, v_base, suffix_base, running_base, reference, start_n, length, rows, maximum, total, out, scale,
            False, HEAD_DIM, BLOCK_N, STRETCH_,
        )  # fmt: skip
    for start_n in range(start_m, tl.minimum(start_m + BLOCK_M, length), BLOCK_N):
        maximum, total, out = _forward_tile(
            q, k_base, v_base, suffix_base, running_base, reference, start_n, length, rows, maximum, total, out, scale,
            True, HEAD_DIM, BLOCK_N, STRETCH_,
        )  # fmt: skip
    out = out / total[:, None]
    tl.store(out_ptr + at_rows, out.to(out_ptr.dtype.element_ty), mask=rows[:, None] < length)
    tl.store(log_normaliser_ptr + z * length + rows, maximum + tl.math.log2(total), mask=rows < length)


@triton.jit
def _key_gradient_tile(
    k, v, bias_local, here, q_base, d_out_base, log_normaliser_base, delta_base, running_base, start_m, length, columns,
    dk, dv, column_sum, scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, STRETCH_: tl.constexpr,
):  # fmt: skip
    """One tile of the gradients of keys and values, transposed: keys are rows."""
    rows = start_m + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, HEAD_DIM)
    in_range = rows < length
    q = tl.load(q_base + rows[:, None] * HEAD_DIM + channels[None, :], mask=in_range[:, None], other=0.0)
    log_normaliser = tl.load(log_normaliser_base + rows, mask=in_range, other=float("inf"))
    offset = (tl.load(running_base + start_m // STRETCH_ + 1) - here).to(tl.float32)
    score_T = tl.dot(k, tl.trans(q)) * scale + (bias_local + offset)[:, None]
    weight_T = tl.math.exp2(score_T - log_normaliser[None, :])
    if MASKED:
        weight_T = tl.where(rows[None, :] >= columns[:, None], weight_T, 0.0)
    d_out = tl.load(d_out_base + rows[:, None] * HEAD_DIM + channels[None, :], mask=in_range[:, None], other=0.0)
    dv = tl.dot(weight_T.to(d_out.dtype), d_out, dv)
    delta = tl.load(delta_base + rows, mask=in_range, other=0.0)
    d_score_T = weight_T * (tl.dot(v, tl.trans(d_out)) - delta[None, :])
    column_sum += tl.sum(d_score_T, 1)
    dk = tl.dot(d_score_T.to(q.dtype), q, dk)
    return dk, dv, column_sum


@triton.jit
def _key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, log_normaliser_ptr, delta_ptr, suffix_ptr, running_ptr, end_queries_ptr,
    dk_ptr, dv_ptr, column_sum_ptr, length, num_stretches, scale, sm_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRETCH_: tl.constexpr,
):  # fmt: skip
    start_n = tl.program_id(0) * BLOCK_N
    z = tl.program_id(1).to(tl.int64)
    columns = start_n + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, HEAD_DIM)
    at_columns = z * length * HEAD_DIM + columns[:, None] * HEAD_DIM + channels[None, :]
    in_range = columns[:, None] < length
    k = tl.load(k_ptr + at_columns, mask=in_range, other=0.0)
    v = tl.load(v_ptr + at_columns, mask=in_range, other=0.0)
    bias_local = tl.load(suffix_ptr + z * num_stretches * STRETCH_ + columns)
    running_base = running_ptr + z * (num_stretches + 1)
    here = tl.load(running_base + start_n // STRETCH_ + 1)
    q_base, d_out_base = q_ptr + z * length * HEAD_DIM, d_out_ptr + z * length * HEAD_DIM
    log_normaliser_base, delta_base = log_normaliser_ptr + z * length, delta_ptr + z * length
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    column_sum = tl.zeros([BLOCK_N], tl.float32)
    # Query tiles begin at multiples of their size, so that none lies in two stretches.
    first_m = start_n // BLOCK_M * BLOCK_M
    end_of_diagonal = tl.cdiv(start_n + BLOCK_N, BLOCK_M) * BLOCK_M
    end_m = tl.minimum(tl.load(end_queries_ptr + z * num_stretches + start_n // STRETCH_) * STRETCH_, length)
    for start_m in range(first_m, tl.minimum(end_of_diagonal, length), BLOCK_M):
        dk, dv, column_sum = _key_gradient_tile(
            k, v, bias_local, here, q_base, d_out_base, log_normaliser_base, delta_base, running_base, start_m, length,
            columns, dk, dv, column_sum, scale, True, HEAD_DIM, BLOCK_M, STRETCH_,
        )  # fmt: skip
    for start_m in range(end_of_diagonal, end_m, BLOCK_M):
        dk, dv, column_sum = _key_gradient_tile(
            k, v, bias_local, here, q_base, d_out_base, log_normaliser_base, delta_base, running_base, start_m, length,
            columns, dk, dv, column_sum, scale, False, HEAD_DIM, BLOCK_M, STRETCH_,
        )  # fmt: skip
    tl.store(dk_ptr + at_columns, (dk * sm_scale).to(dk_ptr.dtype.element_ty), mask=in_range)
    tl.store(dv_ptr + at_columns, dv.to(dv_ptr.dtype.element_ty), mask=in_range)
    tl.store(column_sum_ptr + z * length + columns, column_sum, mask=columns < length)


@triton.jit
def _query_gradient_tile(
    q, d_out, log_normaliser, delta, k_base, v_base, suffix_base, running_base, reference, start_n, length, rows, dq,
    row_sum, scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STRETCH_: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient of queries."""
    columns = start_n + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, HEAD_DIM)
    in_range = columns[:, None] < length
    k = tl.load(k_base + columns[:, None] * HEAD_DIM + channels[None, :], mask=in_range, other=0.0)
    v = tl.load(v_base + columns[:, None] * HEAD_DIM + channels[None, :], mask=in_range, other=0.0)
    offset = (reference - tl.load(running_base + start_n // STRETCH_ + 1)).to(tl.float32)
    score = tl.dot(q, tl.trans(k)) * scale + (tl.load(suffix_base + columns) + offset)[None, :]
    weight = tl.math.exp2(score - log_normaliser[:, None])
    if MASKED:
        weight = tl.where(rows[:, None] >= columns[None, :], weight, 0.0)
    d_score = weight * (tl.dot(d_out, tl.trans(v)) - delta[:, None])
    row_sum += tl.sum(d_score, 1)
    dq = tl.dot(d_score.to(k.dtype), k, dq)
    return dq, row_sum


@triton.jit
def _query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, log_normaliser_ptr, delta_ptr, suffix_ptr, running_ptr, first_keys_ptr,
    dq_ptr, row_sum_ptr, length, num_stretches, scale, sm_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRETCH_: tl.constexpr,
):  # fmt: skip
    start_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    z = tl.program_id(1).to(tl.int64)
    rows = start_m + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, HEAD_DIM)
    at_rows = z * length * HEAD_DIM + rows[:, None] * HEAD_DIM + channels[None, :]
    in_range = rows < length
    q = tl.load(q_ptr + at_rows, mask=in_range[:, None], other=0.0)
    d_out = tl.load(d_out_ptr + at_rows, mask=in_range[:, None], other=0.0)
    log_normaliser = tl.load(log_normaliser_ptr + z * length + rows, mask=in_range, other=float("inf"))
    delta = tl.load(delta_ptr + z * length + rows, mask=in_range, other=0.0)
    k_base, v_base = k_ptr + z * length * HEAD_DIM, v_ptr + z * length * HEAD_DIM
    suffix_base, running_base = suffix_ptr + z * num_stretches * STRETCH_, running_ptr + z * (num_stretches + 1)
    reference = tl.load(running_base + start_m // STRETCH_ + 1)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    first_n = tl.load(first_keys_ptr + z * num_stretches + start_m // STRETCH_) * STRETCH_
    for start_n in range(first_n, start_m, BLOCK_N):
        dq, row_sum = _query_gradient_tile(
            q, d_out, log_normaliser, delta, k_base, v_base, suffix_base, running_base, reference, start_n, length, rows,
            dq, row_sum, scale, False, HEAD_DIM, BLOCK_N, STRETCH_,
        )  # fmt: skip
    for start_n in range(start_m, tl.minimum(start_m + BLOCK_M, length), BLOCK_N):
        dq, row_sum = _query_gradient_tile(
            q, d_out, log_normaliser, delta, k_base, v_base, suffix_base, running_base, reference, start_n, length, rows,
            dq, row_sum, scale, True, HEAD_DIM, BLOCK_N, STRETCH_,
        )  # fmt: skip
    tl.store(dq_ptr + at_rows, (dq * sm_scale).to(dq_ptr.dtype.element_ty), mask=in_range[:, None])
    tl.store(row_sum_ptr + z * length + rows, row_sum, mask=in_range)
