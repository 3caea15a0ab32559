"""The backward pass of forgetting attention on Hopper GPUs in one pass over the tiles: five products, in Gluon.

Two kernels, one for keys and one for queries, compute scores and gradients of weights twice: seven products. Here a
program has 128 keys and goes through the tiles of queries that see them, from the diagonal down. It keeps the gradients
of keys and values in registers and adds its part of the gradient of queries to a float32 tensor in memory. Other
programs add to the same rows, and sums must have the same bits every time, so programs take turns:

- A block of queries takes its additions in descending order of key blocks, the one on its diagonal first; a counter per
  tile of queries says whose turn it is. Programs that start together then meet at different tiles, each one step behind
  the program to its right, and nobody waits. (Fewest queries first, as FlashAttention-3 calls it: shortest first.)
- Programs take key blocks by tickets, from right to left within a head, so who waits only waits for lower tickets, and
  these have started. It does not matter how many programs run at the same time.
- The first addition is a store, so nothing is zeroed.

Roles in a program: two warpgroups of 64 keys each compute, one warp loads, one warp adds to memory in turn, and two
warps sum the gradients of scores of each query. These sums, and those of each key, are of the same rounded numbers:
`decay.gate_gradient_kernel` says why. The warpgroups sum those of keys as products with ones: additions would take
longer.

    a warpgroup, for a tile of M queries:
    Sᵀ = K Qᵀ, dPᵀ = V dOᵀ → Pᵀ → dV += Pᵀ dO, dSᵀ → dK += dSᵀ Q, and half of dQ = dS K of the tile before

The gradient of queries needs dSᵀ of both warpgroups. It is one tile late so that neither waits for the other, and they
take turns at what is not a product: one exponentiates while the other's products run.

Axes and tensors as in `hopper.py`; M queries of a tile, N = 128 keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forgetting_transformer.ops.forgetting_attention.constants import LOG2_E
from forgetting_transformer.ops.forgetting_attention.hopper import (
    _ROWS,
    _STRETCH,
    _accumulators,
    _barriers,
    _columns_of,
    _left_operand,
    _load_tile,
    _next_stage,
    _rows_of,
    _scores,
    _start_load,
    launch_options,
    located,
    vectors,
)
from forgetting_transformer.ops.forgetting_attention.layout import (
    FUSED,
    Decay,
    Descriptors,
    Inputs,
    Launch,
    Located,
    empty_heads,
)

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_FLOAT_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
_store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_STAGES = gl.constexpr(2)  # `_step` counts on there being two


@builtin
def _add_tile(descriptor, coordinates, tile, _semantic=None):
    """Have the copy engine add a tile in shared memory to a tensor; only Triton 3.9 has a name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


@gluon.jit
def _wait_until_written(zero):
    """Until what this warp had the copy engine write is in memory, and not only read from shared memory."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, $1;",
        "=r,r",
        [zero],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load_acquire(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1]; fence.proxy.async.global;",
        "=r,l",
        [pointer],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _rounded(x, dtype: gl.constexpr):
    """Round to 16 bits, two numbers at a time. Where the numbers are needed apart too, the compiler would convert one
    by one, which takes as long as all exponentials."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _one_of_two(sums):
    """Keep every other one of the eight equal columns of a product with ones: one column for each thread."""
    return gl.max(gl.reshape(sums, [_ROWS, 4, 2]), 2)


@gluon.jit
def _query_gradient(k_tile, d_score_T, W: gl.constexpr, HEAD_DIM: gl.constexpr, M: gl.constexpr):
    """Start the product of a tile's gradients of scores and the program's keys: this warpgroup's half."""
    if HEAD_DIM == 2 * _ROWS:
        k_tile = k_tile.slice(W * _ROWS, _ROWS, dim=1)
    if M == 2 * _ROWS:
        d_score_T = d_score_T.slice(W * _ROWS, _ROWS, dim=1)
    nothing = gl.zeros([_ROWS, _ROWS], gl.float32, _accumulators(_ROWS))
    return warpgroup_mma(d_score_T.permute((1, 0)), k_tile, nothing, use_acc=False, is_async=True)


@gluon.jit
def _hand_on(dq, dq_tile, dq_ready, dq_free, phase, HEAD_DIM: gl.constexpr):
    """Leave gradients of queries to the warp that adds them to memory.

    At 64 channels in an order in which each thread writes 16 bytes and no two meet in a bank: its pair of columns, then
    that eight rows below. At 128 this was slower.
    """
    mbarrier.wait(dq_free.index(0), phase)
    if HEAD_DIM == _ROWS:
        dq = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), [3, 0, 2, 4, 1, 5])
        dq = gl.reshape(dq, [2 * _ROWS, _ROWS // 2])
    dq_tile.store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_ready.index(0), count=1)


@gluon.jit
def _step(
    dk, dv, column_sum, m, has_before, stage, phase,
    k_tiles, v_tiles, q_tiles, d_out_tiles, normalisers, deltas, shifts, d_score_tiles, dq_tile, ones, turns,
    q_ready, d_out_ready, free, d_score_ready, d_score_free, dq_ready, dq_free, bias, key, limit, before, scale,
    W: gl.constexpr, MASKED: gl.constexpr, HAS_FIRST: gl.constexpr, HEAD_DIM: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """A tile of queries; keys are rows."""
    column = gl.arange(0, M, _columns_of(M))
    # Always 0, which the assembler cannot tell: it would keep addresses that it knows in registers, which are taken.
    zero = stage >> 1
    k_tile, v_tile = k_tiles.index(zero).slice(W * _ROWS, _ROWS), v_tiles.index(zero).slice(W * _ROWS, _ROWS)

    mbarrier.wait(q_ready.index(stage), phase)
    score_T = _scores(k_tile, q_tiles.index(stage), M)
    mbarrier.wait(d_out_ready.index(stage), phase)
    d_weight_T = _scores(v_tile, d_out_tiles.index(stage), M)
    score_T = warpgroup_mma_wait(1, deps=[score_T])
    mbarrier.wait(turns.index(W), stage ^ (1 - W))
    shift = bias + shifts.index(stage).load(_rows_of(M))
    normaliser = normalisers.index(stage).load(_columns_of(M))
    # In this order: sums that need no scores would be computed early and take registers.
    weight_T = gl.exp2(score_T * scale - normaliser[None, :] + shift[:, None])
    if MASKED:
        seen = key[:, None] <= (m + before + column)[None, :]
        if HAS_FIRST:
            seen = seen & ((m + column)[None, :] < limit[:, None])
        weight_T = gl.where(seen, weight_T, 0.0)
    if M == 64:
        mbarrier.wait(d_out_ready.index(stage), phase)  # for its branch
    d_weight_T, weight_T = warpgroup_mma_wait(0, deps=[d_weight_T, weight_T])
    delta = deltas.index(stage).load(_columns_of(M))
    d_score_T = _rounded(weight_T * (d_weight_T - delta[None, :]), q_tiles.dtype)
    p_T = gl.convert_layout(weight_T.to(q_tiles.dtype), _left_operand(HEAD_DIM))

    mbarrier.arrive(turns.index(1 - W), count=1)

    mbarrier.wait(d_score_free.index(stage), phase ^ 1)
    d_score_tiles.index(stage).slice(W * _ROWS, _ROWS).store(d_score_T)
    running_dv = warpgroup_mma(p_T, d_out_tiles.index(stage), dv, is_async=True)
    fence_async_shared()
    mbarrier.arrive(d_score_ready.index(stage), count=1)
    d_score_operand = gl.convert_layout(d_score_T, _left_operand(HEAD_DIM))
    running_dk = warpgroup_mma(d_score_operand, q_tiles.index(stage), dk, is_async=True)
    nothing = gl.zeros([_ROWS, 8], gl.float32, _accumulators(8))
    d_score_operand = gl.convert_layout(d_score_T, _left_operand(8))
    sums = warpgroup_mma(d_score_operand, ones.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(d_score_ready.index(stage ^ 1), phase ^ stage ^ 1)
    dv = warpgroup_mma_wait(2, deps=[running_dv])
    dq = _query_gradient(k_tiles.index(zero), d_score_tiles.index(stage ^ 1), W, HEAD_DIM, M)
    dk, sums, dq = warpgroup_mma_wait(0, deps=[running_dk, sums, dq])
    mbarrier.arrive(free.index(stage), count=1)
    column_sum += _one_of_two(sums)
    if has_before:  # at the first tile dq comes from what lay in memory
        mbarrier.arrive(d_score_free.index(stage ^ 1), count=1)
        _hand_on(dq, dq_tile, dq_ready, dq_free, stage, HEAD_DIM)
    return dk, dv, column_sum


@gluon.jit
def _compute(
    k_tiles, v_tiles, q_tiles, d_out_tiles, normalisers, deltas, shifts, d_score_tiles, dq_tile, ones, turns,
    once_ready, q_ready, d_out_ready, free, d_score_ready, d_score_free, dq_ready, dq_free,
    suffix, end_queries, start_n, before, start, end_full, end, scale, sm_scale,
    dk_tiles, dv_tiles, d_row, d_column, column_sum_ptr,
    W: gl.constexpr, HAS_FIRST: gl.constexpr, HEAD_DIM: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 keys against the tiles of queries that see them, from the diagonal down."""
    key = start_n + W * _ROWS + gl.arange(0, _ROWS, _rows_of(M))
    bias, limit = gl.load(suffix + key), key
    if HAS_FIRST:
        limit = gl.load(end_queries + key)
    dk = gl.zeros([_ROWS, HEAD_DIM], gl.float32, _accumulators(HEAD_DIM))
    dv = gl.zeros([_ROWS, HEAD_DIM], gl.float32, _accumulators(HEAD_DIM))
    column_sum = _one_of_two(gl.zeros([_ROWS, 8], gl.float32, _accumulators(8)))
    end_diagonal = gl.minimum(start + _STRETCH, end)

    if start < end:
        mbarrier.wait(once_ready.index(0), 0)
    stage, phase = 0, 0
    for m in range(start, end_diagonal, M):
        dk, dv, column_sum = _step(
            dk, dv, column_sum, m, m > start, stage, phase,
            k_tiles, v_tiles, q_tiles, d_out_tiles, normalisers, deltas, shifts, d_score_tiles, dq_tile, ones, turns,
            q_ready, d_out_ready, free, d_score_ready, d_score_free, dq_ready, dq_free, bias, key, limit, before, scale,
            W, True, HAS_FIRST, HEAD_DIM, M,
        )  # fmt: skip
        stage, phase = _next_stage(stage, phase, _STAGES)
    for m in range(end_diagonal, end_full, M):
        dk, dv, column_sum = _step(
            dk, dv, column_sum, m, m > start, stage, phase,
            k_tiles, v_tiles, q_tiles, d_out_tiles, normalisers, deltas, shifts, d_score_tiles, dq_tile, ones, turns,
            q_ready, d_out_ready, free, d_score_ready, d_score_free, dq_ready, dq_free, bias, key, limit, before, scale,
            W, False, HAS_FIRST, HEAD_DIM, M,
        )  # fmt: skip
        stage, phase = _next_stage(stage, phase, _STAGES)
    if HAS_FIRST:
        for m in range(end_full, end, M):
            dk, dv, column_sum = _step(
                dk, dv, column_sum, m, m > start, stage, phase,
                k_tiles, v_tiles, q_tiles, d_out_tiles, normalisers, deltas, shifts, d_score_tiles, dq_tile, ones,
                turns, q_ready, d_out_ready, free, d_score_ready, d_score_free, dq_ready, dq_free, bias, key, limit,
                before, scale,
                W, True, HAS_FIRST, HEAD_DIM, M,
            )  # fmt: skip
            stage, phase = _next_stage(stage, phase, _STAGES)
    if start < end:
        stage ^= 1
        mbarrier.wait(d_score_ready.index(stage), phase ^ stage)
        dq = _query_gradient(k_tiles.index(0), d_score_tiles.index(stage), W, HEAD_DIM, M)
        _hand_on(warpgroup_mma_wait(0, deps=[dq]), dq_tile, dq_ready, dq_free, stage ^ 1, HEAD_DIM)
    gl.store(column_sum_ptr + key, gl.convert_layout(gl.max(column_sum, 1), _rows_of(M)))
    # Through the place of this warpgroup's values, which no other reads.
    place = v_tiles.index(0).slice(W * _ROWS, _ROWS)
    place.store(dv.to(v_tiles.dtype))
    fence_async_shared()
    _barrier()
    _store_tile(dv_tiles, [d_row + W * _ROWS, d_column], place)
    dk = (dk * sm_scale).to(k_tiles.dtype)
    tma.store_wait(0)
    _barrier()
    place.store(dk)
    fence_async_shared()
    _barrier()
    _store_tile(dk_tiles, [d_row + W * _ROWS, d_column], place)
    tma.store_wait(0)


@gluon.jit
def _load(
    k, k_row, k_column, k_tile, v, v_row, v_column, v_tile, once_ready,
    q, q_row, q_column, q_tiles, q_ready, d_out, d_out_row, d_out_column, d_out_tiles, d_out_ready,
    log_normaliser, normalisers, delta, deltas, first_at, running, reference, shifts, free, start_n, start, end,
    M: gl.constexpr,
):  # fmt: skip
    """The warp that loads. It also takes differences of float64 sums, for which tensor cores would stand still."""
    here = gl.load(running + start_n // _STRETCH + 1)
    nothing = gl.zeros([_ROWS], gl.float32, gl.BlockedLayout([2], [32], [1], [0]))
    if start < end:
        mbarrier.expect(once_ready.index(0), k.block_type.nbytes + v.block_type.nbytes)
        _load_tile(k, [k_row, k_column], once_ready.index(0), k_tile)
        _load_tile(v, [v_row, v_column], once_ready.index(0), v_tile)
    stage, phase = 0, 0
    for m in range(start, end, M):
        shift = (gl.load(reference + m // _STRETCH) - here).to(gl.float32)
        mbarrier.wait(free.index(stage), phase ^ 1)
        shifts.index(stage).store(nothing + shift)
        _barrier()
        _start_load(q, q_row + m, q_column, log_normaliser, first_at + m, q_tiles, normalisers, q_ready, stage)
        _start_load(d_out, d_out_row + m, d_out_column, delta, first_at + m, d_out_tiles, deltas, d_out_ready, stage)
        stage, phase = _next_stage(stage, phase, _STAGES)


@gluon.jit
def _sum_rows(
    d_score_tiles, d_score_ready, d_score_free, row_sum_tile, row_sum_ready, row_sum_free, start, end,
    M: gl.constexpr,
):  # fmt: skip
    """Two warps: sums of the gradients of scores of each query over the program's keys.

    Products with ones wait for the products of the warpgroups. That is slower than additions in tiles of 128 queries,
    and faster in tiles of 64, which come twice as often.
    """
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 1], instr_shape=[16, 8])
    ones = gl.full([16, 8], 1.0, d_score_tiles.dtype, gl.DotOperandLayout(1, sums, 2))
    # Four keys in each of a warp's reads, and in each thread's eight queries, 16 bytes.
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 2], [1, 0])
    stage, phase = 0, 0
    for _ in range(start, end, M):
        mbarrier.wait(d_score_ready.index(stage), phase)
        d_score_T = d_score_tiles.index(stage)
        if M == 128:
            total = gl.sum(gl.reshape(d_score_T.slice(0, 8).load(rows).to(gl.float32), [2, 4, M]), 0)
            for i in gl.static_range(1, 16):
                d_score = d_score_T.slice(8 * i, 8).load(rows).to(gl.float32)
                total += gl.sum(gl.reshape(d_score, [2, 4, M]), 0)
        else:
            total = gl.zeros([M, 8], gl.float32, sums)
            for i in gl.static_range(8):
                d_score = d_score_T.slice(16 * i, 16).permute((1, 0)).load(gl.DotOperandLayout(0, sums, 2))
                total = mma_v2(d_score, ones, total)
        mbarrier.arrive(d_score_free.index(stage), count=1)
        row_sum = gl.sum(total, 0) if M == 128 else gl.max(total, 1)
        mbarrier.wait(row_sum_free.index(0), stage ^ 1)
        row_sum_tile.store(row_sum)
        fence_async_shared()
        mbarrier.arrive(row_sum_ready.index(0), count=1)
        stage, phase = _next_stage(stage, phase, _STAGES)


@gluon.jit
def _add_in_turn(
    dq, dq_row, dq_tiles, dq_ready_0, dq_free_0, dq_ready_1, dq_free_1,
    row_sum, row_sum_at, row_sum_tile, row_sum_ready, row_sum_free, turns, start_n, before, start, end,
    HEAD_DIM: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """The warp that adds to gradients and sums of queries, in turn."""
    phase = 0
    for m in range(start, end, M):
        turn = (m + before) // _STRETCH - start_n // _STRETCH
        at = turns + m // M
        while _load_acquire(at) != turn:
            pass
        row = dq_row + m
        row_1, column_1 = row, HEAD_DIM // 2
        if HEAD_DIM == _ROWS:  # in rows of 32 numbers
            row, row_1, column_1 = 2 * row, 2 * row + M, 0
        mbarrier.wait(dq_ready_0.index(0), phase)
        if turn == 0:
            _store_tile(dq, [row, 0], dq_tiles.index(0))
        else:
            _add_tile(dq, [row, 0], dq_tiles.index(0))
        mbarrier.wait(dq_ready_1.index(0), phase)
        if turn == 0:
            _store_tile(dq, [row_1, column_1], dq_tiles.index(1))
        else:
            _add_tile(dq, [row_1, column_1], dq_tiles.index(1))
        mbarrier.wait(row_sum_ready.index(0), phase)
        if turn == 0:
            _store_tile(row_sum, [row_sum_at + m], row_sum_tile)
        else:
            _add_tile(row_sum, [row_sum_at + m], row_sum_tile)
        tma.store_wait(1)
        mbarrier.arrive(dq_free_0.index(0), count=1)
        mbarrier.arrive(dq_free_1.index(0), count=1)
        tma.store_wait(0)
        mbarrier.arrive(row_sum_free.index(0), count=1)
        done = _wait_until_written(m * 0)
        _barrier()
        gl.atomic_add(at, 1 + done, sem="release", scope="gpu")
        phase ^= 1


@gluon.jit
def backward_kernel(
    q, q_0, q_1, q_2, k, k_0, k_1, k_2, v, v_0, v_1, v_2, d_out, d_out_0, d_out_1, d_out_2,
    dk, dv, d_0, d_1, d_2, dq, row_sum,
    log_normaliser, delta, suffix_ptr, running_ptr, reference_ptr, end_block_ptr, end_query_ptr, column_sum_ptr,
    turns_ptr, heads, group, num_queries, num_keys, num_stretches, num_blocks, scale, sm_scale,
    HAS_FIRST: gl.constexpr, HEAD_DIM: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Gradients of 128 keys and values of a query head and their column sums; its part of gradients of queries and of
    row sums.

    `turns_ptr`: int32 zeros, a ticket counter and then one of turns for each tile of queries `(Z, tiles)`.
    """
    ticket = gl.atomic_add(turns_ptr, 1)
    start_n = (num_stretches - 1 - ticket % num_stretches) * _STRETCH
    z = (ticket // num_stretches).to(gl.int64)
    sequence, head, key_head = z // heads, z % heads, z % heads // group
    before = num_keys - num_queries
    k_row, k_column = (sequence * k_0 + key_head * k_1).to(gl.int32) + start_n, (key_head * k_2).to(gl.int32)
    v_row, v_column = (sequence * v_0 + key_head * v_1).to(gl.int32) + start_n, (key_head * v_2).to(gl.int32)
    q_row, q_column = (sequence * q_0 + head * q_1).to(gl.int32), (head * q_2).to(gl.int32)
    d_out_row, d_out_column = (sequence * d_out_0 + head * d_out_1).to(gl.int32), (head * d_out_2).to(gl.int32)
    d_row, d_column = (sequence * d_0 + head * d_1).to(gl.int32) + start_n, (head * d_2).to(gl.int32)
    suffix, running = suffix_ptr + z * num_stretches * _STRETCH, running_ptr + z * (num_stretches + 1)
    reference, column_sum = reference_ptr + z * num_blocks, column_sum_ptr + z * num_keys
    first_at = (z * num_queries).to(gl.int32)
    turns = turns_ptr + 1 + z * (num_queries // M)
    start = gl.maximum(start_n - before, 0)
    end = gl.minimum(gl.load(end_block_ptr + z * num_stretches + start_n // _STRETCH) * _STRETCH, num_queries)
    end_full, end_queries = end, end_block_ptr
    if HAS_FIRST:
        end_queries = end_query_ptr + sequence * num_keys
        end = gl.minimum(end, gl.cdiv(gl.load(end_queries + start_n + _STRETCH - 1), _STRETCH) * _STRETCH)
        # The block on the diagonal, which is the first to add, also where its queries see nothing.
        end = gl.maximum(end, start_n - before + _STRETCH)
        end_full = gl.minimum(gl.maximum(gl.load(end_queries + start_n) // M * M, start + _STRETCH), end)

    k_tiles = gl.allocate_shared_memory(k.dtype, [1, 2 * _ROWS, HEAD_DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [1, 2 * _ROWS, HEAD_DIM], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [_STAGES, M, HEAD_DIM], q.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [_STAGES, M, HEAD_DIM], d_out.layout)
    d_score_tiles = gl.allocate_shared_memory(q.dtype, [_STAGES, 2 * _ROWS, M], q.layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, M, _ROWS * _ROWS // M], dq.layout)
    normalisers = gl.allocate_shared_memory(gl.float32, [_STAGES, M], log_normaliser.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [_STAGES, M], delta.layout)
    shifts = gl.allocate_shared_memory(gl.float32, [_STAGES, _ROWS], delta.layout)
    row_sum_tile = gl.allocate_shared_memory(gl.float32, [M], row_sum.layout)
    ones = gl.allocate_shared_memory(q.dtype, [8, M], q.layout)
    ones.store(gl.full([8, M], 1.0, q.dtype, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
    fence_async_shared()
    once_ready, q_ready, d_out_ready = _barriers(1, 1), _barriers(_STAGES, 1), _barriers(_STAGES, 1)
    free, d_score_ready, d_score_free = _barriers(_STAGES, 2), _barriers(_STAGES, 2), _barriers(_STAGES, 3)
    dq_ready_0, dq_free_0, dq_ready_1, dq_free_1 = _barriers(1, 1), _barriers(1, 1), _barriers(1, 1), _barriers(1, 1)
    row_sum_ready, row_sum_free, turns_to_compute = _barriers(1, 1), _barriers(1, 1), _barriers(2, 1)
    gl.warp_specialize(
        [
            (_compute, (
                k_tiles, v_tiles, q_tiles, d_out_tiles, normalisers, deltas,
                shifts, d_score_tiles, dq_tiles.index(0), ones, turns_to_compute,
                once_ready, q_ready, d_out_ready, free, d_score_ready, d_score_free, dq_ready_0, dq_free_0,
                suffix, end_queries, start_n, before, start, end_full, end, scale, sm_scale,
                dk, dv, d_row, d_column, column_sum, 0, HAS_FIRST, HEAD_DIM, M,
            )),
            (_compute, (
                k_tiles, v_tiles, q_tiles, d_out_tiles, normalisers,
                deltas, shifts, d_score_tiles, dq_tiles.index(1), ones, turns_to_compute,
                once_ready, q_ready, d_out_ready, free, d_score_ready, d_score_free, dq_ready_1, dq_free_1,
                suffix, end_queries, start_n, before, start, end_full, end, scale, sm_scale,
                dk, dv, d_row, d_column, column_sum, 1, HAS_FIRST, HEAD_DIM, M,
            )),
            (_load, (
                k, k_row, k_column, k_tiles.index(0), v, v_row, v_column, v_tiles.index(0), once_ready,
                q, q_row, q_column, q_tiles, q_ready, d_out, d_out_row, d_out_column, d_out_tiles, d_out_ready,
                log_normaliser, normalisers, delta, deltas, first_at, running, reference, shifts, free,
                start_n, start, end, M,
            )),
            (_add_in_turn, (
                dq, first_at, dq_tiles, dq_ready_0, dq_free_0, dq_ready_1, dq_free_1,
                row_sum, first_at, row_sum_tile, row_sum_ready, row_sum_free, turns, start_n, before, start, end,
                HEAD_DIM, M,
            )),
            (_sum_rows, (
                d_score_tiles, d_score_ready, d_score_free, row_sum_tile, row_sum_ready, row_sum_free, start, end,
                M,
            )),
        ],
        [4, 1, 1, 2],
        [232, 40, 40, 40],
    )  # fmt: skip


@triton.jit
def finish_kernel(
    sum_ptr, dq_ptr, dq_0, dq_1, dq_2, heads, num_queries, sm_scale, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr
):
    """Gradients of queries from their float32 sums `(Z, M, D)`, at 64 channels in the order of `_hand_on`."""
    num_blocks = num_queries // ROWS
    z = (tl.program_id(0) // num_blocks).to(tl.int64)
    row, channel = tl.program_id(0) % num_blocks * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    sum_ptr += (z * num_queries + tl.program_id(0) % num_blocks * ROWS) * HEAD_DIM
    total = tl.load(sum_ptr + tl.arange(0, ROWS * HEAD_DIM))
    if HEAD_DIM == 64:
        total = tl.permute(tl.reshape(total, [ROWS // 64, 8, 4, 8, 4, 2, 2]), [0, 2, 5, 3, 1, 4, 6])
    total = tl.reshape(total, [ROWS, HEAD_DIM])
    at = dq_ptr + (z // heads) * dq_0 + (z % heads) * dq_1 + row[:, None] * (z * 0 + dq_2) + channel[None, :]
    tl.store(at, (total * sm_scale).to(dq_ptr.dtype.element_ty))


#: (kernel, head dimension): queries of a tile (docs/lab_notebook.md).
TILES = {("backward", 64): 128, ("backward", 128): 64}


class _Backward:
    def __init__(self, inputs: Inputs) -> None:
        (q, k, v, d_out), sizes = inputs.heads, inputs.sizes
        head_dim, m = q.size[3], TILES["backward", q.size[3]]
        self.q, self.d_out = located(q, m), located(d_out, m)
        self.k, self.v = located(k, _STRETCH.value), located(v, _STRETCH.value)
        self.wide = torch.Size((sizes.batch, sizes.heads, sizes.keys, head_dim))  # of dk and dv for each query head
        wide = k._replace(size=self.wide).like()
        self.dk, self.dv, self.dq = located(wide, _ROWS.value), located(wide, _ROWS.value), Located(q.like())
        numbers, width = sizes.rows * sizes.queries * head_dim, 32 if head_dim == 64 else head_dim
        self.total = numbers // width, width
        block = [m, _ROWS.value * _ROWS.value // m]
        self.total_tiles = Descriptors(TensorDescriptor, [*self.total], [width, 1], block, _FLOAT_TILE)
        self.rows = vectors(sizes.rows * sizes.queries, m)
        self.numbers = sizes.heads, sizes.group, *sizes.lengths
        self.launch = Launch(
            backward_kernel, sizes.stretches * sizes.rows, HAS_FIRST=inputs.has_first, HEAD_DIM=head_dim, M=m,
            **launch_options(2),
        )  # fmt: skip
        self.finish = Launch(finish_kernel, sizes.blocks * sizes.rows, HEAD_DIM=head_dim, ROWS=_STRETCH.value, **FUSED)


def backward(
    inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, log_normaliser: Tensor, delta: Tensor,
    decay: Decay, end_query: Tensor | None, sm_scale: float, turns: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    row_sum: Tensor, column_sum: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Write gradients and sums, and return them.

    Heads that share keys have gradients of keys and values each, in 16 bits, which are then summed.

    Args:
        log_normaliser, delta, turns: as `delta_kernel` wrote them.
        end_query: `(B, N)` int32, one past the last query that sees each key; None is all from the key on.
    """
    prepared, group = inputs.kept(_Backward), inputs.sizes.group
    rows, wide_dk, wide_dv = prepared.rows, dk, dv
    if group > 1:
        wide_dk, wide_dv = (empty_heads(prepared.wide, x) for x in (k, v))
    total = torch.empty(prepared.total, dtype=torch.float32, device=q.device)
    prepared.launch(
        *prepared.q.of(q), *prepared.k.of(k), *prepared.v.of(v), *prepared.d_out.of(d_out),
        prepared.dk.of(wide_dk)[0], *prepared.dv.of(wide_dv), prepared.total_tiles.of(total), rows.of(row_sum),
        rows.of(log_normaliser), rows.of(delta),
        decay.suffix, decay.running, decay.reference, decay.end_block, end_query, column_sum, turns,
        *prepared.numbers, sm_scale * LOG2_E, sm_scale,
    )  # fmt: skip
    prepared.finish(total, *prepared.dq.of(dq), inputs.sizes.heads, inputs.sizes.queries, sm_scale)
    if group > 1:
        for wide, narrow in ((wide_dk, dk), (wide_dv, dv)):
            torch.sum(wide.unflatten(1, (-1, group)), 2, out=narrow)
    return dq, dk, dv, row_sum, column_sum
