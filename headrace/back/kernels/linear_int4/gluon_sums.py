"""What becomes of a tile's sums in the kernels of triton_stream_int4.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headrace.back.kernels.triton.gluon import thread_barrier


@gluon.jit
def combined(
    b_y, b_u, partial, counters, i_program, i_tile, begin, o_tile, m_tile,
    STEPS: gl.constexpr, UNITS, PROGRAMS, PAIR: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """A tile's sums, and whether they are whole: where runs share it, for the last that comes.
    `partial` float32 [PROGRAMS, 2, PAIR, TILE]. No run ends within a tile of one block: there the
    compiler would see a branch that is never taken, on which Triton 3.6 fails. The sums of AT_ONCE
    programs are read at a time: one wait for all of them."""
    AT_ONCE: gl.constexpr = max(1, min(8, 4096 // (TILE * PAIR)))
    done = i_tile >= 0
    if STEPS > 1:
        owner = ((i_tile * STEPS + 1) * PROGRAMS - 1) // UNITS
        sharers = ((i_tile + 1) * STEPS * PROGRAMS - 1) // UNITS - owner + 1
        done = sharers == 1
        if sharers > 1:
            place = i_program * 2 + (begin <= i_tile * STEPS).to(gl.int32)
            p_mine = partial + place * (PAIR * TILE) + o_tile
            gl.store(p_mine, b_y, mask=m_tile)
            if PAIR == 2:
                gl.store(p_mine + TILE, b_u, mask=m_tile)
            thread_barrier()
            done = gl.atomic_add(counters + i_tile, 1, sem="acq_rel") == sharers - 1
            if done:
                gl.store(counters + i_tile, 0)
                b_y = gl.zeros_like(b_y)
                b_u = gl.zeros_like(b_u)
                for first in range(0, sharers, AT_ONCE):
                    ones = ()
                    for j in gl.static_range(AT_ONCE):
                        place = (owner + first + j) * 2 + (first + j == 0).to(gl.int32)
                        p_one = partial + place * (PAIR * TILE) + o_tile
                        m_one = m_tile & (first + j < sharers)
                        b_one = gl.load(p_one, mask=m_one, other=0.0, cache_modifier=".cg")
                        ones = ones + (b_one,)  # noqa: RUF005 - Triton unpacks no tuples
                        if PAIR == 2:
                            p_two = p_one + TILE
                            b_one = gl.load(p_two, mask=m_one, other=0.0, cache_modifier=".cg")
                            ones = ones + (b_one,)  # noqa: RUF005 - Triton unpacks no tuples
                    for j in gl.static_range(AT_ONCE):
                        b_y += ones[j * PAIR]
                        if PAIR == 2:
                            b_u += ones[j * PAIR + 1]
    return done, b_y, b_u


@gluon.jit
def silu_times(b_gate, b_up):
    """silu(gate) * up."""
    return b_gate / (1.0 + gl.exp(-b_gate)) * b_up
