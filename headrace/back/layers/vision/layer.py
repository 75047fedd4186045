"""A layer of a vision tower: attention in both directions within spans of patches, then an MLP, a
norm before each.

N patches, E width, H heads, D head_dim, R = D rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.back.kernels.rope.op import OP as ROPE
from headrace.back.kernels.rope.op import RopeProblem
from headrace.back.kernels.span_attention.op import OP as SPAN_ATTENTION
from headrace.back.kernels.span_attention.op import SpanAttentionProblem
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mlp import (
    ElementwiseActivation,
    FeedForwardPlace,
    GatedMLP,
    PlainMLP,
    PlainMLPSpec,
)
from headrace.back.layers.norm import RMS, BlockNorm, NormSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.bounded_mlp import BoundedMLP
from headrace.back.parallel.shard import Part


@dataclass(frozen=True, kw_only=True)
class VisionLayerNames:
    """Where a layer's tensors lie. `merged`: the one that holds query, key and value; else `qkv`
    are three. `mlp`: up and down, or gate, up and down, in `mlp_module`; it and `attention` may be
    "": beside the norms."""

    before_attention: str = "norm1"
    before_mlp: str = "norm2"
    attention: str = "attn"
    merged: str | None = "qkv"
    qkv: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    out: str = "proj"
    mlp_module: str = "mlp"
    mlp: tuple[str, ...] = ("fc1", "fc2")


@dataclass(frozen=True, kw_only=True)
class VisionLayerSpec:
    """Every layer of a tower. `rotary`: queries and keys turn with the patch's place. `bias`: of
    query, key, value and what leads back; `mlp_bias`: of the MLP. `scaled`: a learned factor for
    each column of what a branch adds (Touvron et al. 2021), under these names. `qk_norm`: norms
    over the whole width of queries and of keys, with `qk_per_head` over each head. `kv_heads`: 0:
    as many as of queries. `rotary_dims`: of a head, 0: all. `after`: norms stand behind branches,
    not before them."""

    width: int
    inner: int
    heads: int
    head_dim: int
    eps: float
    activation: str
    norm: NormSpec
    rotary: bool = False
    rotary_layout: str = "half"
    bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    scaled: tuple[str, str] | None = None
    qk_norm: tuple[str, str] | None = None
    qk_norm_kind: NormSpec = RMS
    qk_per_head: bool = False
    kv_heads: int = 0
    rotary_dims: int = 0
    bound: float = 0.0
    after: bool = False
    names: VisionLayerNames = VisionLayerNames()


@dataclass(frozen=True, kw_only=True)
class TokenSpans:
    """What a layer attends within: the first patch of each span and N; and, where layers rotate,
    table_NR: the cosines and sines of each patch, with place_N counting them. `block`: patches that
    see each other and those of blocks before them in their span, not those behind; 0: a span is one
    block. `seen_N`: bool, with `block`: which patches are seen at all; None: all."""

    starts: Sequence[int]
    block: int = 0
    seen_N: torch.Tensor | None = None
    table_NR: torch.Tensor | None = None
    place_N: torch.Tensor | None = None


class VisionLayer:
    """x_NE -> x_NE."""

    def __init__(self, scope: Scope, spec: VisionLayerSpec) -> None:
        names, self._after = spec.names, spec.after
        assert not (spec.after and spec.scaled), "factors of branches with norms behind"
        self._before_attention = spec.norm.build(
            scope / names.before_attention, spec.width, eps=spec.eps
        )
        inside = scope / names.attention if names.attention else scope
        self._attention = VisionAttention(inside, spec)
        self._before_mlp = spec.norm.build(scope / names.before_mlp, spec.width, eps=spec.eps)
        self._mlp = _mlp(scope / names.mlp_module if names.mlp_module else scope, spec)
        self._factors = [
            scope.param(name, (spec.width,), init="ones") for name in spec.scaled or ()
        ]
        self._scales: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def forward(self, x_NE: torch.Tensor, spans: TokenSpans) -> torch.Tensor:
        """See the class."""
        if self._after:
            y_NE = self._attention.forward(x_NE, spans)
            x_NE = x_NE + self._before_attention.norm(y_NE)
            return x_NE + self._before_mlp.norm(self._mlp.forward(x_NE))
        y_NE = self._attention.forward(self._before_attention.norm(x_NE), spans)
        x_NE = x_NE + (y_NE * self._scales[0] if self._scales else y_NE)
        y_NE = self._mlp.forward(self._before_mlp.norm(x_NE))
        return x_NE + (y_NE * self._scales[1] if self._scales else y_NE)

    def _finish(self) -> None:
        self._scales = [factor.take() for factor in self._factors]


def _mlp(scope: Scope, spec: VisionLayerSpec) -> PlainMLP | GatedMLP | BoundedMLP:
    place = FeedForwardPlace(width=spec.width, inner=spec.inner, activation=spec.activation)
    names = spec.names.mlp
    if spec.bound:
        return BoundedMLP(scope, place, bound=spec.bound, bias=spec.mlp_bias)
    if len(names) == 3:
        return GatedMLP(scope, place, bias=spec.mlp_bias, names=(names[0], names[1], names[2]))
    plain = PlainMLPSpec(up=names[0], down=names[1], bias=spec.mlp_bias)
    return PlainMLP(scope, plain, place, ElementwiseActivation(scope, spec.activation))


class VisionAttention:
    """x_NE -> y_NE."""

    def __init__(self, scope: Scope, spec: VisionLayerSpec) -> None:
        names, size = spec.names, spec.heads * spec.head_dim
        self._scope, self._spec = scope, spec
        kv_heads = spec.kv_heads or spec.heads
        self._heads = (spec.heads, kv_heads, kv_heads)
        self._sizes = [count * spec.head_dim for count in self._heads]
        sized = zip(names.qkv, self._sizes, self._heads, strict=True)
        parts = tuple(Part(*each) for each in sized)
        self._qkv = ColumnLinear(scope, spec.width, parts, bias=spec.bias, merged=names.merged)
        out = Part(names.out, size, spec.heads)
        self._out = RowLinear(scope / names.out, out, spec.width, bias=spec.out_bias)
        normed = zip(spec.qk_norm or (), self._sizes, strict=False)
        self._qk_norms = [
            spec.qk_norm_kind.build(
                scope / name, spec.head_dim if spec.qk_per_head else whole, eps=spec.eps
            )
            for name, whole in normed
        ]
        self._rotate = self._attend = not_loaded
        scope.on_finish(self._finish)

    def forward(self, x_NE: torch.Tensor, spans: TokenSpans) -> torch.Tensor:
        """See the class."""
        spec = self._spec
        q_NX, k_NX, v_NX = self._qkv.project(x_NE).split(self._sizes, dim=1)
        if self._qk_norms:
            of_q, of_k = self._qk_norms
            q_NX, k_NX = self._normed(of_q, q_NX), self._normed(of_k, k_NX)
        q_NHD, k_NHD, v_NHD = (
            one_NX.unflatten(1, (-1, spec.head_dim)) for one_NX in (q_NX, k_NX, v_NX)
        )
        if spec.rotary:
            self._rotate(q_NHD, k_NHD, spans.place_N, spans.table_NR)
        if spans.block:
            y_NHD = _in_blocks(q_NHD, k_NHD, v_NHD, spans)
        else:
            y_NHD = self._attend(q_NHD, k_NHD, v_NHD, spans.starts)
        return self._out.project(y_NHD.reshape(x_NE.shape[0], -1))

    def _normed(self, norm: BlockNorm, x_NX: torch.Tensor) -> torch.Tensor:
        if not self._spec.qk_per_head:
            return norm.norm(x_NX.contiguous())
        heads = x_NX.reshape(-1, self._spec.head_dim)
        return norm.norm(heads).view(x_NX.shape)

    def _finish(self) -> None:
        spec, shape = self._spec, {"device": self._scope.kind, "dtype": self._scope.dtype}
        if spec.rotary:
            problem = RopeProblem(
                **shape,
                head_dim=spec.head_dim,
                rotary_dim=spec.rotary_dims or spec.head_dim,
                layout=spec.rotary_layout,
            )
            self._rotate = self._scope.bind(ROPE, problem)
        attention = SpanAttentionProblem(
            **shape,
            heads=spec.heads,
            kv_heads=self._heads[1],
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
        )
        self._attend = self._scope.bind(SPAN_ATTENTION, attention)


def _in_blocks(
    q_NHD: torch.Tensor, k_NHD: torch.Tensor, v_NHD: torch.Tensor, spans: TokenSpans
) -> torch.Tensor:
    """Attention of each block over all up to its own end."""
    parts = []
    for start, end in pairwise(spans.starts):
        for at in range(start, end, spans.block):
            last = min(at + spans.block, end)
            q, k, v = (
                one.transpose(0, 1)[None]
                for one in (q_NHD[at:last], k_NHD[start:last], v_NHD[start:last])
            )
            mask = None if spans.seen_N is None else spans.seen_N[start:last].expand(last - at, -1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            parts.append(y[0])
    return torch.cat(parts, dim=1).transpose(0, 1)
