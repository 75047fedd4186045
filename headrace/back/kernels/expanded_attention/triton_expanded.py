"""Attention of rows with many queries over keys and values that were expanded from latents, on
Hopper: as kernels/attention/triton_prefill_hopper.py, whose list of tiles, order of work and
softmax this shares.

Keys are in two parts: a head's own, and the rotated part, which all heads share and which the TMA
unit brings from the latents themselves. Positions of a row lie beside each other, so a tile of keys
is one copy, and of values another; what lies behind a row's last position is another row's, is a
number, and is masked.

H query heads, D own dimensions of a key and dimensions of a value, R rotated ones, N positions of a
tile, S positions in all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace.back.kernels.attention.gluon_softmax import softmax_weights
from headrace.back.kernels.attention.triton_prefill_hopper import barriers, item_of
from headrace.back.kernels.triton.gluon import thread_barrier

QUERIES = gl.constexpr(64)
"""Queries of a group of warps: rows of one matrix instruction."""


@gluon.jit
def _fetch(
    key, rotated, value, tiles, begins, num_positions, keys, rotaries, values, k_ready, k_free,
    v_ready, v_free, HEADS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Asks for the keys and values of every tile, in the order they are taken."""
    D: gl.constexpr = key.block_shape[1]
    R: gl.constexpr = rotated.block_shape[1]
    items = gl.load(tiles) * HEADS
    count = 0
    for i_round in range(0, gl.cdiv(items, gl.num_programs(0))):
        i_item = item_of(i_round)
        if i_item < items:
            p_tile = tiles + (i_item // HEADS + 1) * 8
            begin = gl.load(begins + gl.load(p_tile))
            first = i_item % HEADS * num_positions + begin
            num_tiles = gl.cdiv(gl.load(p_tile + 5), N)
            for i_back in range(0, num_tiles):
                start = (num_tiles - 1 - i_back) * N
                stage = count % STAGES
                phase = (count // STAGES & 1) ^ 1
                one = k_ready.index(stage)
                mbarrier.wait(k_free.index(stage), phase)
                mbarrier.expect(one, N * (D + R) * 2)
                tma.async_copy_global_to_shared(key, [first + start, 0], one, keys.index(stage))
                tma.async_copy_global_to_shared(
                    rotated, [begin + start, 0], one, rotaries.index(stage)
                )
                mbarrier.wait(v_free.index(stage), phase)
                mbarrier.expect(v_ready.index(stage), N * D * 2)
                tma.async_copy_global_to_shared(
                    value, [first + start, 0], v_ready.index(stage), values.index(stage)
                )
                count += 1


@gluon.jit
def _scores(own, rotary, keys, rotaries, stage, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Starts the scores of a tile of positions."""
    b_s = gl.zeros([QUERIES, N], gl.float32, LAYOUT)
    b_s = warpgroup_mma(own, keys.index(stage).permute((1, 0)), b_s, use_acc=False, is_async=True)
    return warpgroup_mma(rotary, rotaries.index(stage).permute((1, 0)), b_s, is_async=True)


@gluon.jit
def _weigh(b_s, b_max, factor, b_position, start, MASKED: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights of scores against a new maximum, what the old sums shrink by, and the maximum."""
    if MASKED:
        o_n = start + gl.arange(0, b_s.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        b_s = gl.where(o_n[None, :] <= b_position[:, None], b_s, float("-inf"))
    return softmax_weights(b_s, b_max, factor, MASKED, 1)


@gluon.jit
def _step(
    b_acc, b_p, b_max, b_sum, count, start, own, rotary, keys, rotaries, values, k_ready, k_free,
    v_ready, v_free, b_position, factor, STAGES: gl.constexpr, MASKED: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Starts the scores of the positions from `start`, weighs the values of those before with
    `b_p`, and makes the weights of the new ones meanwhile."""
    stage = count % STAGES
    mbarrier.wait(k_ready.index(stage), count // STAGES & 1)
    scores = _scores(own, rotary, keys, rotaries, stage, N, S_LAYOUT)
    before = (count - 1) % STAGES
    mbarrier.wait(v_ready.index(before), (count - 1) // STAGES & 1)
    weighed = warpgroup_mma(b_p, values.index(before), b_acc, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=[scores])
    b_next, b_shrink, b_max = _weigh(b_s, b_max, factor, b_position, start, MASKED, S_LAYOUT)
    b_sum = b_sum * b_shrink + gl.sum(b_next, axis=1)
    thread_barrier()
    mbarrier.arrive(k_free.index(stage), count=1)
    b_acc = warpgroup_mma_wait(0, deps=[weighed])
    thread_barrier()
    mbarrier.arrive(v_free.index(before), count=1)
    b_acc = b_acc * gl.convert_layout(b_shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    b_p = gl.convert_layout(b_next.to(b_p.dtype), P_LAYOUT)
    return b_acc, b_p, b_max, b_sum


@gluon.jit
def _attend(
    HALF: gl.constexpr, q, q_rotated, out, tiles, owns, rotary_queries, keys, rotaries, values,
    k_ready, k_free, v_ready, v_free, q_token_stride, q_head_stride, rotated_token_stride,
    rotated_head_stride, factor, HEADS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attends for one half of every tile's queries."""
    D: gl.constexpr = owns.shape[2]
    R: gl.constexpr = rotary_queries.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    SHORT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (R // 8), R // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = owns.dtype
    o_m = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, ROW))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, ROW))
    o_s = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, SHORT))
    o_r = gl.arange(0, R, layout=gl.SliceLayout(0, SHORT))
    o_query = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, S_LAYOUT))
    own, rotary = owns.index(HALF), rotary_queries.index(HALF)
    items = gl.load(tiles) * HEADS
    count = 0
    for i_round in range(0, gl.cdiv(items, gl.num_programs(0))):
        i_item = item_of(i_round)
        if i_item < items:
            i_head = i_item % HEADS
            p_tile = tiles + (i_item // HEADS + 1) * 8
            token = gl.load(p_tile + 1).to(gl.int64) + HALF * QUERIES
            num_queries = gl.load(p_tile + 2) - HALF * QUERIES
            lowest = gl.load(p_tile + 3) + HALF * QUERIES
            end = gl.load(p_tile + 5)
            num_tiles = gl.cdiv(end, N)

            p_q = q + (token + o_m) * q_token_stride + i_head * q_head_stride
            m_m = (o_m < num_queries)[:, None]
            own.store(gl.load(p_q[:, None] + o_d[None, :], mask=m_m, other=0.0))
            p_r = q_rotated + (token + o_s) * rotated_token_stride + i_head * rotated_head_stride
            m_s = (o_s < num_queries)[:, None]
            rotary.store(gl.load(p_r[:, None] + o_r[None, :], mask=m_s, other=0.0))
            fence_async_shared()
            thread_barrier()

            b_position = gl.minimum(lowest + o_query, end - 1)
            start = (num_tiles - 1) * N
            stage = count % STAGES
            mbarrier.wait(k_ready.index(stage), count // STAGES & 1)
            scores = _scores(own, rotary, keys, rotaries, stage, N, S_LAYOUT)
            b_s = warpgroup_mma_wait(0, deps=[scores])
            thread_barrier()
            mbarrier.arrive(k_free.index(stage), count=1)
            b_max = gl.full([QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
            b_w, _, b_max = _weigh(b_s, b_max, factor, b_position, start, True, S_LAYOUT)
            b_sum = gl.sum(b_w, axis=1)
            b_p = gl.convert_layout(b_w.to(dtype), P_LAYOUT)
            b_acc = gl.zeros([QUERIES, D], gl.float32, O_LAYOUT)
            count += 1

            seen_by_all = gl.minimum((lowest + 1) // N, num_tiles - 1)
            for i_tile in range(1, num_tiles - seen_by_all):
                b_acc, b_p, b_max, b_sum = _step(
                    b_acc, b_p, b_max, b_sum, count, start - i_tile * N, own, rotary, keys,
                    rotaries, values, k_ready, k_free, v_ready, v_free, b_position, factor, STAGES,
                    True, S_LAYOUT, O_LAYOUT, P_LAYOUT, N,
                )  # fmt: skip
                count += 1
            for _ in range(0, seen_by_all):
                b_acc, b_p, b_max, b_sum = _step(
                    b_acc, b_p, b_max, b_sum, count, 0, own, rotary, keys, rotaries, values,
                    k_ready, k_free, v_ready, v_free, b_position, factor, STAGES, False,
                    S_LAYOUT, O_LAYOUT, P_LAYOUT, N,
                )  # fmt: skip
                count += 1

            before = (count - 1) % STAGES
            mbarrier.wait(v_ready.index(before), (count - 1) // STAGES & 1)
            weighed = warpgroup_mma(b_p, values.index(before), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(0, deps=[weighed])
            thread_barrier()
            mbarrier.arrive(v_free.index(before), count=1)
            b_total = gl.convert_layout(b_sum, gl.SliceLayout(1, O_LAYOUT))
            own.store((b_acc / b_total[:, None]).to(dtype))
            thread_barrier()
            p_out = out + ((token + o_m) * HEADS + i_head) * D
            gl.store(p_out[:, None] + o_d[None, :], own.load(ROW), mask=m_m)
            thread_barrier()


@gluon.jit(do_not_specialize=["num_positions"])
def expanded_kernel(
    key, rotated, value, q, q_rotated, out, tiles, begins, num_positions, q_token_stride,
    q_head_stride, rotated_token_stride, rotated_head_stride, factor, HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Descriptors: `key`, `value` [H S, D] in blocks [N, D], `rotated` [S, R] in blocks [N, R];
    `begins` [R]: a row's first position among S; `factor`: scale * log2(e)."""
    N: gl.constexpr = key.block_shape[0]
    D: gl.constexpr = key.block_shape[1]
    R: gl.constexpr = rotated.block_shape[1]
    keys = gl.allocate_shared_memory(key.dtype, [STAGES, N, D], key.layout)
    rotaries = gl.allocate_shared_memory(key.dtype, [STAGES, N, R], rotated.layout)
    values = gl.allocate_shared_memory(key.dtype, [STAGES, N, D], value.layout)
    owns = gl.allocate_shared_memory(key.dtype, [2, QUERIES, D], key.layout)
    rotary_queries = gl.allocate_shared_memory(key.dtype, [2, QUERIES, R], rotated.layout)
    k_ready, k_free, v_ready, v_free = barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    gl.constexpr(0), q, q_rotated, out, tiles, owns, rotary_queries, keys, rotaries,
                    values, k_ready, k_free, v_ready, v_free, q_token_stride, q_head_stride,
                    rotated_token_stride, rotated_head_stride, factor, HEADS, N, STAGES,
                ),
            ),
            (
                _attend,
                (
                    gl.constexpr(1), q, q_rotated, out, tiles, owns, rotary_queries, keys, rotaries,
                    values, k_ready, k_free, v_ready, v_free, q_token_stride, q_head_stride,
                    rotated_token_stride, rotated_head_stride, factor, HEADS, N, STAGES,
                ),
            ),
            (
                _fetch,
                (
                    key, rotated, value, tiles, begins, num_positions, keys, rotaries, values,
                    k_ready, k_free, v_ready, v_free, HEADS, N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
