"""The names under which checkpoints hold the scales of KV caches.

`X.k_scale`, `X.attn.k_scale`, `X.k_proj.k_scale`, `X.qkv_proj.k_scale` (ModelOpt), and
`X.k_proj.output_scale` (Quark, early compressed-tensors) are those of the keys of attention X;
`X.kv_scale` and `X.kv_proj.kv_scale` those of its keys and values.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class CacheScale(NamedTuple):
    """Which attention, and whether of keys ("k"), values ("v") or both ("kv")."""

    module: str
    half: str


CACHE_ZEROS = re.compile(r".+\.[kv]_zero_point")
"""Zero points beside them."""
_NAMES = (
    re.compile(r"(?P<module>.+?)(?:\.attn|\.(?:k|v|kv|qkv)_proj)?\.(?P<half>kv|k|v)_scale"),
    re.compile(r"(?P<module>.+)\.(?P<half>k|v|kv)_proj\.output_scale"),
)


def cache_scale(name: str) -> CacheScale | None:
    """What a tensor of this name is the scale of; None: of no cache."""
    for pattern in _NAMES:
        if match := pattern.fullmatch(name):
            return CacheScale(match["module"], match["half"])
    return None
