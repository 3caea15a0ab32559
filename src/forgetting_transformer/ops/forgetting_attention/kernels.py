"""Triton kernels of forgetting attention: forward, gradients of keys and values, gradients of queries.

FlashAttention-2 (Dao 2023) with one addition per score; `triton.py` explains the addend and launches them, `decay.py`
prepares it. Everything is in base 2 (scores, biases, log-normalisers), which saves a product per exponential.

Tiles are M queries × N keys, as large as registers and shared memory allow: `triton.py` has the sizes that were
fastest on an H200, for each kernel and head dimension, and smaller ones for other GPUs. Most are computed without a
mask; the loops over tiles that the diagonal or `first_key` cuts are the same code with one.

Tensors come as pointers, or as descriptors for the copy engine of Hopper and later GPUs (TMA). Three numbers locate a
head: its pointer offset per sequence and per head and the stride of its rows, or for a descriptor its row offset per
sequence and per head and its column offset per head.
"""

# Kernels are written as Triton wants them: no keyword arguments where it hands over tuples, and many arguments.
import triton
import triton.language as tl


@triton.jit
def _head(x, per_sequence, per_head, last, sequence, head, TMA: tl.constexpr):
    """Locate a head: (pointer or descriptor, first row, first column or row stride)."""
    if TMA:
        return x, (sequence * per_sequence + head * per_head).to(tl.int32), (head * last).to(tl.int32)
    else:
        return x + sequence * per_sequence + head * per_head, 0, last


@triton.jit
def _load(
    x, first_row, last, start, lowest, end, zero,
    RAGGED: tl.constexpr, HAS_LOWEST: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows start, … of a head `(BLOCK, HEAD_DIM)`: zeros from row `end` on if RAGGED, before row `lowest` if
    HAS_LOWEST.

    Descriptors are for lengths that are whole tiles and queries that see every earlier key, and need neither.
    """
    if TMA:
        return x.load([first_row + start, last])
    else:
        row = tl.arange(0, BLOCK)
        channel = tl.arange(0, HEAD_DIM)
        # One pointer that moves, and offsets that stay: a tile of 64-bit pointers would take twice the registers.
        at = (x + (zero + start) * last) + (row[:, None] * last + channel[None, :])
        if RAGGED or HAS_LOWEST:
            inside = (start + row < end) & (start + row >= lowest)
            return tl.load(at, mask=inside[:, None] & (channel < CHANNELS)[None, :], other=0.0)
        elif CHANNELS != HEAD_DIM:
            return tl.load(at, mask=(channel < CHANNELS)[None, :] & (row >= 0)[:, None], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def _store(
    x, per_sequence, per_head, row_stride, sequence, head, start, end, value,
    HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write rows start, … < end of a head."""
    row, channel = tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    at = x + sequence * per_sequence + head * per_head + (sequence * 0 + start) * row_stride
    inside = (start + row < end)[:, None] & (channel < CHANNELS)[None, :]
    tl.store(at + (row[:, None] * row_stride + channel[None, :]), value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _visible(query, key, first_key, num_keys, HAS_FIRST: tl.constexpr):
    """Mask of the keys that queries see, from positions and first visible keys that broadcast to one tile."""
    seen = (key <= query) & (key < num_keys)
    if HAS_FIRST:
        seen = seen & (key >= first_key)
    return seen


@triton.jit
def _forward_span(
    acc, maximum, total, q, k, k_row, k_last, v, v_row, v_last, suffix, running, reference, query, first_key, lowest,
    start, stop, num_keys, zero, scale,
    MASKED: tl.constexpr, HAS_FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRETCH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the tiles of keys from start to stop."""
    for n in range(start, stop, BLOCK_N):
        k_tile = _load(
            k, k_row, k_last, n, lowest, num_keys, zero, MASKED, MASKED and HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, TMA
        )
        key = n + tl.arange(0, BLOCK_N)
        offset = (reference - tl.load(running + n // STRETCH + 1)).to(tl.float32)
        bias = tl.load(suffix + key) + offset
        score = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION) * scale + bias[None, :]
        if MASKED:
            seen = _visible(query[:, None], key[None, :], first_key[:, None], num_keys, HAS_FIRST)
            score = tl.where(seen, score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        weight = tl.math.exp2(score - new_maximum[:, None])
        rescale = tl.math.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weight, 1)
        v_tile = _load(
            v, v_row, v_last, n, lowest, num_keys, zero, MASKED, MASKED and HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, TMA
        )
        acc = tl.dot(weight.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        maximum = new_maximum
    return acc, maximum, total


@triton.jit
def forward_kernel(
    q_ptr, q_0, q_1, q_2, k_ptr, k_0, k_1, k_2, v_ptr, v_0, v_1, v_2, out_ptr, out_0, out_1, out_2,
    suffix_ptr, running_ptr, reference_ptr, first_stretch_ptr, first_key_ptr, log_normaliser_ptr,
    heads, group, num_queries, num_keys, num_stretches, num_blocks, scale,
    HAS_FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRETCH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs and log-normalisers (nats) of a tile of queries."""
    num_tiles = tl.cdiv(num_queries, BLOCK_M)
    # Long rows of tiles first: what starts last is what is short.
    start_m = (num_tiles - 1 - tl.program_id(0) % num_tiles) * BLOCK_M
    z = (tl.program_id(0) // num_tiles).to(tl.int64)
    sequence, head, zero = z // heads, z % heads, z * 0
    q, q_row, q_last = _head(q_ptr, q_0, q_1, q_2, sequence, head, TMA)
    k, k_row, k_last = _head(k_ptr, k_0, k_1, k_2, sequence, head // group, TMA)
    v, v_row, v_last = _head(v_ptr, v_0, v_1, v_2, sequence, head // group, TMA)
    suffix, running = suffix_ptr + z * num_stretches * STRETCH, running_ptr + z * (num_stretches + 1)
    block = z * num_blocks + start_m // STRETCH
    reference = tl.load(reference_ptr + block)

    row = start_m + tl.arange(0, BLOCK_M)
    first_query = start_m + num_keys - num_queries  # position of the tile's first query
    query = row + num_keys - num_queries
    end = tl.minimum(first_query + BLOCK_M, num_keys)
    start = tl.load(first_stretch_ptr + block) * STRETCH
    lowest, first_key, first_full = 0, query, start
    if HAS_FIRST:
        first_keys = first_key_ptr + sequence * num_queries
        first_key = tl.load(first_keys + row, mask=row < num_queries, other=num_keys)
        lowest = tl.load(first_keys)
        start = tl.maximum(start, tl.load(first_keys + start_m) // BLOCK_N * BLOCK_N)
        last_first = tl.load(first_keys + tl.minimum(start_m + BLOCK_M, num_queries) - 1)
        first_full = tl.minimum(tl.maximum(tl.cdiv(last_first, BLOCK_N) * BLOCK_N, start), tl.maximum(end, start))
    end_full = tl.maximum(first_full, (first_query + 1) // BLOCK_N * BLOCK_N)

    q_tile = _load(q, q_row, q_last, start_m, 0, num_queries, zero, True, False, HEAD_DIM, CHANNELS, BLOCK_M, TMA)
    maximum = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    if HAS_FIRST:
        acc, maximum, total = _forward_span(
            acc, maximum, total, q_tile, k, k_row, k_last, v, v_row, v_last, suffix, running, reference, query,
            first_key,
            lowest, start, first_full, num_keys, zero, scale,
            True, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, STRETCH, TMA, PRECISION,
        )  # fmt: skip
    acc, maximum, total = _forward_span(
        acc, maximum, total, q_tile, k, k_row, k_last, v, v_row, v_last, suffix, running, reference, query, first_key,
        lowest, first_full, end_full, num_keys, zero, scale,
        False, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, STRETCH, TMA, PRECISION,
    )  # fmt: skip
    acc, maximum, total = _forward_span(
        acc, maximum, total, q_tile, k, k_row, k_last, v, v_row, v_last, suffix, running, reference, query, first_key,
        lowest, end_full, end, num_keys, zero, scale,
        True, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, STRETCH, TMA, PRECISION,
    )  # fmt: skip

    sees_nothing = total == 0.0
    acc = acc / tl.where(sees_nothing, 1.0, total)[:, None]
    _store(out_ptr, out_0, out_1, out_2, sequence, head, start_m, num_queries, acc, HEAD_DIM, CHANNELS, BLOCK_M)
    # From the bias as summed to the tile's reference to the bias as summed to each query.
    inside = row < num_queries
    to_query = tl.load(running + query // STRETCH + 1, mask=inside, other=0.0) - reference
    shift = to_query.to(tl.float32) - tl.load(suffix + query, mask=inside, other=0.0)
    log_normaliser = (maximum + tl.math.log2(tl.where(sees_nothing, 1.0, total)) + shift) * 0.6931471805599453
    log_normaliser = tl.where(sees_nothing, float("-inf"), log_normaliser)
    tl.store(log_normaliser_ptr + z * num_queries + row, log_normaliser, mask=inside)


@triton.jit
def _key_gradient_span(
    dk, dv, column_sum, k, v, bias, here, q, q_row, q_last, d_out, d_out_row, d_out_last, log_normaliser, delta,
    reference,
    first_keys, key, start, stop, num_queries, num_keys, zero, scale,
    MASKED: tl.constexpr, HAS_FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STRETCH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values from the tiles of queries from start to stop; keys are rows."""
    for m in range(start, stop, BLOCK_M):
        row = m + tl.arange(0, BLOCK_M)
        inside = row < num_queries
        q_tile = _load(q, q_row, q_last, m, 0, num_queries, zero, True, False, HEAD_DIM, CHANNELS, BLOCK_M, TMA)
        normaliser = tl.load(log_normaliser + row, mask=inside, other=float("inf"))
        offset = (tl.load(reference + m // STRETCH) - here).to(tl.float32)
        if MASKED and HAS_FIRST:
            first_key = tl.load(first_keys + row, mask=inside, other=num_keys)
            # Padding may hold anything, NaN included, and NaN · 0 would be NaN.
            is_real = first_key <= row + num_keys - num_queries
            q_tile = tl.where(is_real[:, None], q_tile, 0.0)
        else:
            first_key = row
        score_T = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION) * scale + (bias + offset)[:, None]
        weight_T = tl.math.exp2(score_T - normaliser[None, :])
        if MASKED:
            query = row + num_keys - num_queries
            seen = _visible(query[None, :], key[:, None], first_key[None, :], num_keys, HAS_FIRST)
            weight_T = tl.where(seen, weight_T, 0.0)
        d_out_tile = _load(
            d_out, d_out_row, d_out_last, m, 0, num_queries, zero, True, False, HEAD_DIM, CHANNELS, BLOCK_M, TMA
        )
        if MASKED and HAS_FIRST:
            d_out_tile = tl.where(is_real[:, None], d_out_tile, 0.0)
        dv = tl.dot(weight_T.to(d_out_tile.dtype), d_out_tile, dv, input_precision=PRECISION)
        delta_m = tl.load(delta + row, mask=inside, other=0.0)
        d_weight_T = tl.dot(v, tl.trans(d_out_tile), input_precision=PRECISION)
        d_score_T = weight_T * (d_weight_T - delta_m[None, :])
        column_sum += tl.sum(d_score_T, 1)
        dk = tl.dot(d_score_T.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv, column_sum


@triton.jit
def key_gradient_kernel(
    q_ptr, q_0, q_1, q_2, k_ptr, k_0, k_1, k_2, v_ptr, v_0, v_1, v_2, d_out_ptr, d_out_0, d_out_1, d_out_2,
    dk_ptr, dk_0, dk_1, dk_2, dv_ptr, dv_0, dv_1, dv_2,
    log_normaliser_ptr, delta_ptr, suffix_ptr, running_ptr, reference_ptr, end_block_ptr, first_key_ptr, end_query_ptr,
    column_sum_ptr, heads, num_queries, num_keys, num_stretches, num_blocks, scale, sm_scale,
    GROUP: tl.constexpr, HAS_FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STRETCH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, summed over the query heads that share them, and column sums."""
    num_tiles = tl.cdiv(num_keys, BLOCK_N)
    start_n = (tl.program_id(0) % num_tiles) * BLOCK_N
    pair = (tl.program_id(0) // num_tiles).to(tl.int64)
    key_heads = heads // GROUP
    sequence, key_head, zero = pair // key_heads, pair % key_heads, pair * 0
    k, k_row, k_last = _head(k_ptr, k_0, k_1, k_2, sequence, key_head, TMA)
    v, v_row, v_last = _head(v_ptr, v_0, v_1, v_2, sequence, key_head, TMA)
    key = start_n + tl.arange(0, BLOCK_N)
    lowest = 0
    if HAS_FIRST:
        lowest = tl.load(first_key_ptr + sequence * num_queries)
    k_tile = _load(k, k_row, k_last, start_n, lowest, num_keys, zero, True, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, TMA)
    v_tile = _load(v, v_row, v_last, start_n, lowest, num_keys, zero, True, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, TMA)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)

    # Rows of queries by their index, which is num_keys - num_queries less than their position. Tiles of queries begin
    # at multiples of their size, so that none lies in two blocks.
    before = num_keys - num_queries
    start = tl.maximum(start_n - before, 0) // BLOCK_M * BLOCK_M
    last_key = tl.minimum(start_n + BLOCK_N, num_keys) - 1
    end_diagonal = tl.cdiv(tl.maximum(last_key - before, 0), BLOCK_M) * BLOCK_M
    for member in range(GROUP):
        head = key_head * GROUP + member
        z = sequence * heads + head
        q, q_row, q_last = _head(q_ptr, q_0, q_1, q_2, sequence, head, TMA)
        d_out, d_out_row, d_out_last = _head(d_out_ptr, d_out_0, d_out_1, d_out_2, sequence, head, TMA)
        bias = tl.load(suffix_ptr + z * num_stretches * STRETCH + key)
        here = tl.load(running_ptr + z * (num_stretches + 1) + start_n // STRETCH + 1)
        log_normaliser, delta = log_normaliser_ptr + z * num_queries, delta_ptr + z * num_queries
        reference, first_keys = reference_ptr + z * num_blocks, first_key_ptr
        end = tl.minimum(tl.load(end_block_ptr + z * num_stretches + start_n // STRETCH) * STRETCH, num_queries)
        end_full = end
        if HAS_FIRST:
            first_keys += sequence * num_queries
            end_queries = end_query_ptr + sequence * num_keys
            end = tl.minimum(end, tl.load(end_queries + last_key))
            end_full = tl.minimum(end, tl.load(end_queries + start_n) // BLOCK_M * BLOCK_M)
        middle = tl.minimum(end_diagonal, end)
        end_full = tl.maximum(end_full, middle)
        column_sum = tl.zeros([BLOCK_N], tl.float32)
        dk, dv, column_sum = _key_gradient_span(
            dk, dv, column_sum, k_tile, v_tile, bias, here, q, q_row, q_last, d_out, d_out_row, d_out_last,
            log_normaliser, delta, reference, first_keys, key, start, middle, num_queries, num_keys, zero, scale,
            True, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_M, STRETCH, TMA, PRECISION,
        )  # fmt: skip
        dk, dv, column_sum = _key_gradient_span(
            dk, dv, column_sum, k_tile, v_tile, bias, here, q, q_row, q_last, d_out, d_out_row, d_out_last,
            log_normaliser, delta, reference, first_keys, key, middle, end_full, num_queries, num_keys, zero, scale,
            False, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_M, STRETCH, TMA, PRECISION,
        )  # fmt: skip
        if HAS_FIRST:
            dk, dv, column_sum = _key_gradient_span(
                dk, dv, column_sum, k_tile, v_tile, bias, here, q, q_row, q_last, d_out, d_out_row, d_out_last,
                log_normaliser, delta, reference, first_keys, key, end_full, end, num_queries, num_keys, zero, scale,
                True, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_M, STRETCH, TMA, PRECISION,
            )  # fmt: skip
        tl.store(column_sum_ptr + z * num_keys + key, column_sum, mask=key < num_keys)
    _store(dk_ptr, dk_0, dk_1, dk_2, sequence, key_head, start_n, num_keys, dk * sm_scale, HEAD_DIM, CHANNELS, BLOCK_N)
    _store(dv_ptr, dv_0, dv_1, dv_2, sequence, key_head, start_n, num_keys, dv, HEAD_DIM, CHANNELS, BLOCK_N)


@triton.jit
def _query_gradient_span(
    dq, row_sum, q, d_out, normaliser, delta, k, k_row, k_last, v, v_row, v_last, suffix, running, reference, query,
    first_key, lowest, start, stop, num_keys, zero, scale,
    MASKED: tl.constexpr, HAS_FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRETCH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries from the tiles of keys from start to stop."""
    for n in range(start, stop, BLOCK_N):
        k_tile = _load(
            k, k_row, k_last, n, lowest, num_keys, zero, MASKED, MASKED and HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, TMA
        )
        v_tile = _load(
            v, v_row, v_last, n, lowest, num_keys, zero, MASKED, MASKED and HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, TMA
        )
        key = n + tl.arange(0, BLOCK_N)
        offset = (reference - tl.load(running + n // STRETCH + 1)).to(tl.float32)
        bias = tl.load(suffix + key) + offset
        score = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION) * scale + bias[None, :]
        weight = tl.math.exp2(score - normaliser[:, None])
        if MASKED:
            seen = _visible(query[:, None], key[None, :], first_key[:, None], num_keys, HAS_FIRST)
            weight = tl.where(seen, weight, 0.0)
        d_weight = tl.dot(d_out, tl.trans(v_tile), input_precision=PRECISION)
        d_score = weight * (d_weight - delta[:, None])
        row_sum += tl.sum(d_score, 1)
        dq = tl.dot(d_score.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq, row_sum


@triton.jit
def query_gradient_kernel(
    q_ptr, q_0, q_1, q_2, k_ptr, k_0, k_1, k_2, v_ptr, v_0, v_1, v_2, d_out_ptr, d_out_0, d_out_1, d_out_2,
    dq_ptr, dq_0, dq_1, dq_2,
    log_normaliser_ptr, delta_ptr, suffix_ptr, running_ptr, reference_ptr, first_stretch_ptr, first_key_ptr,
    row_sum_ptr,
    heads, group, num_queries, num_keys, num_stretches, num_blocks, scale, sm_scale,
    HAS_FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRETCH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, and row sums. Which tiles: as in `forward_kernel`."""
    num_tiles = tl.cdiv(num_queries, BLOCK_M)
    start_m = (num_tiles - 1 - tl.program_id(0) % num_tiles) * BLOCK_M
    z = (tl.program_id(0) // num_tiles).to(tl.int64)
    sequence, head, zero = z // heads, z % heads, z * 0
    q, q_row, q_last = _head(q_ptr, q_0, q_1, q_2, sequence, head, TMA)
    k, k_row, k_last = _head(k_ptr, k_0, k_1, k_2, sequence, head // group, TMA)
    v, v_row, v_last = _head(v_ptr, v_0, v_1, v_2, sequence, head // group, TMA)
    d_out, d_out_row, d_out_last = _head(d_out_ptr, d_out_0, d_out_1, d_out_2, sequence, head, TMA)
    suffix, running = suffix_ptr + z * num_stretches * STRETCH, running_ptr + z * (num_stretches + 1)
    block = z * num_blocks + start_m // STRETCH
    reference = tl.load(reference_ptr + block)

    row = start_m + tl.arange(0, BLOCK_M)
    inside = row < num_queries
    first_query = start_m + num_keys - num_queries
    query = row + num_keys - num_queries
    end = tl.minimum(first_query + BLOCK_M, num_keys)
    start = tl.load(first_stretch_ptr + block) * STRETCH
    lowest, first_key, first_full = 0, query, start
    if HAS_FIRST:
        first_keys = first_key_ptr + sequence * num_queries
        first_key = tl.load(first_keys + row, mask=inside, other=num_keys)
        lowest = tl.load(first_keys)
        start = tl.maximum(start, tl.load(first_keys + start_m) // BLOCK_N * BLOCK_N)
        last_first = tl.load(first_keys + tl.minimum(start_m + BLOCK_M, num_queries) - 1)
        first_full = tl.minimum(tl.maximum(tl.cdiv(last_first, BLOCK_N) * BLOCK_N, start), tl.maximum(end, start))
    end_full = tl.maximum(first_full, (first_query + 1) // BLOCK_N * BLOCK_N)

    q_tile = _load(q, q_row, q_last, start_m, 0, num_queries, zero, True, False, HEAD_DIM, CHANNELS, BLOCK_M, TMA)
    d_out_tile = _load(
        d_out, d_out_row, d_out_last, start_m, 0, num_queries, zero, True, False, HEAD_DIM, CHANNELS, BLOCK_M, TMA
    )
    if HAS_FIRST:  # padding may hold NaN
        d_out_tile = tl.where((first_key <= query)[:, None], d_out_tile, 0.0)
    normaliser = tl.load(log_normaliser_ptr + z * num_queries + row, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + z * num_queries + row, mask=inside, other=0.0)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_FIRST:
        dq, row_sum = _query_gradient_span(
            dq, row_sum, q_tile, d_out_tile, normaliser, delta, k, k_row, k_last, v, v_row, v_last, suffix, running,
            reference, query, first_key, lowest, start, first_full, num_keys, zero, scale,
            True, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, STRETCH, TMA, PRECISION,
        )  # fmt: skip
    dq, row_sum = _query_gradient_span(
        dq, row_sum, q_tile, d_out_tile, normaliser, delta, k, k_row, k_last, v, v_row, v_last, suffix, running,
        reference, query, first_key, lowest, first_full, end_full, num_keys, zero, scale,
        False, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, STRETCH, TMA, PRECISION,
    )  # fmt: skip
    dq, row_sum = _query_gradient_span(
        dq, row_sum, q_tile, d_out_tile, normaliser, delta, k, k_row, k_last, v, v_row, v_last, suffix, running,
        reference, query, first_key, lowest, end_full, end, num_keys, zero, scale,
        True, HAS_FIRST, HEAD_DIM, CHANNELS, BLOCK_N, STRETCH, TMA, PRECISION,
    )  # fmt: skip
    _store(dq_ptr, dq_0, dq_1, dq_2, sequence, head, start_m, num_queries, dq * sm_scale, HEAD_DIM, CHANNELS, BLOCK_M)
    tl.store(row_sum_ptr + z * num_queries + row, row_sum, mask=inside)
