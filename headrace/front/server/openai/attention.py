"""Attention weights as they stand in an answer: a list of layers, each compressed and in base64 (API-21)."""

from __future__ import annotations

import base64
import gzip

import numpy as np

from headrace.front.client.events import AttentionTold


def attention_document(told: AttentionTold, dtype: str | None) -> list[dict[str, object]]:
    """`attn_capture_data`: per layer base64(gzip(weights)), little-endian, of shape [T, heads, T]."""
    wanted = np.dtype(dtype or "float16").newbyteorder("<")
    entries: list[dict[str, object]] = []
    for layer, weights in sorted(told.layers.items()):
        data = gzip.compress(weights.astype(wanted).tobytes(), compresslevel=1)
        total = weights.shape[0]
        entries.append(
            {
                "layer_idx": layer,
                "data": base64.b64encode(data).decode(),
                "encoding": "base64(gzip)",
                "dtype": dtype or "float16",
                "shape": list(weights.shape),
                "token_meta": {
                    "prompt_len": told.num_prompt,
                    "total_len": total,
                    "vision_ranges": [],
                    "lang_ranges": [[0, total]],
                },
            }
        )
    return entries
