"""Triton kernels of Mamba's selective scan: see `scan_triton.py` for what they compute and in which order.

A program is one warp. It holds the states of a block of channels in registers and takes one token after another. Its
tile of states has four axes, `(K0, I0, K1, I1)`: state `k = k1·K0 + k0` of channel `i = i1·I0 + i0` of the block, where
K1·I1 = 32 lanes hold K0·I0 states each. Sums over states then need log2(K1) exchanges between lanes, and sums over
channels log2(I1). Channels are `(1, I0, K1, I1)`, as often as lanes need them: Triton would spread fewer elements over
all lanes, and states with them. B and C are `(K0, 1, K1, 1)`.

Tokens are taken in fours, so that the loads of four tokens are in flight together; those behind the end have dt = 0,
x = 0 and dy = 0, and change nothing. Tuples grow by `+`, the one way that Triton knows.

A sequence `(B, T, ·)` is a pointer and the stride of T, in elements; its last axis is contiguous. In a chunk, t counts
from the chunk's start, and `at` says where: channels i, states k, and the ends of both, the number of tokens, or 0 for
channels and states that do not exist.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _indices(block, K0: tl.constexpr, I0: tl.constexpr, K1: tl.constexpr, I1: tl.constexpr):
    """Channels `(1, I0, K1, I1)` and states `(K0, 1, K1, 1)` of a block of channels."""
    i = tl.arange(0, I0)[None, :, None, None] + I0 * tl.arange(0, I1)[None, None, None, :]
    k = tl.arange(0, K0)[:, None, None, None] + K0 * tl.arange(0, K1)[None, None, :, None]
    return tl.broadcast_to(block * (I0 * I1) + i, (1, I0, K1, I1)), k


@triton.jit
def _once(end_i, K1: tl.constexpr):
    """Ends that are 0 in all but one of the lanes that hold the same channel."""
    return tl.where(tl.arange(0, K1)[None, None, :, None] == 0, end_i, 0)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) to float32's relative accuracy, also where it is small.

    With e = exp(-|x|) ≤ 1 it is max(x, 0) + 2 artanh(s), s = e / (2 + e) ≤ 1/3, whose series converges quickly.
    """
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    s = e / (2.0 + e)
    z = s * s
    series = 1.0 + z * (
        0.33333334 + z * (0.2 + z * (0.14285715 + z * (0.11111111 + z * (0.09090909 + z * 0.07692308))))
    )
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _softplus_slope(dt):
    """The derivative of softplus where it is dt: 1 - exp(-dt)."""
    series = dt * (1.0 + dt * (-0.5 + dt * (0.16666667 + dt * (-0.041666668 + dt * 0.008333334))))
    return tl.where(dt < 0.1, series, 1.0 - tl.exp2(-dt * LOG2_E))


@triton.jit
def _sum_states(x):
    """`(K0, I0, K1, I1)` to `(1, I0, K1, I1)`, in every lane."""
    x = tl.sum(x, axis=0, keep_dims=True)
    return tl.broadcast_to(tl.sum(x, axis=2, keep_dims=True), x.shape)


@triton.jit
def _sum_channels(x):
    """`(K0, I0, K1, I1)` to `(K0, 1, K1, 1)`."""
    return tl.sum(tl.sum(x, axis=1, keep_dims=True), axis=3, keep_dims=True)


@triton.jit
def _row(sequence, t, index, end):
    """Elements `index` of token t in float32; 0 from the end on."""
    ptr, stride = sequence
    return tl.load(ptr + t * stride + index, mask=t < end, other=0.0).to(tl.float32)


@triton.jit
def _write(sequence, t, i, x, end):
    ptr, stride = sequence
    tl.store(ptr + t * stride + i, x, mask=t < end)


@triton.jit
def _per_channel(ptr, i, channels, IS_GIVEN: tl.constexpr):
    """One number per channel in float32; 0 where there is none."""
    if IS_GIVEN:
        return tl.load(ptr + i, mask=i < channels, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def _step_size(dt, t, at, bias, SOFTPLUS: tl.constexpr):
    """The step size of token t, 0 from the end on."""
    i, _, end_i, _ = at
    step = _row(dt, t, i, end_i)
    if SOFTPLUS:
        step = tl.where(t < end_i, _softplus(step + bias), 0.0)
    return step


@triton.jit
def _log_kept(starts_ptr, t, stop, HAS_STARTS: tl.constexpr):
    """-inf for the first token of a document, which keeps nothing of the state before it; otherwise 0."""
    if HAS_STARTS:
        return tl.where(tl.load(starts_ptr + t, mask=t < stop, other=0) != 0, -float("inf"), 0.0)
    else:
        return 0.0


@triton.jit
def _decay(step, A2, starts_ptr, t, stop, HAS_STARTS: tl.constexpr):
    """exp(dt A) of token t. A2 is A in base 2."""
    return tl.exp2(step * A2 + _log_kept(starts_ptr, t, stop, HAS_STARTS))


@triton.jit
def _forward_step(
    h, span, x, dt, B, C, starts_ptr, t, stop, at, A2, bias, D, STATES_ONLY: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """The state after token t, the sum of step sizes, and the token's output (x where only states are wanted)."""
    i, k, end_i, end_k = at
    x_t, B_t = _row(x, t, i, end_i), _row(B, t, k, end_k)
    step = _step_size(dt, t, at, bias, SOFTPLUS)
    h = _decay(step, A2, starts_ptr, t, stop, HAS_STARTS) * h + (step * x_t) * B_t
    if STATES_ONLY:
        return h, span + step + _log_kept(starts_ptr, t, stop, HAS_STARTS), x_t
    else:
        return h, span, _sum_states(h * _row(C, t, k, end_k)) + D * x_t


@triton.jit(do_not_specialize=["length", "chunks"])
def forward_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, starts_ptr, states_ptr, spans_ptr, y_ptr,
    x_stride_b, x_stride_t, dt_stride_b, dt_stride_t, B_stride_b, B_stride_t, C_stride_b, C_stride_t,
    length, chunks, channels, STATES: tl.constexpr, STATES_ONLY: tl.constexpr, HAS_D: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_STARTS: tl.constexpr, CHUNK: tl.constexpr, K0: tl.constexpr, I0: tl.constexpr,
    K1: tl.constexpr, I1: tl.constexpr,
):  # fmt: skip
    """A chunk of a block of channels.

    STATES_ONLY: from a state of 0; writes the state at the end, `states (B, n, I, K)`, and the sum of step sizes,
    `spans (B, n, I)`, -inf for a chunk in which a document begins. Otherwise from the state before the chunk, which
    `states` then holds; writes y.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(channels, I0 * I1)
    block, chunk, batch = program % blocks, program // blocks % chunks, (program // blocks // chunks).to(tl.int64)
    i, k = _indices(block, K0, I0, K1, I1)
    start = chunk * CHUNK
    stop = tl.minimum(length - start, CHUNK)
    end_i = tl.where(i < channels, stop, 0)
    at = (i, k, end_i, tl.where(k < STATES, stop, 0))
    mask_ik, write_i = (i < channels) & (k < STATES), _once(end_i, K1)
    first = start.to(tl.int64)
    x = (x_ptr + batch * x_stride_b + first * x_stride_t, x_stride_t)
    dt = (dt_ptr + batch * dt_stride_b + first * dt_stride_t, dt_stride_t)
    B = (B_ptr + batch * B_stride_b + first * B_stride_t, B_stride_t)
    C = (C_ptr + batch * C_stride_b + first * C_stride_t, C_stride_t)
    y = (y_ptr + (batch * length + first) * channels, channels)
    if HAS_STARTS:
        starts_ptr += batch * length + first
    chunk_row = (batch * chunks + chunk) * channels

    A2 = tl.load(A_ptr + i * STATES + k, mask=mask_ik, other=0.0) * LOG2_E
    bias, D = _per_channel(bias_ptr, i, channels, SOFTPLUS), _per_channel(D_ptr, i, channels, HAS_D)
    span = tl.zeros((1, I0, K1, I1), tl.float32)
    if STATES_ONLY:
        h = tl.zeros((K0, I0, K1, I1), tl.float32)
    else:
        h = tl.load(states_ptr + chunk_row * STATES + i * STATES + k, mask=mask_ik, other=0.0)
    for t in range(0, stop, 4):
        outs = ()
        for j in tl.static_range(4):
            h, span, out = _forward_step(
                h, span, x, dt, B, C, starts_ptr, t + j, stop, at, A2, bias, D, STATES_ONLY, SOFTPLUS, HAS_STARTS
            )
            outs = outs + (out,)  # type: ignore[assignment]  # noqa: RUF005
        if not STATES_ONLY:
            for j in tl.static_range(4):
                _write(y, t + j, i, outs[j], write_i)
    if STATES_ONLY:
        tl.store(states_ptr + chunk_row * STATES + i * STATES + k, h, mask=mask_ik)
        tl.store(spans_ptr + chunk_row + i, span, mask=write_i > 0)


@triton.jit(do_not_specialize=["chunks"])
def carry_kernel(
    A_ptr, spans_ptr, states_ptr, first_ptr, last_ptr, chunks, size, STATES: tl.constexpr, REVERSE: tl.constexpr,
    HAS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn what each chunk adds to the state into the state before each chunk, in place, and write the last state.

    REVERSE: the same of gradients, from the last chunk to the first.

    Args:
        states_ptr: `(B, n, I·K)`.
        first_ptr: the state that it starts from, `(B, I·K)`; last_ptr: where it ends.
        size: I·K.
    """
    blocks = tl.cdiv(size, BLOCK)
    block, batch = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    element = block * BLOCK + tl.arange(0, BLOCK)
    mask = element < size
    channel, channels = element // STATES, size // STATES
    A2 = tl.load(A_ptr + element, mask=mask, other=0.0) * LOG2_E
    carry = tl.zeros((BLOCK,), tl.float32)
    if HAS_FIRST:
        carry = tl.load(first_ptr + batch * size + element, mask=mask, other=0.0)
    here = batch * chunks
    if REVERSE:
        here += chunks - 1
    added = tl.load(states_ptr + here * size + element, mask=mask, other=0.0)
    span = tl.load(spans_ptr + here * channels + channel, mask=mask, other=0.0)
    for n in range(chunks):
        following = here - 1 if REVERSE else here + 1
        # Loaded before the store of this chunk, so that it does not wait for it.
        mask_following = element < tl.where(n + 1 < chunks, size, 0)
        next_added = tl.load(states_ptr + following * size + element, mask=mask_following, other=0.0)
        next_span = tl.load(spans_ptr + following * channels + channel, mask=mask_following, other=0.0)
        tl.store(states_ptr + here * size + element, carry, mask=mask)
        carry = tl.where(span < 0, 0.0, tl.exp2(A2 * tl.maximum(span, 0.0))) * carry + added
        here, added, span = following, next_added, next_span
    tl.store(last_ptr + batch * size + element, carry, mask=mask)


@triton.jit
def _gradient_step(q, dy, dt, C, starts_ptr, t, stop, at, A2, bias, SOFTPLUS: tl.constexpr, HAS_STARTS: tl.constexpr):
    """The gradient of the state before token t from that of the state after it; and the token's step size."""
    i, k, end_i, end_k = at
    step = _step_size(dt, t, at, bias, SOFTPLUS)
    g = q + _row(dy, t, i, end_i) * _row(C, t, k, end_k)
    return _decay(step, A2, starts_ptr, t, stop, HAS_STARTS) * g, step


@triton.jit(do_not_specialize=["length", "chunks"])
def state_gradient_kernel(
    dy_ptr, dt_ptr, A_ptr, C_ptr, bias_ptr, starts_ptr, gradients_ptr, spans_ptr, steps_ptr,
    dt_stride_b, dt_stride_t, C_stride_b, C_stride_t,
    length, chunks, channels, STATES: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_STARTS: tl.constexpr,
    CHUNK: tl.constexpr, K0: tl.constexpr, I0: tl.constexpr, K1: tl.constexpr, I1: tl.constexpr,
):  # fmt: skip
    """Compute what the outputs of a chunk add to the gradient of the state before it.

    Writes `gradients (B, n, I, K)`, `spans (B, n, I)` as `forward_kernel` does, and step sizes, `steps (B, T, I)`.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(channels, I0 * I1)
    block, chunk, batch = program % blocks, program // blocks % chunks, (program // blocks // chunks).to(tl.int64)
    i, k = _indices(block, K0, I0, K1, I1)
    start = chunk * CHUNK
    stop = tl.minimum(length - start, CHUNK)
    end_i = tl.where(i < channels, stop, 0)
    at = (i, k, end_i, tl.where(k < STATES, stop, 0))
    mask_ik, write_i = (i < channels) & (k < STATES), _once(end_i, K1)
    first = start.to(tl.int64)
    dt = (dt_ptr + batch * dt_stride_b + first * dt_stride_t, dt_stride_t)
    C = (C_ptr + batch * C_stride_b + first * C_stride_t, C_stride_t)
    dy = (dy_ptr + (batch * length + first) * channels, channels)
    steps = (steps_ptr + (batch * length + first) * channels, channels)
    if HAS_STARTS:
        starts_ptr += batch * length + first
    chunk_row = (batch * chunks + chunk) * channels

    A2 = tl.load(A_ptr + i * STATES + k, mask=mask_ik, other=0.0) * LOG2_E
    bias = _per_channel(bias_ptr, i, channels, SOFTPLUS)
    q = tl.zeros((K0, I0, K1, I1), tl.float32)
    span = tl.zeros((1, I0, K1, I1), tl.float32)
    fours = tl.cdiv(stop, 4)
    for s in range(fours):
        t = (fours - 1 - s) * 4
        taken = ()
        for j in tl.static_range(4):
            q, step = _gradient_step(q, dy, dt, C, starts_ptr, t + 3 - j, stop, at, A2, bias, SOFTPLUS, HAS_STARTS)
            span += step + _log_kept(starts_ptr, t + j, stop, HAS_STARTS)
            taken = taken + (step,)  # type: ignore[assignment]  # noqa: RUF005
        for j in tl.static_range(4):
            _write(steps, t + 3 - j, i, taken[j], write_i)
    tl.store(gradients_ptr + chunk_row * STATES + i * STATES + k, q, mask=mask_ik)
    tl.store(spans_ptr + chunk_row + i, span, mask=write_i > 0)


@triton.jit
def _again(h, x, steps, B, starts_ptr, t, stop, at, A2, HAS_STARTS: tl.constexpr):
    """The state after token t, computed once more."""
    i, k, end_i, end_k = at
    step = _row(steps, t, i, end_i)
    taken = step * _row(x, t, i, end_i)
    return _decay(step, A2, starts_ptr, t, stop, HAS_STARTS) * h + taken * _row(B, t, k, end_k)


@triton.jit
def _backward_step(
    h, q, sums, x, steps, dy, B, C, starts_ptr, dx, d_dt, dB, dC, t, stop, at, write_i, A2, D,
    SOFTPLUS: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Writes gradients of token t, from h, the state before it, and q, the gradient of the state after it.

    Returns the gradient of the state before it, and the sums for dA, the bias and dD.
    """
    i, k, end_i, end_k = at
    dA, d_bias, dD = sums
    x_t, step, dy_t = _row(x, t, i, end_i), _row(steps, t, i, end_i), _row(dy, t, i, end_i)
    B_t, C_t = _row(B, t, k, end_k), _row(C, t, k, end_k)
    decay = _decay(step, A2, starts_ptr, t, stop, HAS_STARTS)
    taken = step * x_t
    _write(dC, t, k, _sum_channels((decay * h + taken * B_t) * dy_t), end_k)
    g = q + dy_t * C_t
    _write(dB, t, k, _sum_channels(g * taken), end_k)
    d_taken = _sum_states(g * B_t)
    q = decay * g
    d_exponent = q * h  # of dt A
    d_step = d_taken * x_t + LN_2 * _sum_states(d_exponent * A2)
    if SOFTPLUS:
        d_step *= _softplus_slope(step)
    _write(dx, t, i, d_taken * step + D * dy_t, write_i)
    _write(d_dt, t, i, d_step, write_i)
    return q, (dA + d_exponent * step, d_bias + d_step, dD + dy_t * x_t)


@triton.jit(do_not_specialize=["length", "chunks", "items"])
def backward_kernel(
    x_ptr, steps_ptr, dy_ptr, A_ptr, B_ptr, C_ptr, D_ptr, starts_ptr, states_ptr, gradients_ptr, scratch_ptr,
    dx_ptr, d_dt_ptr, dA_ptr, dB_ptr, dC_ptr, dD_ptr, d_bias_ptr,
    x_stride_b, x_stride_t, B_stride_b, B_stride_t, C_stride_b, C_stride_t,
    length, chunks, channels, items, STATES: tl.constexpr, HAS_D: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_STARTS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, K0: tl.constexpr, I0: tl.constexpr,
    K1: tl.constexpr, I1: tl.constexpr,
):  # fmt: skip
    """All gradients of chunks of blocks of channels, one after another.

    A first walk from left to right keeps the state before every group of STEPS tokens, in `scratch`. Then, from right
    to left, the states of one group at a time are computed once more and met by their gradients.

    Args:
        states_ptr: the state before each chunk `(B, n, I, K)`.
        gradients_ptr: the gradient of the state after each chunk, but for what comes from the chunk itself.
        scratch_ptr: `(programs, CHUNK / STEPS, I0·I1·K0·K1)`.
        dA_ptr: `(B, n, I, K)`; dB_ptr, dC_ptr: `(blocks, B, T, K)`; dD_ptr, d_bias_ptr: `(B, n, I)`; to be added up.
        items: blocks · n · B.
    """
    TILE: tl.constexpr = K0 * I0 * K1 * I1
    blocks = tl.cdiv(channels, I0 * I1)
    batches = items // (blocks * chunks)
    scratch_ptr += tl.program_id(0).to(tl.int64) * (CHUNK // STEPS) * TILE
    within_i, within_k = _indices(0, K0, I0, K1, I1)
    kept_ptr = scratch_ptr + within_i * (K0 * K1) + within_k
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        block, chunk, batch = item % blocks, item // blocks % chunks, (item // blocks // chunks).to(tl.int64)
        i, k = _indices(block, K0, I0, K1, I1)
        start = chunk * CHUNK
        stop = tl.minimum(length - start, CHUNK)
        end_i = tl.where(i < channels, stop, 0)
        at = (i, k, end_i, tl.where(k < STATES, stop, 0))
        mask_ik, write_i = (i < channels) & (k < STATES), _once(end_i, K1)
        first = start.to(tl.int64)
        row = batch * length + first
        x = (x_ptr + batch * x_stride_b + first * x_stride_t, x_stride_t)
        B = (B_ptr + batch * B_stride_b + first * B_stride_t, B_stride_t)
        C = (C_ptr + batch * C_stride_b + first * C_stride_t, C_stride_t)
        steps, dy = (steps_ptr + row * channels, channels), (dy_ptr + row * channels, channels)
        dx, d_dt = (dx_ptr + row * channels, channels), (d_dt_ptr + row * channels, channels)
        part = (block * batches * length + row) * STATES
        dB, dC = (dB_ptr + part, STATES), (dC_ptr + part, STATES)
        starts = starts_ptr
        if HAS_STARTS:
            starts += row
        chunk_row = (batch * chunks + chunk) * channels

        A2 = tl.load(A_ptr + i * STATES + k, mask=mask_ik, other=0.0) * LOG2_E
        D = _per_channel(D_ptr, i, channels, HAS_D)
        h = tl.load(states_ptr + chunk_row * STATES + i * STATES + k, mask=mask_ik, other=0.0)
        groups = tl.cdiv(stop, STEPS)
        for s in range(groups):
            tl.store(kept_ptr + s * TILE, h)
            for j in tl.static_range(STEPS):
                h = _again(h, x, steps, B, starts, s * STEPS + j, stop, at, A2, HAS_STARTS)
        tl.debug_barrier()  # lanes may read what others wrote

        q = tl.load(gradients_ptr + chunk_row * STATES + i * STATES + k, mask=mask_ik, other=0.0)
        per_channel = tl.zeros((1, I0, K1, I1), tl.float32)
        sums = (tl.zeros((K0, I0, K1, I1), tl.float32), per_channel, per_channel)
        for s in range(groups):
            t = (groups - 1 - s) * STEPS
            before = (tl.load(kept_ptr + (groups - 1 - s) * TILE),)
            for j in tl.static_range(STEPS - 1):
                after = _again(before[j], x, steps, B, starts, t + j, stop, at, A2, HAS_STARTS)
                before = before + (after,)  # type: ignore[assignment]  # noqa: RUF005
            for j in tl.static_range(STEPS):
                q, sums = _backward_step(
                    before[STEPS - 1 - j], q, sums, x, steps, dy, B, C, starts, dx, d_dt, dB, dC, t + STEPS - 1 - j,
                    stop, at, write_i, A2, D, SOFTPLUS, HAS_STARTS,
                )  # fmt: skip
        dA, d_bias, dD = sums
        tl.store(dA_ptr + chunk_row * STATES + i * STATES + k, dA, mask=mask_ik)
        if HAS_D:
            tl.store(dD_ptr + chunk_row + i, dD, mask=write_i > 0)
        if SOFTPLUS:
            tl.store(d_bias_ptr + chunk_row + i, d_bias, mask=write_i > 0)
        tl.debug_barrier()  # the next item writes where this one reads
