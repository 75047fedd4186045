"""Slopes of ALiBi (Press, Smith, Lewis 2022, "Train short, test long"): what a head takes off a
score for each position between key and query. The bias itself is the attention kernels'."""

from __future__ import annotations

import math

from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.shard import Part, Shard

LARGEST = 8.0
"""The negative logarithm, to base 2, of the smallest slope."""


def alibi_slopes(heads: int, *, largest: float = LARGEST) -> tuple[float, ...]:
    """One per head: 2^-(largest * i / P) for i = 1 .. P, P the next power of two; with fewer heads
    than P the even i first and then the odd ones."""
    most = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** -(largest * i / most) for i in range(1, most + 1)]
    ordered = slopes if most == heads else slopes[1::2] + slopes[::2]
    return tuple(ordered[:heads])


def local_slopes(slopes: tuple[float, ...], axis: Axis) -> tuple[float, ...]:
    """Those of this rank's heads."""
    if not slopes:
        return ()
    heads = Part("heads", len(slopes), len(slopes))
    (span,) = Shard(axis=axis.name, dim=0, parts=(heads,)).spans(axis)
    return slopes[span.start : span.start + span.size]
