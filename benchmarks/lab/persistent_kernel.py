"""A decode step of one row as one kernel: persistent programs walk through all layers and wait for each
other at barriers. What it takes beside the recorded step: persistent_decode.py.

There is a program on each of 128 multiprocessors. What a program reads of a layer's weights is the same in every step
and fits its registers: it asks for the weights of the next phase before it waits, so that memory works through the
barrier (`EARLY`), and for those behind them into the second-level cache (`AHEAD`). A layer has these phases, with a
barrier behind each:

    qkv         norm, and 32 outputs of the projection a program
    attention   norm and rotation of queries and the new key, write of the new key and value. A short context: a program
                attends with one head to all of it, as do others with the same head, and multiplies what comes with its
                rows of the output projection, added into the residual by atomics: no barrier between. A long one: a
                program takes a KV head of one split of the context
    output      of a long context: splits merged, output projection
    gate_up     norm, gate and up of 24 inner values a program, activation
    down        8 outputs a program

The residual is float32, before and behind attention in two vectors. Sums by atomics come in any order, so that two runs
differ in the last bits. A form that also added the down projection by atomics, 128 programs to each output, which
spares its barrier, and loaded what rotates heads behind the barrier, took 880 us a step on an H200; this takes 609.

A program that waits for too long stops the kernel by a trap. The phases can be launched one by one without barriers
(`first`, `last`), which is how the interpreter runs them (tests/kernels/triton/test_persistent.py).

E width, H query heads, K KV heads, D head_dim, I inner width, V vocabulary, P programs, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from headrace.back.kernels.triton.grid import prefetch
from headrace.back.kernels.triton.wrap import interpreted

PROGRAMS, WARPS = 128, 8
LONG = 256
"""Positions from which on a context is cut into splits."""
SPLITS = 16
PHASES = ("first row", "qkv", "attention", "output", "gate_up", "down", "head", "token")


@triton.jit
def _arrive(counter, BARRIER: tl.constexpr):
    """Everything this program has written counts as seen by whoever waits behind it."""
    if BARRIER:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
            "@p red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0; }",
            "=r,l", [counter.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _wait(counter, until, BARRIER: tl.constexpr):
    """Until so many have arrived; 4 million polls, seconds, are too many."""
    if BARRIER:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t, v, n; mov.u32 n, 0; mov.u32 t, %tid.x; "
            "setp.ne.u32 p, t, 0; @p bra DONE; "
            "AGAIN: ld.acquire.gpu.global.u32 v, [$1]; setp.ge.u32 p, v, $2; @p bra DONE; "
            "add.u32 n, n, 1; setp.lt.u32 p, n, 4194304; @p bra AGAIN; trap; "
            "DONE: mov.u32 $0, 0; }",
            "=r,l,r", [counter.to(tl.int64), until], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def _with(b_tiles, b_tile):
    """One more."""
    return b_tiles + (b_tile,)  # noqa: RUF005  Triton's compiler does not know unpacking


@triton.jit
def _held(b_tiles, COUNT: tl.constexpr, BARRIER: tl.constexpr):
    """Weights as they came, in 16 bits: else the compiler makes float32 of them before the wait, for which there are
    not enough registers."""
    b_held = ()
    for i in tl.static_range(COUNT):
        if BARRIER:
            b_tile = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [b_tiles[i]], dtype=b_tiles[i].dtype, is_pure=False,
                pack=2,
            )  # fmt: skip
            b_held = _with(b_held, b_tile)
        else:
            b_held = _with(b_held, b_tiles[i])
    return b_held


@triton.jit
def _tiles(p_rows, ROWS: tl.constexpr, E: tl.constexpr, QUARTER: tl.constexpr):
    """Weights of rows one after the other, in tiles of 8 rows and a part of their width E: each warp has a row of a
    tile, so that sums over a row stay inside it."""
    o = tl.arange(0, 8)[:, None] * E + tl.arange(0, QUARTER)[None, :]
    b_tiles = ()
    for t in tl.static_range(ROWS // 8):
        for c in tl.static_range(E // QUARTER):
            b_tiles = _with(b_tiles, tl.load(p_rows + (t * 8 * E + c * QUARTER) + o))
    return b_tiles


@triton.jit
def _vector(p_x, E: tl.constexpr, QUARTER: tl.constexpr):
    """A vector as such tiles, the same in every row."""
    o = tl.arange(0, 8)[:, None] * 0 + tl.arange(0, QUARTER)[None, :]
    b_x = ()
    for c in tl.static_range(E // QUARTER):
        b_x = _with(b_x, tl.load(p_x + c * QUARTER + o).to(tl.float32))
    return b_x


@triton.jit
def _normed(p_x, p_weight, eps, E: tl.constexpr):
    """x times the norm's weight, and 1 / rms(x) of each row of a tile."""
    b_x, b_weight = _vector(p_x, E, E // 4), _vector(p_weight, E, E // 4)
    b_squares = b_x[0] * b_x[0]
    b_scaled = (b_x[0] * b_weight[0],)
    for c in tl.static_range(1, 4):
        b_squares += b_x[c] * b_x[c]
        b_scaled = _with(b_scaled, b_x[c] * b_weight[c])
    return b_scaled, tl.rsqrt(tl.sum(b_squares, axis=1) / E + eps)


@triton.jit
def _products(b_tiles, b_x, t: tl.constexpr, PARTS: tl.constexpr):
    """The t-th 8 rows of weights times x."""
    b_sum = b_tiles[PARTS * t].to(tl.float32) * b_x[0]
    for c in tl.static_range(1, PARTS):
        b_sum += b_tiles[PARTS * t + c].to(tl.float32) * b_x[c]
    return tl.sum(b_sum, axis=1)


@triton.jit
def _rotation(p_weight, p_table, D: tl.constexpr):
    """What norm and rotation of a head multiply with: of each value, and of the other one of its pair."""
    HALF: tl.constexpr = D // 2
    o = tl.arange(0, D)
    b_own = tl.load(p_weight + o) * tl.load(p_table + o % HALF)
    b_sin = tl.load(p_table + HALF + o % HALF)
    return b_own, tl.load(p_weight + (o + HALF) % D) * tl.where(o < HALF, -b_sin, b_sin)


@triton.jit
def _head(b, b_pair, b_own, b_other, eps, D: tl.constexpr):
    """A head [D], normed and rotated."""
    return (b * b_own + b_pair * b_other) * tl.rsqrt(tl.sum(b * b, axis=0) / D + eps)


@triton.jit
def _cached(
    p_kv, table, begin, end, block_stride, POSITIONS: tl.constexpr, TILES: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Keys or values [POSITIONS, D] of a head in TILES tiles."""
    o_d = tl.arange(0, D)[None, :]
    b_tiles = ()
    for i in tl.static_range(TILES):
        o = begin + i * POSITIONS + tl.arange(0, POSITIONS)
        b_block = tl.load(table + o // 16, mask=o < end, other=0)
        o_kv = (b_block * block_stride + o % 16 * D)[:, None] + o_d
        b_tiles = _with(b_tiles, tl.load(p_kv + o_kv, mask=(o < end)[:, None], other=0.0))
    return b_tiles


@triton.jit
def _attended(
    b_q, b_keys, b_values, begin, end, b_max, b_sum, b_out, POSITIONS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Adds positions [begin, end) to a softmax that has begun. b_q has its scale."""
    for i in tl.static_range(TILES):
        o = begin + i * POSITIONS + tl.arange(0, POSITIONS)
        b_score = tl.sum(b_keys[i].to(tl.float32) * b_q[None, :], axis=1)
        b_score = tl.where(o < end, b_score, float("-inf"))
        b_top = tl.maximum(b_max, tl.max(b_score, axis=0))
        b_weight = tl.exp(b_score - b_top)
        b_shrunk = tl.exp(b_max - b_top)
        b_sum = b_sum * b_shrunk + tl.sum(b_weight, axis=0)
        b_out = b_out * b_shrunk + tl.sum(b_weight[:, None] * b_values[i].to(tl.float32), axis=0)
        b_max = b_top
    return b_max, b_sum, b_out


@triton.jit
def _ask(p_begin, VALUES: tl.constexpr, AHEAD: tl.constexpr):
    """Asks for so many values of two bytes, one after the other, into the second-level cache."""
    if AHEAD:
        for i in tl.static_range((VALUES + 256 * 64 - 1) // (256 * 64)):
            o = i * 256 * 64 + tl.arange(0, 256) * 64
            prefetch(p_begin + tl.minimum(o, VALUES - 64))


@triton.jit(do_not_specialize=["first_layer", "last_layer"])
def decode_kernel(
    embedding,
    input_norm,
    qkv_weight,
    q_norm,
    k_norm,
    o_weight,
    mlp_norm,
    gate_up_weight,
    down_weight,
    final_norm,
    head_weight,
    rope,
    kv,
    table,
    kv_len,
    token,
    x,
    qkv,
    inner,
    parts,
    scores,
    best,
    logits,
    counter,
    eps,
    scale,
    rope_stride,
    layer_stride,
    block_stride,
    first_layer,
    last_layer,
    LAYERS: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    SPLITS: tl.constexpr,
    POSITIONS: tl.constexpr,
    TILES: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BARRIER: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (P). `token` int64 [1] is read and written; kv [L, blocks, 2, K, 16, D], `kv_len` int32 [1] with the new
    token; `counter` int32 [1] is 0 between launches."""
    p = tl.program_id(0)
    C: tl.constexpr = (H + 2 * K) * D
    GROUP: tl.constexpr = H // K
    OUTPUTS: tl.constexpr = C // P
    INNER: tl.constexpr = I // P
    ROWS: tl.constexpr = E // (P // H)
    OUT: tl.constexpr = E // P
    QUARTER: tl.constexpr = E // 4
    SPLIT: tl.constexpr = SPLITS > 1
    BARRIERS: tl.constexpr = 5 if SPLIT else 4
    o_e = tl.arange(0, E)
    o_d = tl.arange(0, D)
    o_pair = (o_d + D // 2) % D
    o_8 = tl.arange(0, 8)
    x_mid = x + E
    position = tl.load(kv_len) - 1
    p_rope = rope + position * rope_stride

    if FIRST == 0:
        if p == 0:
            p_row = embedding + tl.load(token) * E
            tl.store(x + o_e, tl.load(p_row + o_e).to(tl.float32))
        _arrive(counter, BARRIER)

    # Of the output projection a program has the columns of one head, and these rows.
    g = p % H
    o_row = p // H * ROWS + tl.arange(0, ROWS)
    o_output = o_row[:, None] * (H * D) + g * D + o_d[None, :]
    # In attention it has this KV head, and of a long context this split.
    if SPLIT:
        kv_head = p % K
        split = p // K
        length = tl.cdiv(position, SPLITS)
        begin = split * length
        end = tl.minimum(begin + length, position)
        has_new = split == 0
        writes = split == 0
        HEADS_HERE: tl.constexpr = GROUP
        first_head = kv_head * GROUP
    else:
        kv_head = g // GROUP
        begin = 0
        end = position
        has_new = True
        writes = (p < H) & (g % GROUP == 0)
        HEADS_HERE: tl.constexpr = 1
        first_head = g

    for i_layer in range(first_layer, last_layer):
        passed = 1 + i_layer * BARRIERS
        p_qkv = qkv_weight + (i_layer * C + p * OUTPUTS) * E
        p_o = o_weight + i_layer * E * H * D + o_output
        p_gate = gate_up_weight + (i_layer * 2 * I + p * INNER) * E
        p_up = p_gate + I * E
        p_down = down_weight + (i_layer * E + p * OUT) * I
        p_keys = kv + tl.cast(i_layer, tl.int64) * layer_stride + kv_head * 16 * D
        p_values = p_keys + K * 16 * D

        if FIRST <= 1 and LAST >= 1:
            if EARLY:
                b_qkv = _tiles(p_qkv, OUTPUTS, E, QUARTER)
            _ask(o_weight + (i_layer * E + p * (E // P)) * H * D, E // P * H * D, AHEAD)
            _wait(counter, passed * P, BARRIER)
            if not EARLY:
                b_qkv = _tiles(p_qkv, OUTPUTS, E, QUARTER)
            b_qkv = _held(b_qkv, OUTPUTS // 2, BARRIER)
            b_x, b_scale = _normed(x, input_norm + i_layer * E, eps, E)
            o_t = tl.arange(0, OUTPUTS // 8)[None, :]
            b_y = tl.zeros([8, OUTPUTS // 8], tl.float32)
            for t in tl.static_range(OUTPUTS // 8):
                b_one = _products(b_qkv, b_x, t, 4) * b_scale
                b_y = tl.where(o_t == t, b_one[:, None], b_y)
            tl.store(qkv + p * OUTPUTS + o_t * 8 + o_8[:, None], b_y)
            if p == 2 % P:
                tl.store(x_mid + o_e, tl.zeros([E], tl.float32))
            _arrive(counter, BARRIER)

        if FIRST <= 2 and LAST >= 2:
            if EARLY:
                if not SPLIT:
                    b_o = tl.load(p_o)
                b_keys = _cached(p_keys, table, begin, end, block_stride, POSITIONS, TILES, D)
                b_values = _cached(p_values, table, begin, end, block_stride, POSITIONS, TILES, D)
            _ask(p_gate, INNER * E, AHEAD)
            _ask(p_up, INNER * E, AHEAD)
            k_own, k_other = _rotation(k_norm + i_layer * D, p_rope, D)
            q_own, q_other = _rotation(q_norm + i_layer * D, p_rope, D)
            _wait(counter, (passed + 1) * P, BARRIER)
            if not EARLY:
                if not SPLIT:
                    b_o = tl.load(p_o)
                b_keys = _cached(p_keys, table, begin, end, block_stride, POSITIONS, TILES, D)
                b_values = _cached(p_values, table, begin, end, block_stride, POSITIONS, TILES, D)
            b_keys = _held(b_keys, TILES, BARRIER)
            b_values = _held(b_values, TILES, BARRIER)
            if not SPLIT:
                b_outputs = _held((b_o,), 1, BARRIER)
            p_k = qkv + (H + kv_head) * D
            b_k, b_k_pair = tl.load(p_k + o_d), tl.load(p_k + o_pair)
            b_v = tl.load(p_k + K * D + o_d).to(kv.dtype.element_ty)
            b_heads = ()
            for h in tl.static_range(HEADS_HERE):
                b_heads = _with(b_heads, tl.load(qkv + (first_head + h) * D + o_d))
                b_heads = _with(b_heads, tl.load(qkv + (first_head + h) * D + o_pair))
            b_k = _head(b_k, b_k_pair, k_own, k_other, eps, D).to(kv.dtype.element_ty)
            if writes:
                o_new = tl.load(table + position // 16) * block_stride + position % 16 * D + o_d
                tl.store(p_keys + o_new, b_k)
                tl.store(p_values + o_new, b_v)
            for h in tl.static_range(HEADS_HERE):
                b_q = _head(b_heads[2 * h], b_heads[2 * h + 1], q_own, q_other, eps, D) * scale
                b_new = tl.sum(b_q * b_k.to(tl.float32), axis=0)
                b_max, b_sum, b_out = _attended(
                    b_q, b_keys, b_values, begin, end,
                    tl.where(has_new, b_new, -1e30), tl.where(has_new, 1.0, 0.0),
                    tl.where(has_new, b_v.to(tl.float32), 0.0), POSITIONS, TILES,
                )  # fmt: skip
                if SPLIT:
                    i_part = split * H + first_head + h
                    tl.store(parts + i_part * D + o_d, b_out)
                    tl.store(scores + 2 * i_part, b_max)
                    tl.store(scores + 2 * i_part + 1, b_sum)
                else:
                    b_y = tl.sum(b_outputs[0].to(tl.float32) * (b_out / b_sum)[None, :], axis=1)
                    b_y += tl.load(x + o_row, mask=(o_row >= 0) & (g == 0), other=0.0)
                    tl.atomic_add(x_mid + o_row, b_y, sem="relaxed")
            _arrive(counter, BARRIER)

        if SPLIT:  # noqa: SIM102  a constant of the compiler
            if FIRST <= 3 and LAST >= 3:
                if EARLY:
                    b_o = tl.load(p_o)
                _wait(counter, (passed + 2) * P, BARRIER)
                if not EARLY:
                    b_o = tl.load(p_o)
                o_part = tl.arange(0, SPLITS) * H + g
                b_max = tl.load(scores + 2 * o_part)
                b_share = tl.exp(b_max - tl.max(b_max, axis=0))
                b_sum = tl.sum(tl.load(scores + 2 * o_part + 1) * b_share, axis=0)
                b_parts = tl.load(parts + o_part[:, None] * D + o_d[None, :])
                b_out = tl.sum(b_parts * b_share[:, None], axis=0) / b_sum
                b_outputs = _held((b_o,), 1, BARRIER)
                b_y = tl.sum(b_outputs[0].to(tl.float32) * b_out[None, :], axis=1)
                b_y += tl.load(x + o_row, mask=(o_row >= 0) & (g == 0), other=0.0)
                tl.atomic_add(x_mid + o_row, b_y, sem="relaxed")
                _arrive(counter, BARRIER)

        if FIRST <= 4 and LAST >= 4:
            if EARLY:
                b_gate = _tiles(p_gate, INNER, E, QUARTER)
                b_up = _tiles(p_up, INNER, E, QUARTER)
            _ask(p_down, OUT * I, AHEAD)
            _wait(counter, (passed + BARRIERS - 2) * P, BARRIER)
            if not EARLY:
                b_gate = _tiles(p_gate, INNER, E, QUARTER)
                b_up = _tiles(p_up, INNER, E, QUARTER)
            b_gate = _held(b_gate, INNER // 2, BARRIER)
            b_up = _held(b_up, INNER // 2, BARRIER)
            b_x, b_scale = _normed(x_mid, mlp_norm + i_layer * E, eps, E)
            for t in tl.static_range(INNER // 8):
                b_g = _products(b_gate, b_x, t, 4) * b_scale
                b_y = b_g / (1.0 + tl.exp(-b_g)) * _products(b_up, b_x, t, 4) * b_scale
                tl.store(inner + p * INNER + t * 8 + o_8, b_y)
            _arrive(counter, BARRIER)

        if FIRST <= 5 and LAST >= 5:
            if EARLY:
                b_down = _tiles(p_down, OUT, I, QUARTER)
            if i_layer + 1 < LAYERS:
                _ask(p_qkv + C * E, OUTPUTS * E, AHEAD)
            _wait(counter, (passed + BARRIERS - 1) * P, BARRIER)
            if not EARLY:
                b_down = _tiles(p_down, OUT, I, QUARTER)
            b_down = _held(b_down, OUT // 8 * (I // QUARTER), BARRIER)
            b_x = _vector(inner, I, QUARTER)
            for t in tl.static_range(OUT // 8):
                o_out = p * OUT + t * 8 + o_8
                b_y = _products(b_down, b_x, t, I // QUARTER) + tl.load(x_mid + o_out)
                tl.store(x + o_out, b_y)
            _arrive(counter, BARRIER)

    HEAD_ROWS: tl.constexpr = 32
    if FIRST <= 6 and LAST >= 6:
        _ask(head_weight + p * HEAD_ROWS * E, HEAD_ROWS * E, AHEAD)
        _ask(head_weight + (p + P) * HEAD_ROWS * E, HEAD_ROWS * E, AHEAD)
        _wait(counter, (1 + LAYERS * BARRIERS) * P, BARRIER)
        b_x, b_scale = _normed(x, final_norm, eps, E)
        b_top = tl.full([8, 4], float("-inf"), tl.float32)
        b_row = tl.zeros([8, 4], tl.int32)
        o = o_8[:, None] * E + tl.arange(0, QUARTER)[None, :]
        o_t = tl.arange(0, 4)[None, :]
        for i in tl.range(p, tl.cdiv(V, HEAD_ROWS), P, num_stages=STAGES):
            b_logit = tl.zeros([8, 4], tl.float32)
            for t in tl.static_range(4):
                row = i * HEAD_ROWS + 8 * t
                m = (row + o_8)[:, None] < V
                b_sum = (
                    tl.load(head_weight + row * E + o, mask=m, other=0.0).to(tl.float32) * b_x[0]
                )
                for c in tl.static_range(1, 4):
                    p_tile = head_weight + row * E + c * QUARTER + o
                    b_sum += tl.load(p_tile, mask=m, other=0.0).to(tl.float32) * b_x[c]
                b_logit = tl.where(o_t == t, (tl.sum(b_sum, axis=1) * b_scale)[:, None], b_logit)
            o_row_t = i * HEAD_ROWS + o_t * 8 + o_8[:, None]
            b_logit = tl.where(o_row_t < V, b_logit, float("-inf"))
            tl.store(logits + o_row_t, b_logit, mask=o_row_t < V)
            b_row = tl.where(b_logit > b_top, o_row_t, b_row)
            b_top = tl.maximum(b_logit, b_top)
        top = tl.max(tl.max(b_top, axis=1), axis=0)
        b_first = tl.min(tl.where(b_top == top, b_row, V), axis=1)
        tl.store(best + 2 * p, top)
        tl.store(best + 2 * p + 1, tl.min(b_first, axis=0).to(tl.float32, bitcast=True))
        _arrive(counter, BARRIER)

    if LAST >= 7:  # noqa: SIM102  a constant of the compiler around a value of the device
        if p == 0:
            _wait(counter, (2 + LAYERS * BARRIERS) * P, BARRIER)
            o_p = tl.arange(0, P)
            b_tops = tl.load(best + 2 * o_p)
            b_rows = tl.load(best + 2 * o_p + 1).to(tl.int32, bitcast=True)
            i_best = tl.min(tl.where(b_tops == tl.max(b_tops, axis=0), b_rows, V), axis=0)
            tl.store(token, i_best.to(tl.int64))
            if BARRIER:
                tl.store(counter, 0)


@triton.jit
def barriers_kernel(counter, COUNT: tl.constexpr, P: tl.constexpr):
    """Grid (P): what so many barriers take alone."""
    for i in range(COUNT):
        _arrive(counter, True)
        _wait(counter, (i + 1) * P, True)
    _arrive(counter, True)
    if tl.program_id(0) == 0:
        _wait(counter, (COUNT + 1) * P, True)
        tl.store(counter, 0)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a model, and how its step is divided. `splits` of the context, of `tiles` tiles of
    `positions` each: a split is no longer than these."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    programs: int = PROGRAMS
    splits: int = 1
    positions: int = 128
    tiles: int = 1

    def __post_init__(self) -> None:
        outputs = (self.heads + 2 * self.kv_heads) * self.head_dim
        divided = (outputs, self.inner, self.width)
        assert not any(size % (8 * self.programs) for size in divided), self
        assert self.programs % self.heads == 0 and self.inner % (self.width // 4) == 0, self
        assert self.splits == 1 or self.splits * self.kv_heads == self.programs, self

    def of_context(self, length: int) -> Sizes:
        """Divided for a context of so many tokens."""
        splits = 1 if length <= LONG else self.programs // self.kv_heads
        of_split = -(-(length - 1) // splits)
        return replace(self, splits=splits, tiles=max(1, -(-of_split // self.positions)))


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """Layers stacked: embedding and head [V, E], norms float32 [L, E] or [L, D], qkv [L, (H + 2 K) D, E],
    o [L, E, H D], gate_up [L, 2 I, E], down [L, E, I]."""

    embedding: torch.Tensor
    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    final_norm: torch.Tensor
    head: torch.Tensor


class PersistentDecoder:
    """The kernel with its scratch. kv [L, blocks, 2, K, 16, D], table int32 [blocks of the row], kv_len int32 [1], rope
    float32 [positions, D], cosines before sines."""

    def __init__(
        self,
        sizes: Sizes,
        weights: DecoderWeights,
        *,
        kv: torch.Tensor,
        table: torch.Tensor,
        kv_len: torch.Tensor,
        rope: torch.Tensor,
        eps: float = 1e-6,
    ) -> None:
        device = kv.device
        new = {"dtype": torch.float32, "device": device}
        outputs = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.sizes, self.weights = sizes, weights
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.x = torch.zeros(2, sizes.width, **new)
        self.qkv = torch.zeros(outputs, **new)
        self.inner = torch.zeros(sizes.inner, **new)
        self.parts = torch.zeros(sizes.splits, sizes.heads, sizes.head_dim, **new)
        self.scores = torch.zeros(sizes.splits, sizes.heads, 2, **new)
        self.logits = torch.zeros(sizes.vocabulary, **new)
        best = torch.zeros(sizes.programs, 2, **new)
        counter = torch.zeros(1, dtype=torch.int32, device=device)
        assert kv.is_contiguous() and table.is_contiguous(), (kv.stride(), table.stride())
        self._counter = counter
        self._arguments = (
            *vars(weights).values(), rope, kv, table, kv_len, self.token, self.x, self.qkv,
            self.inner, self.parts, self.scores, best, self.logits, counter, eps, sizes.head_dim**-0.5,
            rope.stride(0), kv.stride(0), kv.stride(1),
        )  # fmt: skip

    def launch(
        self,
        *,
        first: int = 0,
        last: int = len(PHASES) - 1,
        layers: tuple[int, int] | None = None,
        early: bool = True,
        ahead: bool = True,
        stages: int = 3,
        warps: int = WARPS,
    ) -> torch.Tensor:
        """All phases, or some of them without barriers between, of some layers; the token."""
        sizes = self.sizes
        whole = (first, last, layers) == (0, len(PHASES) - 1, None) and not interpreted()
        begin, end = layers or (0, sizes.layers)
        decode_kernel[(sizes.programs,)](
            *self._arguments, begin, end, LAYERS=sizes.layers, E=sizes.width, H=sizes.heads,
            K=sizes.kv_heads, D=sizes.head_dim, I=sizes.inner, V=sizes.vocabulary,
            P=sizes.programs, SPLITS=sizes.splits, POSITIONS=sizes.positions, TILES=sizes.tiles,
            FIRST=first, LAST=last, BARRIER=whole, EARLY=early,
            AHEAD=ahead and not interpreted(), STAGES=stages, num_warps=warps,
            **({"launch_cooperative_grid": True} if whole else {}),
        )  # fmt: skip
        return self.token

    def launch_barriers(self) -> torch.Tensor:
        """The barriers of a step alone."""
        sizes = self.sizes
        count = 2 + sizes.layers * (4 if sizes.splits == 1 else 5)
        barriers_kernel[(sizes.programs,)](
            self._counter, COUNT=count, P=sizes.programs, num_warps=WARPS,
            launch_cooperative_grid=True,
        )  # fmt: skip
        return self._counter

    def launch_head(self) -> torch.Tensor:
        """The head alone."""
        return self.launch(first=6, last=6, layers=(0, 0))

    def launch_phase(self, phase: int) -> torch.Tensor:
        """One phase of all layers, a launch for each."""
        for layer in range(self.sizes.layers):
            self.launch(first=phase, last=phase, layers=(layer, layer + 1))
        return self.x

    def launch_apart(self) -> torch.Tensor:
        """A launch for each phase of each layer."""
        self.launch(first=0, last=0, layers=(0, 0))
        for layer in range(self.sizes.layers):
            for phase in range(1, 6):
                self.launch(first=phase, last=phase, layers=(layer, layer + 1))
        for phase in (6, 7):
            self.launch(first=phase, last=phase, layers=(0, 0))
        return self.token
