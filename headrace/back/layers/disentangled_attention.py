"""Attention inside each text whose scores are of contents, of a content with how far the other
stands, and of how far with a content (He et al. 2021, "DeBERTa", section 3.1): positions have
queries and keys of their own, by the layer's own projections or by others. PyTorch's operations, a
text at a time.

T tokens, E hidden size, H heads of D, P embeddings of distances, N tokens of a text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.scope import Scope
from headrace.back.parallel.shard import Part, Shard, local_units


@dataclass(frozen=True, kw_only=True)
class DistanceBuckets:
    """Distances up to half of `buckets` have an embedding each, others share logarithmically wider
    ones up to `farthest`; as many on the other side."""

    buckets: int
    farthest: int

    def of(self, distance: torch.Tensor) -> torch.Tensor:
        """The place of each distance, a query's position less a key's, among 2 * `buckets`."""
        half, size = self.buckets // 2, distance.abs()
        wide = torch.log(size.clamp(min=half).float() / half) * (half - 1)
        wide = torch.ceil(wide / math.log((self.farthest - 1) / half)) + half
        place = torch.where(size <= half, distance, wide.long() * distance.sign())
        return (place + self.buckets).clamp(0, 2 * self.buckets - 1)


@dataclass(frozen=True, kw_only=True)
class EachDistance:
    """Every distance up to `buckets` has an embedding, and as many on the other side."""

    buckets: int

    def of(self, distance: torch.Tensor) -> torch.Tensor:
        """See DistanceBuckets."""
        return (distance + self.buckets).clamp(0, 2 * self.buckets - 1)


class DistanceEmbeddings:
    """The embeddings of distances, [P, E], normed unless `eps` is None. `scope`: the encoder's."""

    def __init__(
        self,
        scope: Scope,
        buckets: DistanceBuckets | EachDistance,
        width: int,
        *,
        eps: float | None,
    ) -> None:
        self.buckets = buckets
        self._param = scope.param("rel_embeddings.weight", (2 * buckets.buckets, width))
        self._norm = None if eps is None else LayerNorm(scope / "LayerNorm", width, eps=eps)
        self._weight_PE = torch.empty(0)
        scope.on_finish(self._finish)

    @property
    def rows(self) -> torch.Tensor:
        """See the class."""
        return self._weight_PE if self._norm is None else self._norm.norm(self._weight_PE)

    def _finish(self) -> None:
        self._weight_PE = self._param.take()


class DisentangledAttention:
    """x_TE -> y_TE: see the file. `names`: the projections, and `out`, which leads back."""

    def __init__(
        self,
        scope: Scope,
        width: int,
        heads: int,
        *,
        names: tuple[str, str, str],
        out: str,
        distances: DistanceEmbeddings,
    ) -> None:
        parts = tuple(Part(name, width, heads) for name in names)
        self._heads = local_units(parts[0], scope.mesh.tp)
        self._qkv = ColumnLinear(scope, width, parts, bias=True)
        self._out = RowLinear(scope / out, parts[0], width, bias=True)
        self._scale = (3 * width / heads) ** -0.5
        self._distances = distances
        self._query_HPD: torch.Tensor | None = None
        self._key_HPD = torch.empty(0)
        scope.on_finish(self._drop)

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        assert batch.query_start is not None
        q_HTD, k_HTD, v_HTD = self._projected(x_TE)
        if self._query_HPD is None:
            self._query_HPD, self._key_HPD = self._of_distances(self._distances.rows)
        y_THD = torch.empty_like(v_HTD.transpose(0, 1))
        starts = batch.query_start.tolist()
        for first, last in pairwise(starts):
            text = slice(first, last)
            y_HND = self._attend(q_HTD[:, text], k_HTD[:, text], v_HTD[:, text], self._query_HPD)
            y_THD[text] = y_HND.transpose(0, 1)
        return self._out.project(y_THD.flatten(1))

    def _of_distances(self, x_PE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, [H, P, D]."""
        q_HPD, k_HPD, _ = self._projected(x_PE)
        return q_HPD, k_HPD

    def _projected(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, [H, T, D]."""
        parts = self._qkv.project(x_TE).unflatten(1, (3, self._heads, -1))
        return parts.permute(1, 2, 0, 3).unbind(0)

    def _attend(
        self, q_HND: torch.Tensor, k_HND: torch.Tensor, v_HND: torch.Tensor, query_HPD: torch.Tensor
    ) -> torch.Tensor:
        """y_HND of one text."""
        place_N = torch.arange(q_HND.shape[1], device=q_HND.device)
        bucket_NN = self._distances.buckets.of(place_N[:, None] - place_N)
        bucket_HNN = bucket_NN.expand(q_HND.shape[0], -1, -1)
        scores_HNN = q_HND @ k_HND.transpose(1, 2)
        of_q_HNP = q_HND @ self._key_HPD.transpose(1, 2)
        of_k_HNP = k_HND @ query_HPD.transpose(1, 2)
        scores_HNN = scores_HNN + of_q_HNP.gather(2, bucket_HNN)
        scores_HNN = scores_HNN + of_k_HNP.gather(2, bucket_HNN.transpose(1, 2)).transpose(1, 2)
        share_HNN = (scores_HNN.float() * self._scale).softmax(-1).to(v_HND.dtype)
        return share_HNN @ v_HND

    def _drop(self) -> None:
        self._query_HPD = None  # made of what is loaded when it is first asked for


class ApartDisentangledAttention(DisentangledAttention):
    """The same with projections of distances that are their own, and one of contents, head by head,
    whose queries and values alone have biases (DeBERTa 1). `scope`: of its module."""

    def __init__(
        self, scope: Scope, width: int, heads: int, *, out: Scope, distances: DistanceEmbeddings
    ) -> None:
        parts = tuple(Part(name, width, heads) for name in ("query", "key", "value"))
        self._heads = local_units(parts[0], scope.mesh.tp)
        self._qkv = ColumnLinear(scope, width, parts, merged="in_proj", groups=heads)
        self._of_p = [
            ColumnLinear(scope, width, (Part(name, width, heads),), bias=bias)
            for name, bias in (("pos_q_proj", True), ("pos_proj", False))
        ]
        shard = Shard(axis="tp", dim=0, parts=parts[:1])
        self._biases = [
            scope.param(name, (width,), shard=shard, init="zeros") for name in ("q_bias", "v_bias")
        ]
        self._out = RowLinear(out, parts[0], width, bias=True)
        self._scale = (3 * width / heads) ** -0.5
        self._distances = distances
        self._query_HPD: torch.Tensor | None = None
        self._key_HPD = torch.empty(0)
        self._bias_3H1D = torch.empty(0)
        scope.on_finish(self._finish)

    def _projected(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = self._qkv.project(x_TE).unflatten(1, (3, self._heads, -1))
        return (parts.permute(1, 2, 0, 3) + self._bias_3H1D).unbind(0)

    def _of_distances(self, x_PE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = (
            projection.project(x_PE).unflatten(1, (self._heads, -1)).transpose(0, 1)
            for projection in self._of_p
        )
        return query, key

    def _finish(self) -> None:
        query, value = (bias.take().unflatten(0, (self._heads, -1)) for bias in self._biases)
        self._bias_3H1D = torch.stack((query, torch.zeros_like(query), value))[:, :, None]
        self._drop()
