"""What each attention layer states about its KV cache; grouping and pool sizes follow from it alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KVLayer:
    """One layer's KV needs on this rank: local KV heads, head size, and its window in tokens (None: full attention).

    A window of W means that a query at position p attends to positions p-W+1 .. p.
    """

    layer: int
    kv_heads: int
    head_dim: int
    window: int | None = None
