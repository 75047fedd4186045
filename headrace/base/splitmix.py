"""SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): the hash
of small numbers used throughout headrace, modulo 2^64. `back/kernels/gumbel` implements it for
torch and in C++ too; tests hold them equal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GAMMA = 0x9E3779B97F4A7C15
M1 = 0xBF58476D1CE4E5B9
M2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1

U64 = npt.NDArray[np.uint64]


def mix(x: int) -> int:
    """The finaliser."""
    x &= MASK
    x = ((x ^ (x >> 30)) * M1) & MASK
    x = ((x ^ (x >> 27)) * M2) & MASK
    return x ^ (x >> 31)


def mix_all(x: U64) -> U64:
    """The finaliser of each number; `x` is left as it is."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(M1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(M2)
    x ^= x >> np.uint64(31)
    return x
