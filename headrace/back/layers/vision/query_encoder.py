"""Learned queries behind an image's rows in layers of a language model: rows see each other, a
query sees all rows and the queries before it (Wei et al. 2026, DeepSeek-OCR 2).

P rows of the image, Q queries, E width, H heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mlp import FeedForwardPlace, GatedMLP
from headrace.back.layers.norm import RMS
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope
from headrace.back.parallel.shard import Part


@dataclass(frozen=True, kw_only=True)
class QueryEncoderSpec:
    """Qwen 2's layers."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    eps: float
    activation: str
    rope: RopeSpec


class QueryEncoder:
    """rows_PE and queries_QE -> what the queries became, [Q, E]."""

    def __init__(self, scope: Scope, spec: QueryEncoderSpec) -> None:
        self._rope = Rope(scope, spec.rope)
        self._layers = [
            _QueryLayer(scope / f"layers.{index}", spec, self._rope) for index in range(spec.layers)
        ]
        self._norm = RMS.build(scope / "norm", spec.width, eps=spec.eps)

    def gather(self, rows_PE: torch.Tensor, queries_QE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        count = rows_PE.shape[0]
        x_TE = torch.cat((rows_PE, queries_QE))
        place_T = torch.arange(x_TE.shape[0], device=x_TE.device)
        seen_TT = (place_T[None] <= place_T[:, None]) | (place_T[None] < count)
        for layer in self._layers:
            x_TE = layer.forward(x_TE, place_T, seen_TT)
        return self._norm.norm(x_TE[count:].contiguous())


class _QueryLayer:
    """x_TE -> x_TE."""

    def __init__(self, scope: Scope, spec: QueryEncoderSpec, rope: Rope) -> None:
        self._rope, self._head_dim = rope, spec.head_dim
        self._counts = (spec.heads, spec.kv_heads, spec.kv_heads)
        inside = scope / "self_attn"
        sizes = [count * spec.head_dim for count in self._counts]
        named = zip(("q_proj", "k_proj", "v_proj"), sizes, self._counts, strict=True)
        parts = tuple(Part(*each) for each in named)
        self._qkv = ColumnLinear(inside, spec.width, parts, bias=True)
        out = Part("o_proj", sizes[0], spec.heads)
        self._out = RowLinear(inside / "o_proj", out, spec.width, bias=False)
        self._before, self._before_mlp = (
            RMS.build(scope / name, spec.width, eps=spec.eps)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        place = FeedForwardPlace(width=spec.width, inner=spec.inner, activation=spec.activation)
        self._mlp = GatedMLP(scope / "mlp", place)

    def forward(
        self, x_TE: torch.Tensor, place_T: torch.Tensor, seen_TT: torch.Tensor
    ) -> torch.Tensor:
        """See the class; seen_TT: which places a place sees."""
        qkv = self._qkv.project(self._before.norm(x_TE)).unflatten(1, (-1, self._head_dim))
        q_THD, k_TKD, v_TKD = qkv.split(self._counts, dim=1)
        self._rope.rotate(q_THD, k_TKD, place_T, self._rope.table_PR)
        q, k, v = (one.transpose(0, 1)[None] for one in (q_THD, k_TKD, v_TKD))
        shared = self._counts[0] != self._counts[1]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TT, enable_gqa=shared)
        x_TE = x_TE + self._out.project(y[0].transpose(0, 1).reshape(x_TE.shape[0], -1))
        return x_TE + self._mlp.forward(self._before_mlp.norm(x_TE))
