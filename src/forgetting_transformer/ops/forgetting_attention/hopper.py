"""Forgetting attention on Hopper GPUs: the kernels of `kernels.py` for 16-bit tensors of whole tiles, in Gluon.

Gluon is Triton one level lower. Triton waits for every product whose result is not an accumulator, so that products and
exponentials take turns; here a product is started, other work is done, and the wait comes where its result is used. In
each program one warp loads tiles through the copy engine, and two warpgroups of four warps compute, each with 64 rows,
one's exponentials beside the other's products (Shah et al. 2024, FlashAttention-3). Tiles of the other tensor come in a
ring of STAGES places; barriers say when a tile is there (`ready`) and when both warpgroups have read it (`free`).

Budget of a multiprocessor: 64 Ki registers, of which two warpgroups get 240 per thread and the loading warp's 24, and
227 KiB of shared memory. A float32 tile of 64 × N takes N / 2 registers per thread, a 16-bit one that enters a product
N / 4. At D = 128:
    forward          scores 64 (N = 128), weights 32, outputs 64; queries 32 KiB, 2 stages of keys and values 128 KiB
    query gradient   scores 2 × 32 (N = 64), d weights 32, d scores 16, dq 64; queries 64 KiB, 4 stages 128 KiB
    key gradient     scores 32 (64 queries), d weights 32, both in 16 bits 32, dk and dv 128; keys 64 KiB, 4 stages 128
                     KiB
Row vectors that vary along a tile's columns come through shared memory too, for in registers they would take N / 4
each. The loading warp also subtracts running sums in float64, which would wait for products in the other warps.
Heads that do not share keys have their gradients from `hopper_backward.py`, in one pass.

Three things about the assembler that no result shows, only its log and its machine code:
- It moves arithmetic across waits for products, not across branches. Before such a wait stands a wait for a barrier
  that was passed long ago, for the sake of its branch.
- It keeps addresses that it knows in registers, dozens of them: `hopper_backward.py` hides one.
- Accumulators that are zeroed beside a product in flight make it run all products one by one. First tiles are therefore
  apart: their product does not add to accumulators but sets them.

Axes: M queries × N keys as in `kernels.py`; Z = B·H.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forgetting_transformer.ops.forgetting_attention.constants import LOG2_E
from forgetting_transformer.ops.forgetting_attention.layout import (
    FUSED,
    Decay,
    Descriptors,
    Heads,
    Inputs,
    Launch,
    Located,
)

# The copy engine's load of a tile, by the name that the installed Triton has for it; both take the same arguments.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_VECTOR = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
_STRETCH = gl.constexpr(128)
_ROWS = gl.constexpr(64)  # of a warpgroup


@gluon.constexpr_function
def _accumulators(columns):
    """How one warpgroup holds a tile of 64 × columns that products add to."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _rows_of(columns):
    return gl.SliceLayout(1, _accumulators(columns))


@gluon.constexpr_function
def _columns_of(columns):
    return gl.SliceLayout(0, _accumulators(columns))


@gluon.constexpr_function
def _left_operand(columns):
    """How it holds the left factor of a product with that many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=_accumulators(columns), k_width=2)


@gluon.jit
def _next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that are passed when COUNT have arrived."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def _start_load(x, row, column, vector, vector_start, tiles, vectors, ready, stage):
    """Have a tile loaded, and with it the part of a vector that belongs to its rows."""
    mbarrier.expect(ready.index(stage), x.block_type.nbytes + vector.block_type.nbytes)
    _load_tile(x, [row, column], ready.index(stage), tiles.index(stage))
    _load_tile(vector, [vector_start], ready.index(stage), vectors.index(stage))


@gluon.jit
def _store(x, row_stride, first_row, value, HEAD_DIM: gl.constexpr):
    """Write 64 rows of a head."""
    row = gl.arange(0, _ROWS, _rows_of(HEAD_DIM))
    channel = gl.arange(0, HEAD_DIM, _columns_of(HEAD_DIM))
    at = x + first_row.to(gl.int64) * row_stride + (row[:, None] * row_stride + channel[None, :])
    gl.store(at, value.to(x.dtype.element_ty))


@gluon.jit
def _scores(rows, tile, N: gl.constexpr):
    """Start the product of 64 rows with the transposed rows of a tile."""
    nothing = gl.zeros([_ROWS, N], gl.float32, _accumulators(N))
    return warpgroup_mma(rows, tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _attend(
    q_tile, k_tiles, v_tiles, biases, offsets, q_ready, k_ready, v_ready, k_free, v_free, mine, other,
    suffix, first_row, before, last_tile, first_tile, scale, out, out_row, log_normaliser,
    HEAD_DIM: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `forward_kernel`: 64 queries against tiles of keys, from the diagonal to the left.

    While a tile is exponentiated, the product of the weights and values of the tile before runs. The two warpgroups
    take turns at starting products, so that one exponentiates while the other's products run.
    """
    position = first_row + before + gl.arange(0, _ROWS, _rows_of(N))
    key = last_tile * N + gl.arange(0, N, _columns_of(N))
    acc = gl.zeros([_ROWS, HEAD_DIM], gl.float32, _accumulators(HEAD_DIM))

    mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(k_ready.index(0), 0)
    score = warpgroup_mma_wait(0, deps=[_scores(q_tile, k_tiles.index(0), N)])
    score = score * scale + biases.index(0).load(_columns_of(N))[None, :]
    score = gl.where(key[None, :] <= position[:, None], score, float("-inf"))
    # Biases within a stretch of keys; from its end to the reference, it is the same for all of them.
    offset = offsets.index(0).load(_rows_of(N))
    mbarrier.arrive(k_free.index(0), count=1)
    maximum = gl.max(score, 1) + offset
    weight = gl.exp2(score - (maximum - offset)[:, None])
    total = gl.sum(weight, 1)

    stage, phase, turn = 0, 0, 0
    for _ in range(last_tile - 1, first_tile - 1, -1):
        p = gl.convert_layout(weight.to(k_tiles.dtype), _left_operand(HEAD_DIM))
        old, old_phase = stage, phase
        stage, phase = _next_stage(stage, phase, STAGES)
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.wait(mine.index(0), turn)
        score = _scores(q_tile, k_tiles.index(stage), N)
        mbarrier.wait(v_ready.index(old), old_phase)
        acc = warpgroup_mma(p, v_tiles.index(old), acc, is_async=True)
        mbarrier.arrive(other.index(0), count=1)
        turn ^= 1
        score = warpgroup_mma_wait(1, deps=[score])
        score = score * scale + biases.index(stage).load(_columns_of(N))[None, :]
        offset = offsets.index(stage).load(_rows_of(N))
        mbarrier.arrive(k_free.index(stage), count=1)
        new_maximum = gl.maximum(maximum, gl.max(score, 1) + offset)
        weight = gl.exp2(score - (new_maximum - offset)[:, None])
        rescale = gl.exp2(maximum - new_maximum)
        total = total * rescale + gl.sum(weight, 1)
        maximum = new_maximum
        mbarrier.wait(v_ready.index(old), old_phase)  # for its branch
        acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
        mbarrier.arrive(v_free.index(old), count=1)
        acc = acc * gl.convert_layout(rescale, _rows_of(HEAD_DIM))[:, None]

    p = gl.convert_layout(weight.to(k_tiles.dtype), _left_operand(HEAD_DIM))
    mbarrier.wait(v_ready.index(stage), phase)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)])
    acc = acc * gl.convert_layout(1.0 / total, _rows_of(HEAD_DIM))[:, None]
    _store(out, out_row, first_row, acc, HEAD_DIM)
    # From the bias as summed to the tile's reference, which is the end of its own stretch, to the bias as summed to
    # each query.
    value = (maximum + gl.log2(total) - gl.load(suffix + position)) * 0.6931471805599453
    gl.store(log_normaliser + (position - before), value)


@gluon.jit
def _load_for_forward(
    q, q_tile, q_ready, q_row, q_column, k, k_row, k_column, k_tiles, k_ready, k_free,
    v, v_row, v_column, v_tiles, v_ready, v_free, suffix, suffix_start, biases, running, reference, offsets, first_turn,
    last_tile, first_tile, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp of `forward_kernel` that loads. It also takes differences of float64 sums: tensor cores would wait."""
    mbarrier.arrive(first_turn.index(0), count=1)
    nothing = gl.zeros([_ROWS], gl.float32, gl.BlockedLayout([2], [32], [1], [0]))
    mbarrier.expect(q_ready.index(0), q.block_type.nbytes)
    _load_tile(q, [q_row, q_column], q_ready.index(0), q_tile)
    stage, phase = 0, 0
    for tile in range(last_tile, first_tile - 1, -1):
        offset = (reference - gl.load(running + tile * N // _STRETCH + 1)).to(gl.float32)
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        offsets.index(stage).store(nothing + offset)
        _barrier()
        _start_load(k, k_row + tile * N, k_column, suffix, suffix_start + tile * N, k_tiles, biases, k_ready, stage)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), v.block_type.nbytes)
        _load_tile(v, [v_row + tile * N, v_column], v_ready.index(stage), v_tiles.index(stage))
        stage, phase = _next_stage(stage, phase, STAGES)


@gluon.jit
def forward_kernel(
    q, q_0, q_1, q_2, k, k_0, k_1, k_2, v, v_0, v_1, v_2, out_ptr, out_0, out_1, out_2,
    suffix_vector, suffix_ptr, running_ptr, reference_ptr, first_stretch_ptr, log_normaliser_ptr,
    heads, group, num_queries, num_keys, num_stretches, num_blocks, scale,
    HEAD_DIM: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Outputs and log-normalisers (nats) of 128 queries; tiles of N = 128 keys."""
    # Long rows of tiles first: what starts last is what is short.
    start_m = (num_blocks - 1 - gl.program_id(0) % num_blocks) * _STRETCH
    z = (gl.program_id(0) // num_blocks).to(gl.int64)
    sequence, head, key_head = z // heads, z % heads, z % heads // group
    q_row, q_column = (sequence * q_0 + head * q_1).to(gl.int32) + start_m, (head * q_2).to(gl.int32)
    k_row, k_column = (sequence * k_0 + key_head * k_1).to(gl.int32), (key_head * k_2).to(gl.int32)
    v_row, v_column = (sequence * v_0 + key_head * v_1).to(gl.int32), (key_head * v_2).to(gl.int32)
    out = out_ptr + sequence * out_0 + head * out_1
    suffix, running = suffix_ptr + z * num_stretches * _STRETCH, running_ptr + z * (num_stretches + 1)
    log_normaliser = log_normaliser_ptr + z * num_queries
    block = z * num_blocks + start_m // _STRETCH
    reference = gl.load(reference_ptr + block)
    before = num_keys - num_queries
    last_tile = (start_m + before) // N
    first_tile = gl.load(first_stretch_ptr + block)

    q_tile = gl.allocate_shared_memory(q.dtype, [2 * _ROWS, HEAD_DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, N, HEAD_DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, N, HEAD_DIM], v.layout)
    biases = gl.allocate_shared_memory(gl.float32, [STAGES, N], suffix_vector.layout)
    offsets = gl.allocate_shared_memory(gl.float32, [STAGES, _ROWS], suffix_vector.layout)
    turn_0, turn_1 = _barriers(1, 1), _barriers(1, 1)
    q_ready, k_ready, v_ready = _barriers(1, 1), _barriers(STAGES, 1), _barriers(STAGES, 1)
    k_free, v_free = _barriers(STAGES, 2), _barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (_attend, (
                q_tile.slice(0, _ROWS), k_tiles, v_tiles, biases, offsets, q_ready, k_ready, v_ready, k_free, v_free,
                turn_0, turn_1,
                suffix, start_m, before, last_tile, first_tile, scale, out, out_2, log_normaliser,
                HEAD_DIM, N, STAGES,
            )),
            (_attend, (
                q_tile.slice(_ROWS, _ROWS), k_tiles, v_tiles, biases, offsets, q_ready, k_ready, v_ready, k_free,
                v_free, turn_1, turn_0,
                suffix, start_m + _ROWS, before, last_tile, first_tile, scale, out, out_2, log_normaliser,
                HEAD_DIM, N, STAGES,
            )),
            (_load_for_forward, (
                q, q_tile, q_ready, q_row, q_column, k, k_row, k_column, k_tiles, k_ready, k_free,
                v, v_row, v_column, v_tiles, v_ready, v_free, suffix_vector,
                (z * num_stretches * _STRETCH).to(gl.int32), biases,
                running, reference, offsets, turn_0, last_tile, first_tile, N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _query_gradient(
    q_tile, d_out_tile, k_tiles, v_tiles, once_ready, k_ready, v_ready, k_free, v_free,
    suffix, running, reference, first_row, before, last_tile, first_tile, scale, sm_scale,
    dq_ptr, dq_row, log_normaliser, delta_ptr, row_sum_ptr,
    HEAD_DIM: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `query_gradient_kernel`: 64 queries against tiles of keys, from the diagonal to the left.

    Scores of the next tile are computed while this one's gradient is; the product that adds to dq runs on into the next
    tile.
    """
    row = first_row + gl.arange(0, _ROWS, _rows_of(N))
    column = gl.arange(0, N, _columns_of(N))
    normaliser, delta = gl.load(log_normaliser + row), gl.load(delta_ptr + row)
    row_sum = gl.zeros([_ROWS], gl.float32, _rows_of(N))
    dq = gl.zeros([_ROWS, HEAD_DIM], gl.float32, _accumulators(HEAD_DIM))
    mbarrier.wait(once_ready.index(0), 0)

    # `old` is a zero of its own: two names that have one value before a loop are one name in it, to Triton.
    stage, phase, old = 0, 0, 0
    for i in range(_STRETCH // N):  # the block on the diagonal
        n = (last_tile - i) * N
        bias = gl.load(suffix + n + column)
        shift = (reference - gl.load(running + n // _STRETCH + 1)).to(gl.float32) - normaliser
        mbarrier.wait(k_ready.index(stage), phase)
        score = _scores(q_tile, k_tiles.index(stage), N)
        mbarrier.wait(v_ready.index(stage), phase)
        d_weight = _scores(d_out_tile, v_tiles.index(stage), N)
        score = warpgroup_mma_wait(1, deps=[score])
        weight = gl.exp2(score * scale + bias[None, :] + shift[:, None])
        weight = gl.where((n + column)[None, :] <= (row + before)[:, None], weight, 0.0)
        d_weight = warpgroup_mma_wait(0, deps=[d_weight])
        d_score = weight * (d_weight - delta[:, None])
        row_sum += gl.sum(d_score, 1)
        d_score = gl.convert_layout(d_score.to(k_tiles.dtype), _left_operand(HEAD_DIM))
        dq = warpgroup_mma_wait(0, deps=[warpgroup_mma(d_score, k_tiles.index(stage), dq, is_async=True)])
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.arrive(v_free.index(stage), count=1)
        stage, phase = _next_stage(stage, phase, STAGES)

    start = last_tile - _STRETCH // N
    if start >= first_tile:
        running_dq = warpgroup_mma_init(dq)
        mbarrier.wait(k_ready.index(stage), phase)
        score = warpgroup_mma_wait(0, deps=[_scores(q_tile, k_tiles.index(stage), N)])
        for tile in range(start, first_tile - 1, -1):
            n = tile * N
            bias = gl.load(suffix + n + column)
            shift = (reference - gl.load(running + n // _STRETCH + 1)).to(gl.float32) - normaliser
            mbarrier.wait(v_ready.index(stage), phase)
            d_weight = _scores(d_out_tile, v_tiles.index(stage), N)
            weight = gl.exp2(score * scale + bias[None, :] + shift[:, None])
            older, old = old, stage
            stage, phase = _next_stage(stage, phase, STAGES)
            # Past the last tile these are scores of whatever lies in that place, and nothing uses them.
            mbarrier.wait(k_ready.index(stage), phase, pred=tile > first_tile)
            next_score = _scores(q_tile, k_tiles.index(stage), N)
            d_weight, dq, weight = warpgroup_mma_wait(1, deps=[d_weight, running_dq, weight])
            mbarrier.arrive(v_free.index(old), count=1)
            mbarrier.arrive(k_free.index(older), count=1, pred=tile < start)
            d_score = weight * (d_weight - delta[:, None])
            row_sum += gl.sum(d_score, 1)
            d_score = gl.convert_layout(d_score.to(k_tiles.dtype), _left_operand(HEAD_DIM))
            running_dq = warpgroup_mma(d_score, k_tiles.index(old), dq, is_async=True)
            score = warpgroup_mma_wait(1, deps=[next_score])
        dq = warpgroup_mma_wait(0, deps=[running_dq])
    _store(dq_ptr, dq_row, first_row, dq * sm_scale, HEAD_DIM)
    gl.store(row_sum_ptr + row, row_sum)


@gluon.jit
def _load_for_query_gradient(
    q, q_row, q_column, q_tile, d_out, d_out_row, d_out_column, d_out_tile, once_ready,
    k, k_row, k_column, k_tiles, k_ready, k_free, v, v_row, v_column, v_tiles, v_ready, v_free, last_tile, first_tile,
    N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp of `query_gradient_kernel` that loads."""
    mbarrier.expect(once_ready.index(0), q.block_type.nbytes + d_out.block_type.nbytes)
    _load_tile(q, [q_row, q_column], once_ready.index(0), q_tile)
    _load_tile(d_out, [d_out_row, d_out_column], once_ready.index(0), d_out_tile)
    stage, phase = 0, 0
    for tile in range(last_tile, first_tile - 1, -1):
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), k.block_type.nbytes)
        _load_tile(k, [k_row + tile * N, k_column], k_ready.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), v.block_type.nbytes)
        _load_tile(v, [v_row + tile * N, v_column], v_ready.index(stage), v_tiles.index(stage))
        stage, phase = _next_stage(stage, phase, STAGES)


@gluon.jit
def query_gradient_kernel(
    q, q_0, q_1, q_2, k, k_0, k_1, k_2, v, v_0, v_1, v_2, d_out, d_out_0, d_out_1, d_out_2, dq_ptr, dq_0, dq_1, dq_2,
    log_normaliser_ptr, delta_ptr, suffix_ptr, running_ptr, reference_ptr, first_stretch_ptr, row_sum_ptr,
    heads, group, num_queries, num_keys, num_stretches, num_blocks, scale, sm_scale,
    HEAD_DIM: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of 128 queries, and row sums. Which tiles: as in `forward_kernel`."""
    start_m = (num_blocks - 1 - gl.program_id(0) % num_blocks) * _STRETCH
    z = (gl.program_id(0) // num_blocks).to(gl.int64)
    sequence, head, key_head = z // heads, z % heads, z % heads // group
    q_row, q_column = (sequence * q_0 + head * q_1).to(gl.int32) + start_m, (head * q_2).to(gl.int32)
    d_out_row, d_out_column = (
        (sequence * d_out_0 + head * d_out_1).to(gl.int32) + start_m,
        (head * d_out_2).to(gl.int32),
    )
    k_row, k_column = (sequence * k_0 + key_head * k_1).to(gl.int32), (key_head * k_2).to(gl.int32)
    v_row, v_column = (sequence * v_0 + key_head * v_1).to(gl.int32), (key_head * v_2).to(gl.int32)
    dq = dq_ptr + sequence * dq_0 + head * dq_1
    suffix, running = suffix_ptr + z * num_stretches * _STRETCH, running_ptr + z * (num_stretches + 1)
    log_normaliser, delta = log_normaliser_ptr + z * num_queries, delta_ptr + z * num_queries
    row_sum = row_sum_ptr + z * num_queries
    block = z * num_blocks + start_m // _STRETCH
    reference = gl.load(reference_ptr + block)
    before = num_keys - num_queries
    last_tile = (start_m + before + _STRETCH) // N - 1
    first_tile = gl.load(first_stretch_ptr + block) * (_STRETCH // N)

    q_tile = gl.allocate_shared_memory(q.dtype, [2 * _ROWS, HEAD_DIM], q.layout)
    d_out_tile = gl.allocate_shared_memory(d_out.dtype, [2 * _ROWS, HEAD_DIM], d_out.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, N, HEAD_DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, N, HEAD_DIM], v.layout)
    once_ready, k_ready, v_ready = _barriers(1, 1), _barriers(STAGES, 1), _barriers(STAGES, 1)
    k_free, v_free = _barriers(STAGES, 2), _barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (_query_gradient, (
                q_tile.slice(0, _ROWS), d_out_tile.slice(0, _ROWS), k_tiles, v_tiles, once_ready,
                k_ready, v_ready, k_free, v_free, suffix, running, reference, start_m, before, last_tile, first_tile,
                scale, sm_scale, dq, dq_2, log_normaliser, delta, row_sum, HEAD_DIM, N, STAGES,
            )),
            (_query_gradient, (
                q_tile.slice(_ROWS, _ROWS), d_out_tile.slice(_ROWS, _ROWS), k_tiles, v_tiles, once_ready,
                k_ready, v_ready, k_free, v_free, suffix, running, reference, start_m + _ROWS, before, last_tile,
                first_tile,
                scale, sm_scale, dq, dq_2, log_normaliser, delta, row_sum, HEAD_DIM, N, STAGES,
            )),
            (_load_for_query_gradient, (
                q, q_row, q_column, q_tile, d_out, d_out_row, d_out_column, d_out_tile, once_ready,
                k, k_row, k_column, k_tiles, k_ready, k_free, v, v_row, v_column, v_tiles, v_ready, v_free,
                last_tile, first_tile, N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _key_gradient_span(
    dk, dv, column_sum, stage, phase, k_tile, v_tile, q_tiles, d_out_tiles, normalisers, deltas, q_ready, d_out_ready,
    free,
    bias, here, reference, key, before, start, end, scale,
    MASKED: gl.constexpr, HEAD_DIM: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of queries from start to end; keys are rows."""
    column = gl.arange(0, M, _columns_of(M))
    for m in range(start, end, M):
        shift = bias + (gl.load(reference + m // _STRETCH) - here).to(gl.float32)
        mbarrier.wait(q_ready.index(stage), phase)
        score_T = _scores(k_tile, q_tiles.index(stage), M)
        mbarrier.wait(d_out_ready.index(stage), phase)
        d_weight_T = _scores(v_tile, d_out_tiles.index(stage), M)
        score_T = warpgroup_mma_wait(1, deps=[score_T])
        normaliser = normalisers.index(stage).load(_columns_of(M))
        weight_T = gl.exp2(score_T * scale + shift[:, None] - normaliser[None, :])
        if MASKED:
            weight_T = gl.where(key[:, None] <= (m + before + column)[None, :], weight_T, 0.0)
        p_T = gl.convert_layout(weight_T.to(q_tiles.dtype), _left_operand(HEAD_DIM))
        mbarrier.wait(d_out_ready.index(stage), phase)  # for its branch
        running_dv = warpgroup_mma(p_T, d_out_tiles.index(stage), dv, is_async=True)
        d_weight_T, weight_T = warpgroup_mma_wait(1, deps=[d_weight_T, weight_T])
        delta = deltas.index(stage).load(_columns_of(M))
        d_score_T = weight_T * (d_weight_T - delta[None, :])
        column_sum += gl.sum(d_score_T, 1)
        d_score_T = gl.convert_layout(d_score_T.to(q_tiles.dtype), _left_operand(HEAD_DIM))
        running_dk = warpgroup_mma(d_score_T, q_tiles.index(stage), dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=[running_dk, running_dv])
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = _next_stage(stage, phase, STAGES)
    return dk, dv, column_sum, stage, phase


@gluon.jit
def _key_gradient(
    k_tile, v_tile, q_tiles, d_out_tiles, normalisers, deltas, once_ready, q_ready, d_out_ready, free,
    suffix_ptr, running_ptr, reference_ptr, end_block_ptr, column_sum_ptr,
    start_n, first_row, before, first_z, num_queries, num_keys, num_stretches, num_blocks, scale, sm_scale,
    dk_ptr, dk_row, dv_ptr, dv_row,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `key_gradient_kernel`: 64 keys against the tiles of queries that see them, diagonal first."""
    key = first_row + gl.arange(0, _ROWS, _rows_of(M))
    column = gl.arange(0, M, _columns_of(M))
    dk = gl.zeros([_ROWS, HEAD_DIM], gl.float32, _accumulators(HEAD_DIM))
    dv = gl.zeros([_ROWS, HEAD_DIM], gl.float32, _accumulators(HEAD_DIM))
    start = gl.maximum(start_n - before, 0)
    mbarrier.wait(once_ready.index(0), 0)

    stage, phase = 0, 0
    for member in range(GROUP):
        z = first_z + member
        bias = gl.load(suffix_ptr + z * num_stretches * _STRETCH + key)
        here = gl.load(running_ptr + z * (num_stretches + 1) + start_n // _STRETCH + 1)
        reference = reference_ptr + z * num_blocks
        end = gl.minimum(gl.load(end_block_ptr + z * num_stretches + start_n // _STRETCH) * _STRETCH, num_queries)
        end_diagonal = gl.minimum(gl.maximum(start_n + _STRETCH - before, 0), end)

        shift = bias + (gl.load(reference + start // _STRETCH) - here).to(gl.float32)
        mbarrier.wait(q_ready.index(stage), phase)
        score_T = _scores(k_tile, q_tiles.index(stage), M)
        mbarrier.wait(d_out_ready.index(stage), phase)
        d_weight_T = _scores(v_tile, d_out_tiles.index(stage), M)
        score_T, d_weight_T = warpgroup_mma_wait(0, deps=[score_T, d_weight_T])
        normaliser, delta = normalisers.index(stage).load(_columns_of(M)), deltas.index(stage).load(_columns_of(M))
        weight_T = gl.exp2(score_T * scale + shift[:, None] - normaliser[None, :])
        weight_T = gl.where(key[:, None] <= (start + before + column)[None, :], weight_T, 0.0)
        d_score_T = weight_T * (d_weight_T - delta[None, :])
        column_sum = gl.sum(d_score_T, 1)
        p_T = gl.convert_layout(weight_T.to(q_tiles.dtype), _left_operand(HEAD_DIM))
        d_score_T = gl.convert_layout(d_score_T.to(q_tiles.dtype), _left_operand(HEAD_DIM))
        dv = warpgroup_mma(p_T, d_out_tiles.index(stage), dv, use_acc=member > 0, is_async=True)
        dk = warpgroup_mma(d_score_T, q_tiles.index(stage), dk, use_acc=member > 0, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = _next_stage(stage, phase, STAGES)

        dk, dv, column_sum, stage, phase = _key_gradient_span(
            dk, dv, column_sum, stage, phase, k_tile, v_tile, q_tiles, d_out_tiles, normalisers, deltas,
            q_ready, d_out_ready, free, bias, here, reference, key, before, start + M, end_diagonal, scale,
            True, HEAD_DIM, M, STAGES,
        )  # fmt: skip
        dk, dv, column_sum, stage, phase = _key_gradient_span(
            dk, dv, column_sum, stage, phase, k_tile, v_tile, q_tiles, d_out_tiles, normalisers, deltas,
            q_ready, d_out_ready, free, bias, here, reference, key, before, gl.maximum(start + M, end_diagonal), end,
            scale,
            False, HEAD_DIM, M, STAGES,
        )  # fmt: skip
        gl.store(column_sum_ptr + z * num_keys + key, column_sum)
    _store(dk_ptr, dk_row, first_row, dk * sm_scale, HEAD_DIM)
    _store(dv_ptr, dv_row, first_row, dv, HEAD_DIM)


@gluon.jit
def _load_for_key_gradient(
    k, k_row, k_column, k_tile, v, v_row, v_column, v_tile, once_ready,
    q, q_row, q_column, q_per_head, q_last, q_tiles, q_ready,
    d_out, d_out_row, d_out_column, d_out_per_head, d_out_last, d_out_tiles, d_out_ready,
    log_normaliser, normalisers, delta, deltas, free, end_block_ptr, start_n, before, first_z, num_queries,
    num_stretches,
    GROUP: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp of `key_gradient_kernel` that loads."""
    mbarrier.expect(once_ready.index(0), k.block_type.nbytes + v.block_type.nbytes)
    _load_tile(k, [k_row, k_column], once_ready.index(0), k_tile)
    _load_tile(v, [v_row, v_column], once_ready.index(0), v_tile)
    start = gl.maximum(start_n - before, 0)
    stage, phase = 0, 0
    for member in range(GROUP):
        z = first_z + member
        end = gl.minimum(gl.load(end_block_ptr + z * num_stretches + start_n // _STRETCH) * _STRETCH, num_queries)
        for m in range(start, gl.maximum(end, start + M), M):  # the first tile even where pruning keeps none
            at = (z * num_queries).to(gl.int32) + m
            mbarrier.wait(free.index(stage), phase ^ 1)
            _start_load(
                q, q_row + member * q_per_head + m, q_column + member * q_last, log_normaliser, at,
                q_tiles, normalisers, q_ready, stage,
            )  # fmt: skip
            _start_load(
                d_out, d_out_row + member * d_out_per_head + m, d_out_column + member * d_out_last, delta, at,
                d_out_tiles, deltas, d_out_ready, stage,
            )  # fmt: skip
            stage, phase = _next_stage(stage, phase, STAGES)


@gluon.jit
def key_gradient_kernel(
    q, q_0, q_1, q_2, k, k_0, k_1, k_2, v, v_0, v_1, v_2, d_out, d_out_0, d_out_1, d_out_2,
    dk_ptr, dk_0, dk_1, dk_2, dv_ptr, dv_0, dv_1, dv_2,
    log_normaliser, delta, suffix_ptr, running_ptr, reference_ptr, end_block_ptr, column_sum_ptr,
    heads, num_queries, num_keys, num_stretches, num_blocks, scale, sm_scale,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of 128 keys and values, summed over the query heads that share them, and column sums."""
    start_n = gl.program_id(0) % num_stretches * _STRETCH
    pair = (gl.program_id(0) // num_stretches).to(gl.int64)
    key_heads = heads // GROUP
    sequence, key_head = pair // key_heads, pair % key_heads
    first_head = key_head * GROUP
    first_z = sequence * heads + first_head
    before = num_keys - num_queries
    k_row, k_column = (sequence * k_0 + key_head * k_1).to(gl.int32) + start_n, (key_head * k_2).to(gl.int32)
    v_row, v_column = (sequence * v_0 + key_head * v_1).to(gl.int32) + start_n, (key_head * v_2).to(gl.int32)
    q_row, q_column = (sequence * q_0 + first_head * q_1).to(gl.int32), (first_head * q_2).to(gl.int32)
    d_out_row, d_out_column = (
        (sequence * d_out_0 + first_head * d_out_1).to(gl.int32),
        (first_head * d_out_2).to(gl.int32),
    )
    dk = dk_ptr + sequence * dk_0 + key_head * dk_1
    dv = dv_ptr + sequence * dv_0 + key_head * dv_1

    k_tile = gl.allocate_shared_memory(k.dtype, [2 * _ROWS, HEAD_DIM], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [2 * _ROWS, HEAD_DIM], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, M, HEAD_DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [STAGES, M, HEAD_DIM], d_out.layout)
    normalisers = gl.allocate_shared_memory(gl.float32, [STAGES, M], log_normaliser.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, M], delta.layout)
    once_ready, q_ready, d_out_ready, free = (
        _barriers(1, 1),
        _barriers(STAGES, 1),
        _barriers(STAGES, 1),
        _barriers(STAGES, 2),
    )
    gl.warp_specialize(
        [
            (_key_gradient, (
                k_tile.slice(0, _ROWS), v_tile.slice(0, _ROWS), q_tiles, d_out_tiles, normalisers, deltas,
                once_ready, q_ready, d_out_ready, free, suffix_ptr, running_ptr, reference_ptr, end_block_ptr,
                column_sum_ptr,
                start_n, start_n, before, first_z, num_queries, num_keys, num_stretches, num_blocks, scale, sm_scale,
                dk, dk_2, dv, dv_2, GROUP, HEAD_DIM, M, STAGES,
            )),
            (_key_gradient, (
                k_tile.slice(_ROWS, _ROWS), v_tile.slice(_ROWS, _ROWS), q_tiles, d_out_tiles, normalisers, deltas,
                once_ready, q_ready, d_out_ready, free, suffix_ptr, running_ptr, reference_ptr, end_block_ptr,
                column_sum_ptr,
                start_n, start_n + _ROWS, before, first_z, num_queries, num_keys, num_stretches, num_blocks, scale,
                sm_scale,
                dk, dk_2, dv, dv_2, GROUP, HEAD_DIM, M, STAGES,
            )),
            (_load_for_key_gradient, (
                k, k_row, k_column, k_tile, v, v_row, v_column, v_tile, once_ready,
                q, q_row, q_column, q_1, q_2, q_tiles, q_ready,
                d_out, d_out_row, d_out_column, d_out_1, d_out_2, d_out_tiles, d_out_ready,
                log_normaliser, normalisers, delta, deltas, free, end_block_ptr, start_n, before, first_z,
                num_queries, num_stretches, GROUP, M, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# (kernel, head dimension): keys of a tile, for key gradients queries, and stages. Measured on an H200
# (docs/lab_notebook.md); what is missing is slower than Triton's kernel.
TILES = {
    ("forward", 64): (128, 2),
    ("forward", 128): (128, 2),
    ("key_gradient", 64): (64, 4),
    ("key_gradient", 128): (64, 4),
    ("query_gradient", 128): (64, 4),
}
# Of three warpgroups, one of which is only its loading warp: 65,536 registers by 384 threads, in steps of 8.
_LAUNCH = {"num_warps": 4, "maxnreg": 168, **FUSED}


class _Forward:
    def __init__(self, inputs: Inputs) -> None:
        (q, k, v), sizes = inputs.heads, inputs.sizes
        n, stages = TILES["forward", q.size[3]]
        self.q, self.k, self.v = located(q, _STRETCH.value), located(k, n), located(v, n)
        self.out, self.suffix = Located(q.like()), vectors(sizes.rows * sizes.stretches * _STRETCH.value, n)
        self.numbers = sizes.heads, sizes.group, *sizes.lengths
        self.launch = Launch(
            forward_kernel, sizes.blocks * sizes.rows, HEAD_DIM=q.size[3], N=n, STAGES=stages, **_LAUNCH
        )


def forward(
    inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, decay: Decay, sm_scale: float, out: Tensor, log_normaliser: Tensor
) -> tuple[Tensor, Tensor]:
    """Write outputs and log-normalisers, and return them."""
    prepared = inputs.kept(_Forward)
    prepared.launch(
        *prepared.q.of(q), *prepared.k.of(k), *prepared.v.of(v), *prepared.out.of(out),
        prepared.suffix.of(decay.suffix), decay.suffix, decay.running, decay.reference, decay.first_stretch,
        log_normaliser, *prepared.numbers, sm_scale * LOG2_E,
    )  # fmt: skip
    return out, log_normaliser


class _KeyGradient:
    def __init__(self, inputs: Inputs) -> None:
        (q, k, v, d_out), sizes = inputs.heads, inputs.sizes
        m, stages = TILES["key_gradient", q.size[3]]
        self.q, self.d_out = located(q, m), located(d_out, m)
        self.k, self.v = located(k, _STRETCH.value), located(v, _STRETCH.value)
        self.dk, self.dv = Located(k.like()), Located(v.like())
        self.rows = vectors(sizes.rows * sizes.queries, m)
        self.numbers = sizes.heads, *sizes.lengths
        self.launch = Launch(
            key_gradient_kernel, sizes.stretches * sizes.rows // sizes.group, GROUP=sizes.group, HEAD_DIM=q.size[3],
            M=m, STAGES=stages, **_LAUNCH,
        )  # fmt: skip


def key_gradient(
    inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, log_normaliser: Tensor, delta: Tensor,
    decay: Decay, sm_scale: float, dk: Tensor, dv: Tensor, column_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Write dk, dv and column sums, and return them; `log_normaliser` and `delta` as `delta_kernel` wrote them."""
    prepared = inputs.kept(_KeyGradient)
    prepared.launch(
        *prepared.q.of(q), *prepared.k.of(k), *prepared.v.of(v), *prepared.d_out.of(d_out),
        *prepared.dk.of(dk), *prepared.dv.of(dv), prepared.rows.of(log_normaliser), prepared.rows.of(delta),
        decay.suffix, decay.running, decay.reference, decay.end_block, column_sum,
        *prepared.numbers, sm_scale * LOG2_E, sm_scale,
    )  # fmt: skip
    return dk, dv, column_sum


class _QueryGradient:
    def __init__(self, inputs: Inputs) -> None:
        (q, k, v, d_out), sizes = inputs.heads, inputs.sizes
        n, stages = TILES["query_gradient", q.size[3]]
        self.q, self.d_out = located(q, _STRETCH.value), located(d_out, _STRETCH.value)
        self.k, self.v, self.dq = located(k, n), located(v, n), Located(q.like())
        self.numbers = sizes.heads, sizes.group, *sizes.lengths
        self.launch = Launch(
            query_gradient_kernel, sizes.blocks * sizes.rows, HEAD_DIM=q.size[3], N=n, STAGES=stages, **_LAUNCH
        )


def query_gradient(
    inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, log_normaliser: Tensor, delta: Tensor,
    decay: Decay, sm_scale: float, dq: Tensor, row_sum: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write dq and row sums, and return them; `log_normaliser` and `delta` as `delta_kernel` wrote them."""
    prepared = inputs.kept(_QueryGradient)
    prepared.launch(
        *prepared.q.of(q), *prepared.k.of(k), *prepared.v.of(v), *prepared.d_out.of(d_out), *prepared.dq.of(dq),
        log_normaliser, delta, decay.suffix, decay.running, decay.reference, decay.first_stretch, row_sum,
        *prepared.numbers, sm_scale * LOG2_E, sm_scale,
    )  # fmt: skip
    return dq, row_sum


def located(heads: Heads, rows: int) -> Located:
    """Heads in descriptors, which here also say how tiles lie in shared memory."""
    return Located(heads, rows, TensorDescriptor, _TILE)


def vectors(numel: int, length: int) -> Descriptors:
    """Float32 tensors as one long vector, of which that much is loaded at a time."""
    return Descriptors(TensorDescriptor, [numel], [1], [length], _VECTOR)
