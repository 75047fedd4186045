"""GGUF's types that are kept as numbers in groups, as those of other checkpoints: on CPUs, where no
kernels know their blocks (GPUs: gguf_int4.py, gpu_int8.py); NVFP4 on both.

N blocks, I inputs of a block, G groups of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.back.quant import gguf_vectors as vectors
from headrace.base.config.quantization import Numbers

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class KeptType:
    """`scheme` (scheme.py) holds its numbers, `group` of which share a scale. `unpack` takes uint8
    [N, bytes] and gives int8 values (of e2m1 numbers the bits) [N, I] and scales [N, G]."""

    scheme: str
    bits: int
    group: int
    unpack: Callable[[U8], vectors.WholeNumbers]

    @property
    def numbers(self) -> Numbers:
        return Numbers(arrangement="gguf", bits=self.bits, group=(1, self.group))


def _repeated(unpack: Callable[[U8], vectors.WholeNumbers]) -> Callable[[U8], vectors.WholeNumbers]:
    """With each scale for both halves of what shares it."""

    def both(blocks: U8) -> vectors.WholeNumbers:
        values, scales = unpack(blocks)
        return values, scales.repeat(2, 1)

    return both


def _nvfp4(blocks: U8) -> vectors.WholeNumbers:
    """Four runs of 16, the first eight in the low halves of their bytes."""
    halves = blocks[:, 4:].reshape(-1, 4, 8)
    bits = np.concatenate((halves & 15, halves >> 4), 2).reshape(len(blocks), -1)
    return bits.astype(np.int8), E4M3[blocks[:, :4]]


def _e4m3() -> F32:
    """Each e4m3 number, float32 [256]; signs do not count, as writers clear them, and what would
    be NaN without one is 0, as ggml has it."""
    exponents, parts = np.divmod(np.arange(256) % 128, 8)
    values = np.where(exponents == 0, parts * 2.0**-9, (1 + parts / 8) * 2.0 ** (exponents - 7))
    values[127] = 0.0
    return values.astype(np.float32)


E4M3 = _e4m3()
KEPT_TYPES = {
    "IQ1_S": KeptType(scheme="iq2", bits=8, group=16, unpack=_repeated(vectors.iq1_s)),
    "IQ1_M": KeptType(scheme="iq2", bits=8, group=16, unpack=vectors.iq1_m),
    "IQ2_XXS": KeptType(scheme="iq2", bits=8, group=16, unpack=_repeated(vectors.iq2_xxs)),
    "IQ2_XS": KeptType(scheme="iq2", bits=8, group=16, unpack=vectors.iq2_xs),
    "IQ2_S": KeptType(scheme="iq2", bits=8, group=16, unpack=vectors.iq2_s),
    "IQ3_XXS": KeptType(scheme="iq3-xxs", bits=8, group=32, unpack=vectors.iq3_xxs),
    "IQ3_S": KeptType(scheme="iq3-s", bits=8, group=32, unpack=vectors.iq3_s),
    "TQ1_0": KeptType(scheme="int4-g128", bits=4, group=128, unpack=_repeated(vectors.tq1_0)),
    "TQ2_0": KeptType(scheme="int4-g128", bits=4, group=128, unpack=_repeated(vectors.tq2_0)),
    "Q1_0": KeptType(scheme="int4-g128", bits=4, group=128, unpack=vectors.q1_0),
    "Q2_0": KeptType(scheme="int4-g64", bits=4, group=64, unpack=vectors.q2_0),
    "NVFP4": KeptType(scheme="nvfp4", bits=4, group=16, unpack=_nvfp4),
}
"""By name."""
