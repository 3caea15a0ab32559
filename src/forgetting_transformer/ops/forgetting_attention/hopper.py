"""Forgetting attention on Hopper GPUs: the kernels of `kernels.py` for 16-bit tensors of whole tiles, in Gluon.

Gluon is Triton one level lower. Triton waits for every product whose result is not an accumulator, so that products and
exponentials take turns; here a product is started, other work is done, and the wait comes where its result is used. In
each program one warp loads tiles through the copy engine, and two or three warpgroups of four warps compute, each with
64 rows, one's exponentials beside another's products (Shah et al. 2024, FlashAttention-3). Tiles of the other tensor
come in a ring of STAGES places; barriers say when a tile is there (`ready`) and when all warpgroups have read what
lies in a place (`free`).

Budget of a multiprocessor: 64 Ki registers, of which two warpgroups get 240 per thread, three 160, and the loading
warp's 24, and 227 KiB of shared memory. A float32 tile of 64 × N takes N / 2 registers per thread, a 16-bit one that
enters a product N / 4. The forward pass, N = 128:
    D = 128          scores 64, weights 32, outputs 64; queries 32 KiB, 2 stages of keys and values 128 KiB
    D = 64           scores 64, weights 32, outputs 32; queries 24 KiB, 2 stages of keys and values 64 KiB
Row vectors that vary along a tile's columns come through shared memory too, for in registers they would take N / 4
each. The loading warp also subtracts running sums in float64, which would wait for products in the other warps.
Gradients are in `hopper_backward.py`.

What no result shows, only the assembler's log and its machine code:
- A warpgroup that arrives at a barrier is synchronised before, and again before it next uses shared memory. So there
  are few barriers, and warpgroups arrive where their warps have just waited for a product.
- The assembler moves arithmetic past a wait for a product, but not past a branch. To stop it, a wait for a barrier that
  was passed long ago, which is a branch, stands before that wait. At 64 channels it may move: that is faster.
- It keeps addresses that it knows in registers, dozens of them: `hopper_backward.py` hides one.
- Accumulators that are zeroed beside a product in flight make it run all products one by one. So they are zeroed before
  the first one, or a product sets them and does not add to them.

Axes: M queries × N keys as in `kernels.py`; Z = B·H.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
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
    ceil_div,
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
    """Layout in one warpgroup of a tile of 64 × columns that products add to."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _rows_of(columns):
    return gl.SliceLayout(1, _accumulators(columns))


@gluon.constexpr_function
def _columns_of(columns):
    return gl.SliceLayout(0, _accumulators(columns))


@gluon.constexpr_function
def _left_operand(columns):
    """Layout of the left factor of a product with that many columns."""
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
def _row_maxima(score, N: gl.constexpr):
    # By pairs, then the pairs of a thread, then four threads: a thread's columns one by one would be a long chain.
    pairs = gl.max(gl.reshape(score, [_ROWS, N // 8, 4, 2]), 3)
    return gl.convert_layout(gl.max(gl.max(pairs, 1), 1), _rows_of(N))


@gluon.jit
def _partial_row_sums(weight, N: gl.constexpr):
    """Sums over the columns of each of the four threads that share a row, `(64, 4)`. The four are added once, at the
    end: threads would wait for each other at every tile."""
    return gl.sum(gl.sum(gl.reshape(weight, [_ROWS, N // 8, 4, 2]), 3), 1)


@gluon.jit
def _weights_operand(weight, dtype: gl.constexpr, HEAD_DIM: gl.constexpr):
    return gl.convert_layout(weight.to(dtype), _left_operand(HEAD_DIM))


@gluon.jit
def _attend_span(
    acc, maximum, total, weight, stage, phase, turn,
    q_tile, k_tiles, v_tiles, biases, offsets, k_ready, v_ready, free, turns, which, first_key,
    last_tile, first_tile, scale,
    W: gl.constexpr, WARPGROUPS: gl.constexpr, MASKED: gl.constexpr, HEAD_DIM: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Online softmax over tiles of keys, from last_tile to the left; `weight` is that of the tile before, with three
    warpgroups already rounded, for want of registers."""
    for tile in range(last_tile, first_tile - 1, -1):
        p = weight
        if WARPGROUPS == 2:
            p = _weights_operand(weight, k_tiles.dtype, HEAD_DIM)
        old, old_phase = stage, phase
        stage, phase = _next_stage(stage, phase, STAGES)
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.wait(turns.index(W), turn)
        score = _scores(q_tile, k_tiles.index(stage), N)
        mbarrier.wait(v_ready.index(old), old_phase)
        acc = warpgroup_mma(p, v_tiles.index(old), acc, is_async=True)
        if WARPGROUPS == 2:  # three are faster when the next one starts later
            mbarrier.arrive(turns.index((W + 1) % WARPGROUPS), count=1)
        turn ^= 1
        score = warpgroup_mma_wait(1, deps=[score])
        score = score * scale + biases.index(stage).load(_columns_of(N))[None, :]
        if MASKED:
            key = tile * N + gl.arange(0, N, _columns_of(N))
            score = gl.where(key[None, :] >= first_key[:, None], score, float("-inf"))
        offset = offsets.index(stage * (WARPGROUPS - 1) + which).load(_rows_of(N))
        if WARPGROUPS == 3:
            mbarrier.arrive(turns.index((W + 1) % WARPGROUPS), count=1)
        new_maximum = gl.maximum(maximum, _row_maxima(score, N) + offset)
        rescale = gl.exp2(maximum - new_maximum)
        weight = gl.exp2(score - (new_maximum - offset)[:, None])
        total = total * gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout))[:, None]
        total += _partial_row_sums(weight, N)
        maximum = new_maximum
        if WARPGROUPS == 2:
            mbarrier.wait(v_ready.index(old), old_phase)  # for its branch
        acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
        if WARPGROUPS == 3:  # where the weights of the tile before were, which the product has read
            weight = _weights_operand(weight, k_tiles.dtype, HEAD_DIM)
        mbarrier.arrive(free.index(stage), count=1)  # the place of these keys, and of the values before
        acc = acc * gl.convert_layout(rescale, _rows_of(HEAD_DIM))[:, None]
    return acc, maximum, total, weight, stage, phase, turn


@gluon.jit
def _pass_tile(stage, turn, free, turns, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Leave a tile and a turn to the other warpgroups."""
    mbarrier.wait(turns.index(W), turn)
    mbarrier.arrive(turns.index((W + 1) % WARPGROUPS), count=1)
    mbarrier.arrive(free.index(stage), count=1)


@gluon.jit
def _attend(
    shared, W: gl.constexpr, WARPGROUPS: gl.constexpr, HAS_FIRST: gl.constexpr, HEAD_DIM: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `forward_kernel`: 64 queries against tiles of keys, from the diagonal to the left.

    The warpgroups take turns at starting products, so that one exponentiates while the products of another run. With
    two of them, the product of the weights and values of the tile before also runs while a tile is exponentiated.
    """
    (
        q_tiles, k_tiles, v_tiles, biases, offsets, q_ready, k_ready, v_ready, free, turns,
        suffix, first_stretches, first_keys, start_m, before, last_tile, first_full, first_tile, scale, out, out_row,
        log_normaliser,
    ) = shared  # fmt: skip
    q_tile, first_row = q_tiles.index(W), start_m + W * _ROWS
    position = first_row + before + gl.arange(0, _ROWS, _rows_of(N))
    acc = gl.zeros([_ROWS, HEAD_DIM], gl.float32, _accumulators(HEAD_DIM))
    first_key = position
    if HAS_FIRST:
        first_key = gl.load(first_keys + gl.maximum(position - before, 0))

    stage, phase, turn, which = 0, 0, 0, 0
    own_last, own_first = last_tile, first_tile
    if WARPGROUPS == 3:
        # The program's rows lie in two stretches: some see nothing of its last tile, or leave out more of the first.
        own_last = gl.maximum((first_row + before + _STRETCH) // N - 1, first_tile)
        own_first = gl.load(first_stretches + gl.maximum(first_row, 0) // _STRETCH)
        own_first = gl.minimum(gl.maximum(own_first, first_tile), own_last)
        which = (first_row + before + _STRETCH) // _STRETCH - (start_m + before + _STRETCH) // _STRETCH
        if own_last < last_tile:
            _pass_tile(0, 0, free, turns, W, WARPGROUPS)
            stage, turn = 1, 1
    mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(k_ready.index(stage), 0)
    mbarrier.wait(turns.index(W), turn)
    score = _scores(q_tile, k_tiles.index(stage), N)
    mbarrier.arrive(turns.index((W + 1) % WARPGROUPS), count=1)
    turn ^= 1
    score = warpgroup_mma_wait(0, deps=[score])
    score = score * scale + biases.index(stage).load(_columns_of(N))[None, :]
    key = own_last * N + gl.arange(0, N, _columns_of(N))
    seen = key[None, :] <= position[:, None]
    if HAS_FIRST:
        seen = seen & (key[None, :] >= first_key[:, None])
    score = gl.where(seen, score, float("-inf"))
    # Biases within a stretch of keys; from its end to the reference, it is the same for all of them.
    offset = offsets.index(stage * (WARPGROUPS - 1) + which).load(_rows_of(N))
    mbarrier.arrive(free.index(stage), count=1)
    maximum = _row_maxima(score, N) + offset
    if HAS_FIRST:  # a query may see nothing
        maximum = gl.maximum(maximum, -1e30)
    weight = gl.exp2(score - (maximum - offset)[:, None])
    total = _partial_row_sums(weight, N)
    if WARPGROUPS == 3:
        weight = _weights_operand(weight, k_tiles.dtype, HEAD_DIM)

    first_full = gl.maximum(first_full, own_first)
    acc, maximum, total, weight, stage, phase, turn = _attend_span(
        acc, maximum, total, weight, stage, phase, turn,
        q_tile, k_tiles, v_tiles, biases, offsets, k_ready, v_ready, free, turns, which, first_key,
        own_last - 1, first_full, scale, W, WARPGROUPS, False, HEAD_DIM, N, STAGES,
    )  # fmt: skip
    if HAS_FIRST:
        acc, maximum, total, weight, stage, phase, turn = _attend_span(
            acc, maximum, total, weight, stage, phase, turn,
            q_tile, k_tiles, v_tiles, biases, offsets, k_ready, v_ready, free, turns, which, first_key,
            gl.minimum(first_full, own_last) - 1, own_first, scale, W, WARPGROUPS, True, HEAD_DIM, N, STAGES,
        )  # fmt: skip

    if WARPGROUPS == 2:
        weight = _weights_operand(weight, k_tiles.dtype, HEAD_DIM)
    mbarrier.wait(v_ready.index(stage), phase)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weight, v_tiles.index(stage), acc, is_async=True)])
    if WARPGROUPS == 3:
        for _ in range(first_tile, own_first):
            stage, phase = _next_stage(stage, phase, STAGES)
            mbarrier.wait(k_ready.index(stage), phase)  # else the tile before in its place might be freed twice
            _pass_tile(stage, turn, free, turns, W, WARPGROUPS)
            turn ^= 1
    sums = gl.convert_layout(gl.sum(total, 1), _rows_of(N))
    sees_nothing = sums == 0.0
    if HAS_FIRST:
        sums = gl.where(sees_nothing, 1.0, sums)
    acc = acc * gl.convert_layout(1.0 / sums, _rows_of(HEAD_DIM))[:, None]
    if first_row >= 0:
        _store(out, out_row, first_row, acc, HEAD_DIM)
        # Biases so far run to the end of the queries' stretch, log-normalisers only to each query.
        value = (maximum + gl.log2(sums) - gl.load(suffix + position)) * 0.6931471805599453
        if HAS_FIRST:
            value = gl.where(sees_nothing, float("-inf"), value)
        gl.store(log_normaliser + (position - before), value)


@gluon.jit
def _load_for_forward(
    shared, inputs, WARPGROUPS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp of `forward_kernel` that loads. It also takes differences of float64 sums: tensor cores would wait."""
    (
        q_tiles, k_tiles, v_tiles, biases, offsets, q_ready, k_ready, v_ready, free, turns,
        _, _, _, start_m, _, last_tile, _, first_tile, _, _, _, _,
    ) = shared  # fmt: skip
    q, q_row, q_column, k, k_row, k_column, v, v_row, v_column, suffix, suffix_start, running, references = inputs
    mbarrier.arrive(turns.index(0), count=1)
    nothing = gl.zeros([_ROWS], gl.float32, gl.BlockedLayout([2], [32], [1], [0]))
    mbarrier.expect(q_ready.index(0), WARPGROUPS * q.block_type.nbytes)
    for w in gl.static_range(WARPGROUPS):
        _load_tile(q, [q_row + w * _ROWS, q_column], q_ready.index(0), q_tiles.index(w))
    reference = gl.load(references + gl.maximum(start_m, 0) // _STRETCH)
    last_reference = gl.load(references + (start_m + WARPGROUPS * _ROWS - 1) // _STRETCH)
    stage, phase, old = 0, 0, 0
    for tile in range(last_tile, first_tile - 1, -1):
        end = gl.load(running + tile * N // _STRETCH + 1)
        mbarrier.wait(free.index(stage), phase ^ 1)
        offsets.index(stage * (WARPGROUPS - 1)).store(nothing + (reference - end).to(gl.float32))
        if WARPGROUPS == 3:
            offsets.index(stage * 2 + 1).store(nothing + (last_reference - end).to(gl.float32))
        _barrier()
        _start_load(k, k_row + tile * N, k_column, suffix, suffix_start + tile * N, k_tiles, biases, k_ready, stage)
        if tile < last_tile:
            mbarrier.expect(v_ready.index(old), v.block_type.nbytes)
            _load_tile(v, [v_row + (tile + 1) * N, v_column], v_ready.index(old), v_tiles.index(old))
        old = stage
        stage, phase = _next_stage(stage, phase, STAGES)
    mbarrier.wait(free.index(stage), phase ^ 1)
    mbarrier.expect(v_ready.index(old), v.block_type.nbytes)
    _load_tile(v, [v_row + first_tile * N, v_column], v_ready.index(old), v_tiles.index(old))


@gluon.jit
def forward_kernel(
    q, q_0, q_1, q_2, k, k_0, k_1, k_2, v, v_0, v_1, v_2, out_ptr, out_0, out_1, out_2,
    suffix_vector, suffix_ptr, running_ptr, reference_ptr, first_stretch_ptr, first_key_ptr, log_normaliser_ptr,
    heads, group, num_queries, num_keys, num_stretches, num_blocks, scale,
    WARPGROUPS: gl.constexpr, HAS_FIRST: gl.constexpr, HEAD_DIM: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Outputs and log-normalisers (nats) of WARPGROUPS × 64 queries; tiles of N = 128 keys.

    Programs are counted from the last query: what is computed for nothing, in rows before the head's first query, is in
    the program whose row of tiles is short. Of the tiles left of the diagonal, those that some query sees in part come
    last.
    """
    rows = WARPGROUPS * _ROWS
    programs = gl.cdiv(num_queries, rows)
    # Long rows of tiles first: what starts last is what is short.
    start_m = num_queries - (gl.program_id(0) % programs + 1) * rows
    z = (gl.program_id(0) // programs).to(gl.int64)
    sequence, head, key_head = z // heads, z % heads, z % heads // group
    q_row, q_column = (sequence * q_0 + head * q_1).to(gl.int32) + start_m, (head * q_2).to(gl.int32)
    k_row, k_column = (sequence * k_0 + key_head * k_1).to(gl.int32), (key_head * k_2).to(gl.int32)
    v_row, v_column = (sequence * v_0 + key_head * v_1).to(gl.int32), (key_head * v_2).to(gl.int32)
    out = out_ptr + sequence * out_0 + head * out_1
    suffix, running = suffix_ptr + z * num_stretches * _STRETCH, running_ptr + z * (num_stretches + 1)
    log_normaliser = log_normaliser_ptr + z * num_queries
    references, first_stretches = reference_ptr + z * num_blocks, first_stretch_ptr + z * num_blocks
    before, first_row, last_row = num_keys - num_queries, gl.maximum(start_m, 0), start_m + rows - 1
    last_tile = (last_row + before) // N
    first_tile = gl.load(first_stretches + first_row // _STRETCH)
    first_full, first_keys = first_tile, first_stretch_ptr
    if HAS_FIRST:
        first_keys = first_key_ptr + sequence * num_queries
        first_tile = gl.minimum(gl.maximum(first_tile, gl.load(first_keys + first_row) // N), last_tile)
        first_full = gl.maximum(gl.cdiv(gl.load(first_keys + last_row), N), first_tile)

    q_tiles = gl.allocate_shared_memory(q.dtype, [WARPGROUPS, _ROWS, HEAD_DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, N, HEAD_DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, N, HEAD_DIM], v.layout)
    biases = gl.allocate_shared_memory(gl.float32, [STAGES, N], suffix_vector.layout)
    offsets = gl.allocate_shared_memory(gl.float32, [STAGES * (WARPGROUPS - 1), _ROWS], suffix_vector.layout)
    q_ready, k_ready, v_ready = _barriers(1, 1), _barriers(STAGES, 1), _barriers(STAGES, 1)
    free, turns = _barriers(STAGES, WARPGROUPS), _barriers(WARPGROUPS, 1)
    shared = (
        q_tiles, k_tiles, v_tiles, biases, offsets, q_ready, k_ready, v_ready, free, turns,
        suffix, first_stretches, first_keys, start_m, before, last_tile, first_full, first_tile, scale, out, out_2,
        log_normaliser,
    )  # fmt: skip
    inputs = (
        q, q_row, q_column, k, k_row, k_column, v, v_row, v_column, suffix_vector,
        (z * num_stretches * _STRETCH).to(gl.int32), running, references,
    )  # fmt: skip
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (shared, 0, WARPGROUPS, HAS_FIRST, HEAD_DIM, N, STAGES)),
                (_attend, (shared, 1, WARPGROUPS, HAS_FIRST, HEAD_DIM, N, STAGES)),
                (_load_for_forward, (shared, inputs, WARPGROUPS, N, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (shared, 0, WARPGROUPS, HAS_FIRST, HEAD_DIM, N, STAGES)),
                (_attend, (shared, 1, WARPGROUPS, HAS_FIRST, HEAD_DIM, N, STAGES)),
                (_attend, (shared, 2, WARPGROUPS, HAS_FIRST, HEAD_DIM, N, STAGES)),
                (_load_for_forward, (shared, inputs, WARPGROUPS, N, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


#: (kernel, head dimension): warpgroups that compute, keys of a tile, and stages. Measured on an H200
#: (docs/lab_notebook.md).
TILES = {("forward", 64): (3, 128, 2), ("forward", 128): (2, 128, 2)}


def launch_options(warpgroups: int) -> dict[str, Any]:
    """Launch options of kernels where so many warpgroups compute, and fill one more with other warps: each thread has
    its share of 65,536 registers, in steps of 8."""
    return {"num_warps": 4, "maxnreg": 65536 // (128 * (warpgroups + 1)) // 8 * 8, **FUSED}


class _Forward:
    def __init__(self, inputs: Inputs) -> None:
        (q, k, v), sizes = inputs.heads, inputs.sizes
        warpgroups, n, stages = TILES["forward", q.size[3]]
        self.q, self.k, self.v = located(q, _ROWS.value), located(k, n), located(v, n)
        self.out, self.suffix = Located(q.like()), vectors(sizes.rows * sizes.stretches * _STRETCH.value, n)
        self.numbers = sizes.heads, sizes.group, *sizes.lengths
        self.launch = Launch(
            forward_kernel, ceil_div(sizes.queries, warpgroups * _ROWS.value) * sizes.rows, WARPGROUPS=warpgroups,
            HAS_FIRST=inputs.has_first, HEAD_DIM=q.size[3], N=n, STAGES=stages, **launch_options(warpgroups),
        )  # fmt: skip


def forward(
    inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, decay: Decay, first_key: Tensor | None, sm_scale: float,
    out: Tensor, log_normaliser: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write outputs and log-normalisers, and return them."""
    prepared = inputs.kept(_Forward)
    prepared.launch(
        *prepared.q.of(q), *prepared.k.of(k), *prepared.v.of(v), *prepared.out.of(out),
        prepared.suffix.of(decay.suffix), decay.suffix, decay.running, decay.reference, decay.first_stretch,
        first_key, log_normaliser, *prepared.numbers, sm_scale * LOG2_E,
    )  # fmt: skip
    return out, log_normaliser


def located(heads: Heads, rows: int) -> Located:
    """Heads in descriptors, which here also have the layout of tiles in shared memory."""
    return Located(heads, rows, TensorDescriptor, _TILE)


def vectors(numel: int, length: int) -> Descriptors:
    """Float32 tensors as one long vector, of which that much is loaded at a time."""
    return Descriptors(TensorDescriptor, [numel], [1], [length], _VECTOR)
