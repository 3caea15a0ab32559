"""Triton kernels around attention: sums of log forget gates, the tiles that pruning skips, the gradient of log f.

With a *stretch* of 128 positions S and its end e_S, the decay from key j in S to any later position r is

    Σ_{l=j+1..r} log f_l = suffix_j + (C_r - C_{e_S}),        suffix_j = Σ_{l=j+1..e_S} log f_l

where suffix_j is short and exact in float32, and the running sums C are kept in float64 and subtracted before they are
rounded. So biases of near pairs, the ones that carry weight, are accurate at any length.

Pruning: a block of 128 queries leaves out a stretch of keys where the largest bias of any pair of the two is below a
threshold. It is C at the block's first query less C at the end of the stretch. The stretches left out are the leftmost
ones, because running sums never rise, so a binary search per block finds them, for all blocks at once. A second one per
stretch, among what the first has found, finds the last block that keeps the stretch, so that all kernels leave out the
same pairs.

The threshold is given, or comes from bounds on the scores of each pair of block and stretch (`bound_kernel`). What a
query q_i gives to all keys up to the end of stretch S is at most

    exp(s·max|q|·max|k| + C_i - C_{e_S} - s·q_i·k_i) · mass_S,        mass_S = Σ_{S' ≤ S} 128·exp(C_{e_S} - C_{e_S'})

because its log-normaliser is no less than its score with itself. All of that is one number per block, the largest norm
of a key up to S, and mass_S, which is a running sum too; and the bound rises with S, as the search needs.

Sums are of log2 f. Axes: Z sequences × heads, S stretches of keys, Q blocks of queries, N keys, M queries.
"""

import triton
import triton.language as tl


@triton.jit
def stretch_kernel(
    log_fgate_ptr, per_sequence, per_head, per_key, first_key_ptr, suffix_ptr, running_ptr,
    heads, num_queries, num_keys, num_stretches, minimum,
    HAS_FIRST: tl.constexpr, STRETCH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums within CHUNK stretches: writes `suffix (Z, S·128)` float32, and each stretch's sum to `running (Z, S + 1)`,
    one place to the right, where `running_kernel` adds them up."""
    num_chunks = tl.cdiv(num_stretches, CHUNK)
    z = (tl.program_id(0) // num_chunks).to(tl.int64)
    gates = log_fgate_ptr + (z // heads) * per_sequence + (z % heads) * per_head
    # The gate of the first key that anything sees acts on what nothing sees.
    lowest = 0
    if HAS_FIRST:
        lowest = tl.load(first_key_ptr + (z // heads) * num_queries)
    within = tl.arange(0, STRETCH)[None, :]
    stretch = (tl.program_id(0) % num_chunks) * CHUNK + tl.arange(0, CHUNK)
    exists = stretch < num_stretches
    key = stretch[:, None] * STRETCH + within
    per_key = z * 0 + per_key  # in 64 bits
    counts = (key > lowest) & (key < num_keys)
    log2_f = tl.load(gates + key * per_key, mask=counts, other=0.0).to(tl.float32)
    log2_f = tl.maximum(log2_f, minimum) * 1.4426950408889634
    # The next position's, rather than a difference of sums: exact beside a hard reset.
    counts = (within < STRETCH - 1) & (key + 1 > lowest) & (key + 1 < num_keys)
    following = tl.load(gates + (key + 1) * per_key, mask=counts, other=0.0).to(tl.float32)
    following = tl.maximum(following, minimum) * 1.4426950408889634
    suffix = tl.cumsum(following, axis=1, reverse=True)
    tl.store(suffix_ptr + z * num_stretches * STRETCH + key, suffix, mask=exists[:, None] & (within >= 0))
    total = tl.sum(log2_f, axis=1).to(tl.float64)
    tl.store(running_ptr + z * (num_stretches + 1) + stretch + 1, total, mask=exists)


@triton.jit
def bound_kernel(
    q_ptr, q_0, q_1, q_2, k_ptr, k_0, k_1, k_2, first_key_ptr, query_norm_ptr, self_score_ptr, key_norm_ptr,
    heads, group, num_queries, num_keys, num_stretches, num_blocks, scale,
    HAS_FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """For the block of queries and the stretch of keys with this number: the largest norm of a query times the scale
    of scores and the least score of a query with itself `(Z, Q)`, and the largest norm of a key `(Z, S)`; base 2,
    float32."""
    part = tl.program_id(0) % tl.maximum(num_stretches, num_blocks)
    z = (tl.program_id(0) // tl.maximum(num_stretches, num_blocks)).to(tl.int64)
    q = q_ptr + (z // heads) * q_0 + (z % heads) * q_1
    k = k_ptr + (z // heads) * k_0 + (z % heads // group) * k_1
    lowest = 0
    if HAS_FIRST:  # padding may hold anything
        lowest = tl.load(first_key_ptr + (z // heads) * num_queries)
    row, channel = part * STRETCH + tl.arange(0, STRETCH), tl.arange(0, HEAD_DIM)
    channels = (channel < CHANNELS)[None, :]

    exists = (row >= lowest) & (row < num_keys)
    at = k + row[:, None] * (z * 0 + k_2) + channel[None, :]
    key = tl.load(at, mask=exists[:, None] & channels, other=0.0).to(tl.float32)
    key_norm = tl.sqrt(tl.max(tl.sum(key * key, 1), 0))
    tl.store(key_norm_ptr + z * num_stretches + part, key_norm, mask=part < num_stretches)

    position = row + num_keys - num_queries
    exists = (row < num_queries) & (position >= lowest)
    at = q + row[:, None] * (z * 0 + q_2) + channel[None, :]
    query = tl.load(at, mask=exists[:, None] & channels, other=0.0).to(tl.float32)
    if num_keys != num_queries:
        at = k + position[:, None] * (z * 0 + k_2) + channel[None, :]
        key = tl.load(at, mask=exists[:, None] & channels, other=0.0).to(tl.float32)
    query_norm = tl.sqrt(tl.max(tl.sum(query * query, 1), 0)) * scale
    self_score = tl.min(tl.where(exists, tl.sum(query * key, 1) * scale, float("inf")), 0)
    tl.store(query_norm_ptr + z * num_blocks + part, query_norm, mask=part < num_blocks)
    tl.store(self_score_ptr + z * num_blocks + part, self_score, mask=part < num_blocks)


@triton.jit
def _decayed_sum(left_factor, left, right_factor, right):
    return left_factor * right_factor, left * right_factor + right


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def running_kernel(
    threshold_ptr, query_norm_ptr, self_score_ptr, key_norm_ptr, largest_key_ptr, log_mass_ptr,
    suffix_ptr, running_ptr, reference_ptr, first_stretch_ptr, end_block_ptr,
    num_queries, num_keys, num_stretches, num_blocks, search_steps,
    HAS_THRESHOLD: tl.constexpr, HAS_BOUNDS: tl.constexpr, STRETCH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Running sums of one head of one sequence, and what pruning keeps of it.

    Turns `running (Z, S + 1)` float64 from sums of stretches into sums over the stretches before each; writes for every
    block of queries `reference (Z, Q)` float64, the running sum at the end of its last query's stretch, and
    `first_stretch (Z, Q)` int32; for every stretch `end_block (Z, S)` int32, one past the last block that sees it. With
    bounds also, for the search alone, the largest norm of a key so far and the logarithm of mass, `(Z, S)`.
    """
    z = tl.program_id(0).to(tl.int64)
    suffix, running = suffix_ptr + z * num_stretches * STRETCH, running_ptr + z * (num_stretches + 1)
    first_stretches = first_stretch_ptr + z * num_blocks
    largest_key, log_mass = largest_key_ptr, log_mass_ptr
    before = tl.zeros([1], tl.float64)
    largest_before, mass_before = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    tl.store(running + tl.arange(0, 1), before)
    for start in range(0, num_stretches, CHUNK):
        stretch = start + tl.arange(0, CHUNK)
        exists = stretch < num_stretches
        total = tl.load(running + stretch + 1, mask=exists, other=0.0)
        tl.debug_barrier()  # all have read before any overwrites
        tl.store(running + stretch + 1, tl.cumsum(total, axis=0) + before, mask=exists)
        before += tl.sum(total, axis=0)
        if HAS_BOUNDS:
            largest_key, log_mass = largest_key_ptr + z * num_stretches, log_mass_ptr + z * num_stretches
            norm = tl.load(key_norm_ptr + z * num_stretches + stretch, mask=exists, other=0.0)
            norm = tl.maximum(tl.associative_scan(norm, 0, _larger), largest_before)
            tl.store(largest_key + stretch, norm, mask=exists)
            largest_before = tl.maximum(largest_before, tl.max(norm, 0))
            factor = tl.math.exp2(total.to(tl.float32))
            ones = tl.zeros([CHUNK], tl.float32) + STRETCH
            factors, mass = tl.associative_scan((factor, ones), 0, _decayed_sum)
            mass += factors * mass_before
            tl.store(log_mass + stretch, tl.math.log2(mass), mask=exists)
            mass_before = tl.sum(tl.where(stretch == start + CHUNK - 1, mass, 0.0), 0) + tl.zeros([1], tl.float32)
    tl.debug_barrier()  # what other threads stored is read below

    shift = num_keys - num_queries
    threshold = tl.zeros([1], tl.float64)
    if HAS_THRESHOLD:
        threshold += tl.load(threshold_ptr + z).to(tl.float64) * 1.4426950408889634
    least_after = tl.zeros([1], tl.int32) + num_stretches
    for chunk in range(tl.cdiv(num_blocks, CHUNK) - 1, -1, -1):
        block = chunk * CHUNK + tl.arange(0, CHUNK)
        exists = block < num_blocks
        last_query = tl.minimum(block * STRETCH + STRETCH, num_queries) - 1 + shift
        tl.store(
            reference_ptr + z * num_blocks + block,
            tl.load(running + last_query // STRETCH + 1, mask=exists, other=0.0),
            mask=exists,
        )
        low = tl.zeros([CHUNK], tl.int32)
        if HAS_THRESHOLD:
            query = block * STRETCH + shift
            at_query = tl.load(running + query // STRETCH + 1, mask=exists, other=0.0)
            at_query -= tl.load(suffix + query, mask=exists, other=0.0).to(tl.float64)
            query_norm = tl.zeros([CHUNK], tl.float32)
            if HAS_BOUNDS:
                query_norm = tl.load(query_norm_ptr + z * num_blocks + block, mask=exists, other=0.0)
                at_query -= tl.load(self_score_ptr + z * num_blocks + block, mask=exists, other=0.0).to(tl.float64)
            high = tl.where(exists, query // STRETCH, 0)
            for _ in range(search_steps):
                middle = (low + high) // 2
                bias = at_query - tl.load(running + middle + 1)
                if HAS_BOUNDS:
                    margin = query_norm * tl.load(largest_key + middle) + tl.load(log_mass + middle)
                    bias += margin.to(tl.float64)
                # A threshold that is NaN leaves out nothing. (Norms are not: maxima pass over NaN.)
                kept = (bias < threshold) == 0
                searching = low < high
                high = tl.where(searching & kept, middle, high)
                low = tl.where(searching & (kept == 0), middle + 1, low)
        if HAS_BOUNDS:
            # A later block may look back further than an earlier one. Both then do, and end_block can be searched for.
            low = tl.where(exists, low, num_stretches)
            low = tl.minimum(tl.associative_scan(low, 0, _smaller, reverse=True), least_after)
            least_after = tl.minimum(least_after, tl.min(low, 0))
        tl.store(first_stretches + block, low, mask=exists)
    tl.debug_barrier()
    for start in range(0, num_stretches, CHUNK):
        stretch = start + tl.arange(0, CHUNK)
        low = tl.zeros([CHUNK], tl.int32) + num_blocks
        if HAS_THRESHOLD:
            low, high = low * 0, low
            for _ in range(search_steps):
                middle = (low + high) // 2
                searching = low < high
                kept = tl.load(first_stretches + middle, mask=searching, other=0) <= stretch
                low = tl.where(searching & kept, middle + 1, low)
                high = tl.where(searching & (kept == 0), middle, high)
        tl.store(end_block_ptr + z * num_stretches + stretch, low, mask=stretch < num_stretches)


@triton.jit
def delta_kernel(
    out_ptr, out_0, out_1, out_2, d_out_ptr, d_out_0, d_out_1, d_out_2, log_normaliser_ptr, d_log_normaliser_ptr,
    suffix_ptr, running_ptr, reference_ptr, delta_ptr, shifted_ptr, turns_ptr,
    heads, num_queries, num_keys, num_stretches, num_blocks,
    HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """Computes, for a block of queries, Σ_d out·d_out less the log-normaliser's gradient, which the gradients of scores
    subtract, and the log-normaliser in base 2 as measured from the block's reference, for a query that sees nothing
    +inf.

    Also zeroes `turns`, a counter of tickets and then two of turns for each block `(Z, Q, 2)`, int32.
    """
    tl.store(turns_ptr + 1 + tl.program_id(0) * 2 + tl.arange(0, 2), 0)
    if tl.program_id(0) == 0:
        tl.store(turns_ptr, 0)
    block = tl.program_id(0) % num_blocks
    z = (tl.program_id(0) // num_blocks).to(tl.int64)
    row, channel = block * STRETCH + tl.arange(0, STRETCH), tl.arange(0, HEAD_DIM)
    inside = row < num_queries
    mask = inside[:, None] & (channel < CHANNELS)[None, :]
    sequence, head = z // heads, z % heads
    at = sequence * out_0 + head * out_1 + row[:, None] * (z * 0 + out_2) + channel[None, :]
    out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    at = sequence * d_out_0 + head * d_out_1 + row[:, None] * (z * 0 + d_out_2) + channel[None, :]
    d_out = tl.load(d_out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    log_normaliser = tl.load(log_normaliser_ptr + z * num_queries + row, mask=inside, other=0.0)
    sees_nothing = log_normaliser == float("-inf")
    delta = tl.where(sees_nothing, 0.0, tl.sum(out * d_out, 1))
    if d_log_normaliser_ptr is not None:
        delta -= tl.load(d_log_normaliser_ptr + z * num_queries + row, mask=inside, other=0.0)
    tl.store(delta_ptr + z * num_queries + row, delta, mask=inside)
    query = row + num_keys - num_queries
    reference = tl.load(reference_ptr + z * num_blocks + block)
    to_query = tl.load(running_ptr + z * (num_stretches + 1) + query // STRETCH + 1, mask=inside, other=0.0) - reference
    suffix = tl.load(suffix_ptr + z * num_stretches * STRETCH + query, mask=inside, other=0.0)
    shifted = log_normaliser * 1.4426950408889634 - (to_query.to(tl.float32) - suffix)
    tl.store(shifted_ptr + z * num_queries + row, tl.where(sees_nothing, float("inf"), shifted), mask=inside)


@triton.jit
def _gate_terms(column_sum_ptr, row_sum_ptr, z, key, num_queries, num_keys):
    """Column sums less row sums at these positions, float64."""
    exists = key < num_keys
    row = key - (num_keys - num_queries)
    column_sum = tl.load(column_sum_ptr + z * num_keys + key, mask=exists, other=0.0).to(tl.float64)
    row_sum = tl.load(row_sum_ptr + z * num_queries + row, mask=exists & (row >= 0), other=0.0).to(tl.float64)
    return column_sum - row_sum


@triton.jit
def gate_sum_kernel(column_sum_ptr, row_sum_ptr, sum_ptr, num_queries, num_keys, CHUNK: tl.constexpr):
    """Sums of the terms of the gates' gradient over chunks of positions, `(Z, chunks)` float64."""
    num_chunks = tl.cdiv(num_keys, CHUNK)
    z = (tl.program_id(0) // num_chunks).to(tl.int64)
    key = (tl.program_id(0) % num_chunks) * CHUNK + tl.arange(0, CHUNK)
    total = tl.sum(_gate_terms(column_sum_ptr, row_sum_ptr, z, key, num_queries, num_keys), axis=0)
    tl.store(sum_ptr + tl.program_id(0), total)


@triton.jit
def gate_gradient_kernel(
    column_sum_ptr, row_sum_ptr, sum_ptr, first_key_ptr, d_log_fgate_ptr, per_sequence, per_head, per_key,
    heads, num_queries, num_keys,
    HAS_FIRST: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """d log f_l = Σ_{i ≥ l > j} dS_ij: the exclusive running sum of column sums less row sums, in float64.

    Row sums of dS are zero in exact arithmetic; with outputs rounded to 16 bits they are not, their errors would add up
    along the sequence, and subtracting the ones that were really computed cancels them.
    """
    num_chunks = tl.cdiv(num_keys, CHUNK)
    z = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    earlier = tl.arange(0, CHUNKS)
    before = tl.sum(tl.load(sum_ptr + z * num_chunks + earlier, mask=earlier < chunk, other=0.0), axis=0)
    key = chunk * CHUNK + tl.arange(0, CHUNK)
    terms = _gate_terms(column_sum_ptr, row_sum_ptr, z, key, num_queries, num_keys)
    gradient = tl.cumsum(terms, axis=0) - terms + before
    lowest = 0
    if HAS_FIRST:
        lowest = tl.load(first_key_ptr + (z // heads) * num_queries)
    gradient = tl.where(key > lowest, gradient, 0.0)
    at = d_log_fgate_ptr + (z // heads) * per_sequence + (z % heads) * per_head + key * (z * 0 + per_key)
    tl.store(at, gradient.to(d_log_fgate_ptr.dtype.element_ty), mask=key < num_keys)
