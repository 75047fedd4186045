"""Where the tensors of an attention lie in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.layers.linear import MergedTensor


@dataclass(frozen=True, kw_only=True)
class AttentionNames:
    """Where the tensors of an attention lie in its layer. `merged`: the one that holds query, key
    and value, if they are one there; `by_group`: KV head by KV head, its queries before its key and
    value. `grouped`: such tensors in groups and an order of their own. `transposed`: weights are
    stored as [inputs, outputs]."""

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


SEPARATE = AttentionNames()
"""A tensor each for query, key and value, as Llama names them."""
