"""Triton kernels of linear attention with one decay per head and token, whose keys and queries heads may share.

This is the state space duality of Mamba-2 (Dao and Gu 2024, section 6): `ssd.py` has the definition and launches the
kernels. A chunk is CHUNK tokens; what meets within one is computed in tiles of TILE × TILE pairs (i, j), queries i in
rows.

With A_i the sum of log2 decays from the start of a chunk up to and including token i, and S the state before the chunk,

    out_i = scale · (2^A_i q_iᵀ S + Σ_{j ≤ i} 2^(A_i - A_j) (q_i·k_j) step_j v_j) + skip · v_i
    S'    = 2^A_last S + Σ_j 2^(A_last - A_j) step_j k_j v_jᵀ

Only differences of sums of one chunk are taken, masked before the exponential, so no exponent is above 0.

Sums over heads that share a key are taken over blocks of heads by one program, in order, and then over the blocks.
Nothing is added atomically: results are bitwise reproducible.

Three strides locate a row of a tensor `(B, T, heads, channels)`: of a sequence, a token and a head. Tensors that only
kernels see: sums, steps `(Z, n·CHUNK)`; states `(Z, n, K, V)`; scores `(B, n, G, CHUNK, CHUNK)`. n counts chunks.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(at, row_stride, first, end, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows first, … of a matrix `(ROWS, COLUMNS)`, zeros from row `end` on."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at += first.to(tl.int64) * row_stride
    return tl.load(at + (row[:, None] * row_stride + column[None, :]), mask=(first + row < end)[:, None], other=0.0)


@triton.jit
def _store_rows(at, row_stride, first, end, value, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at += first.to(tl.int64) * row_stride
    inside = (first + row < end)[:, None]
    tl.store(at + (row[:, None] * row_stride + column[None, :]), value.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _matrix(at, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A contiguous matrix."""
    return tl.load(at + (tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]))


@triton.jit
def _power(exponent):
    """2^x in float32, of sums that may be float64."""
    return tl.math.exp2(exponent.to(tl.float32))


@triton.jit
def _ends(documents, first, length, CHUNK: tl.constexpr):
    """The documents of the last tokens before a chunk and of it; before the first chunk, that of the first token."""
    before = tl.load(documents + tl.maximum(first - 1, 0))
    after = tl.load(documents + tl.minimum(first + CHUNK, length) - 1)
    return before, after


@triton.jit
def _state_weight(
    sums, steps, documents, first, start, length, scale,
    READS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How much tokens start, … of the chunk at `first` read of the state before it, or add to the state after it."""
    token = start + tl.arange(0, TILE)
    total = tl.load(sums + token)
    if READS:
        weight = _power(total) * scale
    else:
        weight = _power(tl.load(sums + first + (CHUNK - 1)) - total) * tl.load(steps + token)
    if HAS_DOCUMENTS:
        before, after = _ends(documents, first, length, CHUNK)
        own = tl.load(documents + tl.minimum(token, length - 1))
        weight = tl.where(own == (before if READS else after), weight, 0.0)
    return weight


@triton.jit
def _decay_of_pairs(
    sums, documents, first, row, column, length,
    HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """2^(A_i - A_j) of pairs within the chunk at `first`, 0 where i < j or documents differ; row and column, which
    broadcast to a tile, decide the axis of i."""
    difference = (tl.load(sums + first + row) - tl.load(sums + first + column)).to(tl.float32)
    seen = row >= column
    if HAS_DOCUMENTS:
        last = length - 1
        of_row = tl.load(documents + tl.minimum(first + row, last))
        seen = seen & (of_row == tl.load(documents + tl.minimum(first + column, last)))
    return tl.math.exp2(tl.where(seen, difference, float("-inf")))


@triton.jit(do_not_specialize=["length", "num_chunks"])
def decay_kernel(
    log_decay_ptr, log_decay_0, log_decay_1, log_decay_2, step_ptr, step_0, step_1, step_2, sums_ptr, steps_ptr,
    heads, length, num_chunks, minimum,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Sums of log2 decays from the start of each chunk, and steps, a head's side by side. After the end: decay 1 and
    step 0."""
    sequence, n = (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks
    row = tl.arange(0, CHUNK)[:, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    first = (sequence * 0 + n) * CHUNK
    inside = (first + row < length) & (head < heads)
    log_decay_at = log_decay_ptr + sequence * log_decay_0 + first * log_decay_1
    log_decay = tl.load(log_decay_at + (row * log_decay_1 + head * log_decay_2), mask=inside, other=0.0)
    log_decay = tl.maximum(log_decay.to(sums_ptr.dtype.element_ty) * 1.4426950408889634, minimum)
    step_at = step_ptr + sequence * step_0 + first * step_1
    step = tl.load(step_at + (row * step_1 + head * step_2), mask=inside, other=0.0)
    at = ((sequence * heads + head) * num_chunks + n) * CHUNK + row
    exists = (head < heads) & (row >= 0)
    tl.store(sums_ptr + at, tl.cumsum(log_decay, axis=0), mask=exists)
    tl.store(steps_ptr + at, step, mask=exists)


@triton.jit(do_not_specialize=["length", "num_chunks"])
def score_kernel(
    q_ptr, q_0, q_1, q_2, k_ptr, k_0, k_1, k_2, scores_ptr, length, num_chunks, groups,
    CHUNK: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q_i·k_j of the pairs of a chunk, one tile; tiles with i < j stay unwritten. Grid: (chunks · tiles, groups)."""
    TILES: tl.constexpr = CHUNK // TILE
    i, j = tl.program_id(0) // TILES % TILES, tl.program_id(0) % TILES
    chunk, group = (tl.program_id(0) // (TILES * TILES)).to(tl.int64), tl.program_id(1)
    if i >= j:
        sequence, first = chunk // num_chunks, (chunk % num_chunks).to(tl.int32) * CHUNK
        q = _rows(q_ptr + sequence * q_0 + group * q_2, q_1, first + i * TILE, length, TILE, KEYS)
        k = _rows(k_ptr + sequence * k_0 + group * k_2, k_1, first + j * TILE, length, TILE, KEYS)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        row, column = i * TILE + tl.arange(0, TILE)[:, None], j * TILE + tl.arange(0, TILE)[None, :]
        tl.store(scores_ptr + (chunk * groups + group) * CHUNK * CHUNK + (row * CHUNK + column), score)


@triton.jit(do_not_specialize=["length", "num_chunks"])
def state_kernel(
    k_ptr, k_0, k_1, k_2, v_ptr, v_0, v_1, v_2, sums_ptr, steps_ptr, documents_ptr, start_ptr, states_ptr, end_ptr,
    heads, group, length, num_chunks, scale,
    REVERSE: tl.constexpr, HAS_START: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of the state of one head before each chunk, and after the last one; walks the chunks in order.

    In reverse, with queries for keys and gradients of outputs for values: the gradient of the state after each chunk,
    and of the state before the first one. Grid: heads of all sequences · blocks of a state.
    """
    BLOCKS: tl.constexpr = (KEYS // BLOCK_K) * (VALUES // BLOCK_V)
    z, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    sequence, head = z // heads, z % heads
    key = block % (KEYS // BLOCK_K) * BLOCK_K
    value = block // (KEYS // BLOCK_K) * BLOCK_V
    cell = (key + tl.arange(0, BLOCK_K))[:, None] * VALUES + (value + tl.arange(0, BLOCK_V))[None, :]
    k = k_ptr + sequence * k_0 + head // group * k_2 + key
    v = v_ptr + sequence * v_0 + head * v_2 + value
    sums, steps = sums_ptr + z * num_chunks * CHUNK, steps_ptr + z * num_chunks * CHUNK
    documents = documents_ptr + sequence * length if HAS_DOCUMENTS else documents_ptr
    states = states_ptr + z * num_chunks * KEYS * VALUES
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_START:
        state += tl.load(start_ptr + z * KEYS * VALUES + cell)
    # Weights of the tokens of a chunk are loaded a chunk ahead: the loop would wait for them.
    row = tl.arange(0, CHUNK)
    n = num_chunks - 1 if REVERSE else 0
    total, last = tl.load(sums + n * CHUNK + row), tl.load(sums + n * CHUNK + (CHUNK - 1))
    step = tl.load(steps + n * CHUNK + row)
    for m in range(num_chunks):
        n = num_chunks - 1 - m if REVERSE else m
        following = tl.maximum(n - 1, 0) if REVERSE else tl.minimum(n + 1, num_chunks - 1)
        next_total, next_last = tl.load(sums + following * CHUNK + row), tl.load(sums + following * CHUNK + (CHUNK - 1))
        next_step = tl.load(steps + following * CHUNK + row)
        first = n * CHUNK
        tl.store(states + (z * 0 + n) * KEYS * VALUES + cell, state.to(states_ptr.dtype.element_ty))
        weight = _power(total) * scale if REVERSE else _power(last - total) * step
        factor = _power(last)
        if HAS_DOCUMENTS:
            before, after = _ends(documents, first, length, CHUNK)
            own = tl.load(documents + tl.minimum(first + row, length - 1))
            weight = tl.where(own == (before if REVERSE else after), weight, 0.0)
            factor = tl.where(before == after, factor, 0.0)
        k_tile = _rows(k, k_1, first, length, CHUNK, BLOCK_K)
        v_tile = (_rows(v, v_1, first, length, CHUNK, BLOCK_V) * weight[:, None]).to(k_tile.dtype)
        state = tl.dot(tl.trans(k_tile), v_tile, state * factor, input_precision=PRECISION)
        total, last, step = next_total, next_last, next_step
    tl.store(end_ptr + z * KEYS * VALUES + cell, state)


@triton.jit
def _place(num_chunks, group, CHUNK: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr):
    """Locate a program per tile and block of heads: sequence, chunk, first token, tile, block, and what it shares."""
    tile, chunk = tl.program_id(0) % (CHUNK // TILE), tl.program_id(0) // (CHUNK // TILE)
    sequence, n = (chunk // num_chunks).to(tl.int64), chunk % num_chunks
    block = tl.program_id(1)
    return sequence, n, n * CHUNK, tile, block, block * HEADS // group


@triton.jit(do_not_specialize=["length", "num_chunks"])
def output_kernel(
    q_ptr, q_0, q_1, q_2, v_ptr, v_0, v_1, v_2, out_ptr, out_0, out_1, out_2,
    scores_ptr, states_ptr, sums_ptr, steps_ptr, documents_ptr, skip_ptr,
    heads, group, length, num_chunks, scale,
    HAS_SKIP: tl.constexpr, HEADS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of a tile of queries, for HEADS heads that share it."""
    sequence, n, first, tile, block, shared = _place(num_chunks, group, CHUNK, TILE, HEADS)
    start = first + tile * TILE
    documents = documents_ptr + sequence * length if HAS_DOCUMENTS else documents_ptr
    q_tile = _rows(q_ptr + sequence * q_0 + shared * q_2, q_1, start, length, TILE, KEYS)
    row, column = tile * TILE + tl.arange(0, TILE)[:, None], tl.arange(0, CHUNK)[None, :]
    scores = scores_ptr + ((sequence * num_chunks + n) * (heads // group) + shared) * CHUNK * CHUNK
    score = tl.load(scores + (row * CHUNK + column), mask=row >= column, other=0.0)
    for h in range(HEADS):
        head = block * HEADS + h
        z = sequence * heads + head
        sums, steps = sums_ptr + z * num_chunks * CHUNK, steps_ptr + z * num_chunks * CHUNK
        state = _matrix(states_ptr + (z * num_chunks + n) * KEYS * VALUES, KEYS, VALUES)
        v = v_ptr + sequence * v_0 + head * v_2
        v_tile = _rows(v, v_1, first, length, CHUNK, VALUES)
        weight = _state_weight(sums, steps, documents, first, start, length, scale, True, HAS_DOCUMENTS, CHUNK, TILE)
        decay = _decay_of_pairs(sums, documents, first, row, column, length, HAS_DOCUMENTS)
        pairs = score * decay * (tl.load(steps + first + column) * scale)
        acc = tl.dot(q_tile, state, input_precision=PRECISION) * weight[:, None]
        acc = tl.dot(pairs.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        if HAS_SKIP:
            acc += tl.load(skip_ptr + head) * _rows(v, v_1, start, length, TILE, VALUES).to(tl.float32)
        _store_rows(out_ptr + sequence * out_0 + head * out_2, out_1, start, length, acc, TILE, VALUES)


@triton.jit(do_not_specialize=["length", "num_chunks"])
def value_gradient_kernel(
    k_ptr, k_0, k_1, k_2, v_ptr, v_0, v_1, v_2, d_out_ptr, d_out_0, d_out_1, d_out_2, dv_ptr, dv_0, dv_1, dv_2,
    d_step_ptr, d_step_0, d_step_1, d_step_2,
    scores_ptr, states_ptr, d_states_ptr, sums_ptr, steps_ptr, documents_ptr, skip_ptr, d_skip_ptr, through_ptr,
    heads, group, length, num_chunks, scale,
    HAS_SKIP: tl.constexpr, HEADS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's values and steps, for HEADS heads that share its keys.

    Also per tile its part of the gradient of skip, and of the gradient of the chunk's whole log decay that comes
    through its state, `(Z, n, tiles)` both.
    """
    TILES: tl.constexpr = CHUNK // TILE
    sequence, n, first, tile, block, shared = _place(num_chunks, group, CHUNK, TILE, HEADS)
    start = first + tile * TILE
    documents = documents_ptr + sequence * length if HAS_DOCUMENTS else documents_ptr
    k_tile = _rows(k_ptr + sequence * k_0 + shared * k_2, k_1, start, length, TILE, KEYS)
    token = start + tl.arange(0, TILE)
    column, row = tile * TILE + tl.arange(0, TILE)[:, None], tl.arange(0, CHUNK)[None, :]
    scores = scores_ptr + ((sequence * num_chunks + n) * (heads // group) + shared) * CHUNK * CHUNK
    score = tl.load(scores + (row * CHUNK + column), mask=row >= column, other=0.0)
    for h in range(HEADS):
        head = block * HEADS + h
        z = sequence * heads + head
        sums, steps = sums_ptr + z * num_chunks * CHUNK, steps_ptr + z * num_chunks * CHUNK
        state_of_chunk = (z * num_chunks + n) * KEYS * VALUES
        d_state = _matrix(d_states_ptr + state_of_chunk, KEYS, VALUES)
        d_out = d_out_ptr + sequence * d_out_0 + head * d_out_2
        d_out_tile = _rows(d_out, d_out_1, first, length, CHUNK, VALUES)
        last = tl.load(sums + first + (CHUNK - 1))
        weight, factor = _power(last - tl.load(sums + token)), _power(last)
        if HAS_DOCUMENTS:
            before, after = _ends(documents, first, length, CHUNK)
            weight = tl.where(tl.load(documents + tl.minimum(token, length - 1)) == after, weight, 0.0)
            factor = tl.where(before == after, factor, 0.0)
        pairs = score * _decay_of_pairs(sums, documents, first, row, column, length, HAS_DOCUMENTS) * scale
        acc = tl.dot(k_tile, d_state, input_precision=PRECISION) * weight[:, None]
        acc = tl.dot(pairs.to(d_out_tile.dtype), d_out_tile, acc, input_precision=PRECISION)
        v_own = _rows(v_ptr + sequence * v_0 + head * v_2, v_1, start, length, TILE, VALUES).to(tl.float32)
        dv = acc * tl.load(steps + token)[:, None]
        if HAS_SKIP:
            d_out_own = _rows(d_out, d_out_1, start, length, TILE, VALUES).to(tl.float32)
            dv += tl.load(skip_ptr + head) * d_out_own
            tl.store(d_skip_ptr + (z * num_chunks + n) * TILES + tile, tl.sum(v_own * d_out_own))
        _store_rows(dv_ptr + sequence * dv_0 + head * dv_2, dv_1, start, length, dv, TILE, VALUES)
        d_step = d_step_ptr + sequence * d_step_0 + head * d_step_2 + (sequence * 0 + start) * d_step_1
        tl.store(d_step + tl.arange(0, TILE) * d_step_1, tl.sum(v_own * acc, axis=1), mask=token < length)
        part = state_of_chunk + tile * (KEYS // TILES) * VALUES
        state_part = _matrix(states_ptr + part, KEYS // TILES, VALUES).to(tl.float32)
        through = tl.sum(state_part * _matrix(d_states_ptr + part, KEYS // TILES, VALUES).to(tl.float32))
        tl.store(through_ptr + (z * num_chunks + n) * TILES + tile, through * factor)


@triton.jit(do_not_specialize=["batch", "length", "num_chunks"])
def key_gradient_kernel(
    k_ptr, k_0, k_1, k_2, v_ptr, v_0, v_1, v_2, states_ptr, sums_ptr, steps_ptr, documents_ptr, part_ptr, gate_ptr,
    batch, heads, group, length, num_chunks, scale,
    READS: tl.constexpr, HEADS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up what reaches a tile of queries (READS), or of keys, through states: a sum over HEADS heads.

    READS: k are queries, v gradients of outputs, and states those before the chunk. Otherwise k are keys, v values, and
    states the gradients of those after it. Writes `part (blocks of heads, B, n·CHUNK, K)`, and per head `gate (Z,
    n·CHUNK)`, the share of each token in the gradient of its sum of log decays.
    """
    TILES: tl.constexpr = CHUNK // TILE
    tile, chunk = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    sequence, n = (chunk // num_chunks).to(tl.int64), chunk % num_chunks
    first = n * CHUNK
    start = first + tile * TILE
    block = tl.program_id(1)  # of all heads, those of a group next to each other
    documents = documents_ptr + sequence * length if HAS_DOCUMENTS else documents_ptr
    shared = block * HEADS // group
    k_tile = _rows(k_ptr + sequence * k_0 + shared * k_2, k_1, start, length, TILE, KEYS).to(tl.float32)
    acc = tl.zeros((TILE, KEYS), tl.float32)
    for h in range(HEADS):
        head = block * HEADS + h
        z = sequence * heads + head
        sums, steps = sums_ptr + z * num_chunks * CHUNK, steps_ptr + z * num_chunks * CHUNK
        weight = _state_weight(sums, steps, documents, first, start, length, scale, READS, HAS_DOCUMENTS, CHUNK, TILE)
        v_tile = _rows(v_ptr + sequence * v_0 + head * v_2, v_1, start, length, TILE, VALUES)
        state = _matrix(states_ptr + (z * num_chunks + n) * KEYS * VALUES, KEYS, VALUES)
        own = tl.dot(v_tile, tl.trans(state), input_precision=PRECISION) * weight[:, None]
        acc += own
        gate = tl.sum(k_tile * own, axis=1)
        tl.store(gate_ptr + z * num_chunks * CHUNK + start + tl.arange(0, TILE), gate)
    at = part_ptr + (block * (batch * num_chunks + sequence * 0) + chunk) * CHUNK * KEYS + tile * TILE * KEYS
    tl.store(at + (tl.arange(0, TILE)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]), acc)


@triton.jit(do_not_specialize=["batch", "length", "num_chunks"])
def score_gradient_kernel(
    v_ptr, v_0, v_1, v_2, d_out_ptr, d_out_0, d_out_1, d_out_2, scores_ptr, sums_ptr, steps_ptr, documents_ptr,
    part_ptr, row_ptr, column_ptr, batch, heads, group, length, num_chunks, scale,
    HEADS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of scores, summed over HEADS heads: `part (blocks of heads, B, n, CHUNK, CHUNK)`.

    Per head the gradient of the log decay of all its pairs, summed over j `row (tiles of j, Z, n·CHUNK)`, and over i
    `column (tiles of i, Z, n·CHUNK)`, tokens with themselves left out.
    """
    TILES: tl.constexpr = CHUNK // TILE
    i, rest = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    j, chunk = rest % TILES, rest // TILES
    if i >= j:
        sequence, n = (chunk // num_chunks).to(tl.int64), chunk % num_chunks
        first = n * CHUNK
        block = tl.program_id(1)
        documents = documents_ptr + sequence * length if HAS_DOCUMENTS else documents_ptr
        row, column = i * TILE + tl.arange(0, TILE)[:, None], j * TILE + tl.arange(0, TILE)[None, :]
        shared = (sequence * num_chunks + n) * (heads // group) + block * HEADS // group
        scores = tl.load(scores_ptr + shared * CHUNK * CHUNK + (row * CHUNK + column))
        scores = tl.where(row > column, scores, 0.0)
        acc = tl.zeros((TILE, TILE), tl.float32)
        for h in range(HEADS):
            head = block * HEADS + h
            z = sequence * heads + head
            sums, steps = sums_ptr + z * num_chunks * CHUNK, steps_ptr + z * num_chunks * CHUNK
            d_out_at = d_out_ptr + sequence * d_out_0 + head * d_out_2
            d_out = _rows(d_out_at, d_out_1, first + i * TILE, length, TILE, VALUES)
            v = _rows(v_ptr + sequence * v_0 + head * v_2, v_1, first + j * TILE, length, TILE, VALUES)
            decay = _decay_of_pairs(sums, documents, first, row, column, length, HAS_DOCUMENTS)
            d_score = tl.dot(d_out, tl.trans(v), input_precision=PRECISION) * decay
            d_score *= tl.load(steps + first + column) * scale
            acc += d_score
            d_sum = d_score * scores
            length_of_all = (sequence * 0 + batch * heads) * num_chunks * CHUNK
            at = z * num_chunks * CHUNK + first + tl.arange(0, TILE)
            tl.store(row_ptr + j * length_of_all + at + i * TILE, tl.sum(d_sum, axis=1))
            tl.store(column_ptr + i * length_of_all + at + j * TILE, tl.sum(d_sum, axis=0))
        at = part_ptr + (block * (batch * num_chunks + sequence * 0) + chunk) * CHUNK * CHUNK
        tl.store(at + (row * CHUNK + column), acc)


@triton.jit(do_not_specialize=["batch", "length", "num_chunks"])
def group_gradient_kernel(
    q_ptr, q_0, q_1, q_2, k_ptr, k_0, k_1, k_2, dq_ptr, dq_0, dq_1, dq_2, dk_ptr, dk_0, dk_1, dk_2,
    q_part_ptr, k_part_ptr, score_part_ptr, batch, length, num_chunks,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries and of keys of one group: sums of the parts of its BLOCKS blocks of heads."""
    TILES: tl.constexpr = CHUNK // TILE
    tile, chunk = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    sequence, first = (chunk // num_chunks).to(tl.int64), chunk % num_chunks * CHUNK
    start, group = first + tile * TILE, tl.program_id(1)
    per_block = (sequence * 0 + batch * num_chunks) * CHUNK
    row_of_part = (group * BLOCKS) * per_block + chunk * CHUNK
    here, there = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    key = tl.arange(0, KEYS)[None, :]
    dq, dk = tl.zeros((TILE, KEYS), tl.float32), tl.zeros((TILE, KEYS), tl.float32)
    for block in range(BLOCKS):
        at = (row_of_part + block * per_block + tile * TILE) * KEYS + (here * KEYS + key)
        dq += tl.load(q_part_ptr + at)
        dk += tl.load(k_part_ptr + at)
    for j in range(0, tile + 1):
        d_score = tl.zeros((TILE, TILE), tl.float32)
        for block in range(BLOCKS):
            at = (row_of_part + block * per_block + tile * TILE) * CHUNK + (here * CHUNK + (j * TILE + there))
            d_score += tl.load(score_part_ptr + at)
        k_tile = _rows(k_ptr + sequence * k_0 + group * k_2, k_1, first + j * TILE, length, TILE, KEYS)
        dq = tl.dot(d_score.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    for i in range(tile, TILES):
        d_score = tl.zeros((TILE, TILE), tl.float32)
        for block in range(BLOCKS):
            at = (row_of_part + block * per_block + i * TILE) * CHUNK + (there * CHUNK + (tile * TILE + here))
            d_score += tl.load(score_part_ptr + at)
        q_tile = _rows(q_ptr + sequence * q_0 + group * q_2, q_1, first + i * TILE, length, TILE, KEYS)
        dk = tl.dot(d_score.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    _store_rows(dq_ptr + sequence * dq_0 + group * dq_2, dq_1, start, length, dq, TILE, KEYS)
    _store_rows(dk_ptr + sequence * dk_0 + group * dk_2, dk_1, start, length, dk, TILE, KEYS)


@triton.jit(do_not_specialize=["batch", "length", "num_chunks"])
def decay_gradient_kernel(
    row_ptr, column_ptr, read_ptr, added_ptr, through_ptr, d_log_decay_ptr, d_log_decay_0, d_log_decay_1, d_log_decay_2,
    batch, heads, length, num_chunks,
    CHUNK: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The gradient of log decays.

    A token's log decay acts on pairs with i at or after it and j before it. It also acts on reads of the state before
    the chunk by these i, on additions to the state after the chunk by these j, and on the state that passes through.
    """
    sequence, n = (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks
    within = tl.arange(0, CHUNK)[:, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    exists = (head < heads) & (within >= 0)
    z = sequence * heads + head
    at = (z * num_chunks + n) * CHUNK + within
    length_of_all = (sequence * 0 + batch * heads) * num_chunks * CHUNK
    later = tl.load(read_ptr + at, mask=exists, other=0.0)
    for tile in range(CHUNK // TILE):
        start = tile * length_of_all + at
        later += tl.load(row_ptr + start, mask=exists & (within // TILE >= tile), other=0.0)
        later -= tl.load(column_ptr + start, mask=exists & (within // TILE <= tile), other=0.0)
    added = tl.load(added_ptr + at, mask=exists, other=0.0)
    gradient = tl.cumsum(later, axis=0, reverse=True) + (tl.cumsum(added, axis=0) - added)
    for tile in range(CHUNK // TILE):
        through = through_ptr + (z * num_chunks + n) * (CHUNK // TILE) + tile
        gradient += tl.load(through, mask=head < heads, other=0.0)
    first = (sequence * 0 + n) * CHUNK
    place = d_log_decay_ptr + sequence * d_log_decay_0 + first * d_log_decay_1
    place += within * d_log_decay_1 + head * d_log_decay_2
    tl.store(place, gradient.to(d_log_decay_ptr.dtype.element_ty), mask=exists & (first + within < length))
