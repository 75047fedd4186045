"""Where the tensors of an attention lie in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.layers.linear import MergedTensor


@dataclass(frozen=True, kw_only=True)
class AttentionNames:
    """Where the tensors of an attention lie in its layer. `merged`: the one that holds query, key
    and value, if they are one there; `by_group`: KV head by KV head, its queries before its key and
    value. `grouped`: such tensors in groups and an order of their own. `transposed`: weights are
    stored as [inputs, outputs]. `tiled`: KV heads are shared round by round: of K, query head i
    reads that of i mod K."""

    module: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    merged: str | None = None
    by_group: bool = False
    grouped: MergedTensor | None = None
    out: str = "o_proj"
    sinks: str = "sinks"
    transposed: bool = False
    tiled: bool = False

    def tiles(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Groups and rounds of the query heads in the checkpoint; both 1: they lie as we have
        them."""
        rounds = heads // kv_heads
        return (kv_heads, rounds) if self.tiled and rounds > 1 else (1, 1)

    def own_tensor(self, heads: int, tiles: tuple[int, int], *, gated: bool) -> MergedTensor | None:
        """The tensor that holds parts in an order of its own, if there is one. `gated`: the query's
        holds a gate for each head too."""
        if gated:
            return MergedTensor(name=self.query, parts=(0, 3), groups=heads)
        groups, rounds = tiles
        if rounds > 1:
            return MergedTensor(name=self.query, parts=(0,), groups=groups, tiles=rounds)
        return self.grouped


SEPARATE = AttentionNames()
"""A tensor each for query, key and value, as Llama names them."""
