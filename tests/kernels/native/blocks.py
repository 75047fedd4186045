"""Random blocks of every layout, as a checkpoint holds them, for tests against the `gguf` library."""

from __future__ import annotations

import gguf
import numpy as np

from headrace.back.kernels.linear_blocks.layout import STORED_LAYOUTS

# Where the float16 scale (and minimum) of a block stand.
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
             "Q4_1": (0, 2), "Q5_1": (0, 2)}  # fmt: skip


def random_blocks(layout: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes]: every bit random but those of the float16 scales, which are of either sign and finite."""
    random = np.random.default_rng(seed)
    block, size = STORED_LAYOUTS[layout].block, STORED_LAYOUTS[layout].size
    raw = random.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    if layout == "MXFP4":  # exponents
        raw[:, :, 0] = random.integers(112, 124, raw.shape[:2])
        return raw.reshape(rows, -1)
    for at in SCALES_AT.get(layout, (0,)):
        scale = (random.standard_normal((rows, inputs // block, 1)) / 64).astype(np.float16)
        raw[:, :, at : at + 2] = scale.view(np.uint8)
    return raw.reshape(rows, -1)


def dequantized(layout: str, raw: np.ndarray) -> np.ndarray:
    """float32 [rows, inputs] by the `gguf` library."""
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[layout])


def encode(layout: str, values: np.ndarray) -> np.ndarray:
    """float32 [rows, inputs] as blocks: by the `gguf` library where it can, else Q4_K and Q6_K by plain rounding
    (converters search for better scales)."""
    if layout not in ("Q4_K", "Q6_K"):
        raw: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType[layout])
        return raw
    blocks = values.astype(np.float32).reshape(-1, 256)
    packed = _encode_q4_k(blocks) if layout == "Q4_K" else _encode_q6_k(blocks)
    return packed.reshape(len(values), -1)


def _half_bytes(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _encode_q4_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    low = np.maximum(-groups.min(2), 0)
    scale = (groups.max(2) + low) / 15
    d = (scale.max(1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
    dmin = (low.max(1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
    s = np.clip(np.round(_divided(scale, d + 0 * scale)), 0, 63).astype(np.uint8)
    m = np.clip(np.round(_divided(low, dmin + 0 * low)), 0, 63).astype(np.uint8)
    step, offset = (d * s)[..., None], (dmin * m)[..., None]
    codes = np.clip(np.round(_divided(groups + offset, step + 0 * groups)), 0, 15).astype(np.uint8)
    packed = np.concatenate(
        (
            s[:, :4] | (s[:, 4:] >> 4 << 6),
            m[:, :4] | (m[:, 4:] >> 4 << 6),
            (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4),
        ),
        axis=1,
    )
    pairs = codes.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate((_half_bytes(d), _half_bytes(dmin), packed, nibbles), axis=1)


def _encode_q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    scale = np.abs(groups).max(2) / 31
    d = (scale.max(1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    s = np.clip(np.round(_divided(scale, d + 0 * scale)), -128, 127).astype(np.int8)
    step = (d * s)[..., None]
    codes = np.clip(np.round(_divided(groups, step + 0 * groups)), -32, 31) + 32
    q = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate(
        (q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4), 2
    )
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    return np.concatenate(
        (low.reshape(-1, 128), high.reshape(-1, 64), s.view(np.uint8), _half_bytes(d)), axis=1
    )
