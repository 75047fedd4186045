"""What each attention layer states about its KV cache; grouping and pool sizes follow from it alone."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.kernels.kv_write.coded import SCALE_BYTES


@dataclass(frozen=True, kw_only=True)
class KVLayer:
    """One layer's KV needs on this rank: local KV heads, head size, and its window in tokens (None: full attention).
    `coded`: "int8" or "fp8" codes and scales instead of the model's dtype (kernels/kv_write/coded.py); all layers or
    none.

    A window of W means that a query at position p attends to positions p-W+1 .. p.
    """

    layer: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    coded: str | None = None

    @property
    def token_width(self) -> int:
        """Elements of a token's key (or value) of one head: codes bring the bytes of their scale."""
        return self.head_dim + (SCALE_BYTES if self.coded else 0)
