"""Random blocks of every coding, as a checkpoint holds them, for tests against the `gguf` library."""

from __future__ import annotations

import gguf
import numpy as np

from headrace.back.kernels.linear_blocks.layout import CODINGS

# Where the float16 scale (and minimum) of a block stand.
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
             "Q4_1": (0, 2), "Q5_1": (0, 2)}  # fmt: skip


def random_blocks(coding: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes]: every bit random but those of the float16 scales, which are of either sign and finite."""
    random = np.random.default_rng(seed)
    block, size = CODINGS[coding].block, CODINGS[coding].size
    raw = random.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    for at in SCALES_AT.get(coding, (0,)):
        scale = (random.standard_normal((rows, inputs // block, 1)) / 64).astype(np.float16)
        raw[:, :, at : at + 2] = scale.view(np.uint8)
    return raw.reshape(rows, -1)


def widened(coding: str, raw: np.ndarray) -> np.ndarray:
    """float32 [rows, inputs] by the `gguf` library."""
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[coding])
