"""What queries see of a row, for the Gluon attention kernels, which cannot call triton_rows.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_seen(positions, WINDOW: gl.constexpr):
    """As that of triton_rows.py; WINDOW 0: there is none."""
    if WINDOW < 0:
        first = gl.maximum(positions, 0) // -WINDOW * -WINDOW
    elif WINDOW > 0:
        first = gl.maximum(positions - WINDOW + 1, 0)
    else:
        first = positions * 0
    return first


@gluon.jit
def seen_blocks(p_table, first, lowest, last, BLOCKS: gl.constexpr):
    """The cache's blocks of a tile, from a row's `first` on; those below `lowest`, which may have
    been given back, are that one, and those behind `last` that one."""
    blocks = ()
    for i in gl.static_range(BLOCKS):
        blocks += (gl.load(p_table + gl.maximum(gl.minimum(first + i, last), lowest)),)
    return blocks
