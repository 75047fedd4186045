"""Relative position biases (Raffel et al. 2020, section 2.1): what is added to the score of a key,
for each head, by how far it stands from its query.

Distances share a bias in buckets: one each up to half of them, then logarithmically wider ones up
to `max_distance`, beyond which all have that of the last.
"""

from __future__ import annotations

import math

import torch

from headrace.back.layers.alibi import local_slopes
from headrace.back.layers.scope import Scope
from headrace.back.parallel.shard import Part, Shard, local_units

UNSEEN = -1e30
"""Beside it every score is as good as minus infinity."""


class RelativeBias:
    """The biases of a stack's layers, which share them, or of one. `table` float32 is there after
    loading, with this rank's heads: [H, max_distance + 1] by how many positions a key stands before
    its query; if `both_ways` [H, 2 max_distance + 1] by its position less the query's, from
    -max_distance on, where each side has half of the buckets.

    The checkpoint holds `scope / "weight"` [buckets, heads].
    """

    def __init__(
        self, scope: Scope, heads: Part, *, buckets: int, max_distance: int, both_ways: bool
    ) -> None:
        self.reach = max_distance
        self.table = torch.empty(0)
        self._buckets, self._both_ways = buckets, both_ways
        shape = (buckets, heads.units)
        part = Part(heads.name, heads.units, heads.units)
        self._weight = scope.param("weight", shape, shard=Shard(axis="tp", dim=1, parts=(part,)))
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        weight = self._weight.take().float()
        first = -self.reach if self._both_ways else 0
        distance = torch.arange(first, self.reach + 1)
        buckets = bucket_of(distance, self._buckets, self.reach, both_ways=self._both_ways)
        self.table = weight[buckets.to(weight.device)].t().contiguous()


class CausalBias:
    """Keys behind a query are not seen, within `reach` positions: of encoders of short texts whose
    tokens see those before them alone. `table` as RelativeBias's."""

    def __init__(self, scope: Scope, heads: int, *, reach: int) -> None:
        self.reach = reach
        local = local_units(Part("heads", heads, heads), scope.mesh.tp)
        distance = torch.arange(-reach, reach + 1, device=scope.device)
        row = torch.where(distance > 0, UNSEEN, 0.0)
        self.table = row.repeat(local, 1)


class BandBias:
    """Keys more than so many positions back, or `ahead`, are not seen: a window of unlike sides.
    `table` as RelativeBias's."""

    def __init__(self, scope: Scope, heads: int, *, back: int, ahead: int) -> None:
        self.reach = max(back, ahead) + 1
        local = local_units(Part("heads", heads, heads), scope.mesh.tp)
        distance = torch.arange(-self.reach, self.reach + 1, device=scope.device)
        row = torch.where((distance < -back) | (distance > ahead), UNSEEN, 0.0)
        self.table = row.repeat(local, 1)


class SlopeBias:
    """Scores fall by a head's slope for each position between two tokens, to either side: ALiBi
    (Press et al. 2022) of encoders, within `reach` positions. `table` as RelativeBias's."""

    def __init__(self, scope: Scope, slopes: tuple[float, ...], *, reach: int) -> None:
        self.reach = reach
        local = torch.tensor(local_slopes(slopes, scope.mesh.tp), device=scope.device)
        distance = torch.arange(-reach, reach + 1, device=scope.device).abs()
        self.table = -local[:, None] * distance


class RootBias:
    """Scores fall by a head's slope times the square root of how many positions a key stands before
    its query (Step-Audio; Huang et al. 2025), within `reach` positions. `table` as RelativeBias's
    of one side."""

    def __init__(self, scope: Scope, slopes: tuple[float, ...], *, reach: int) -> None:
        self.reach = reach
        local = torch.tensor(local_slopes(slopes, scope.mesh.tp), device=scope.device)
        distance = torch.arange(reach + 1, device=scope.device, dtype=torch.float32)
        self.table = -local[:, None] * distance.sqrt()


def bucket_of(
    distance: torch.Tensor, buckets: int, max_distance: int, *, both_ways: bool
) -> torch.Tensor:
    """The bucket of each distance, which is not negative unless `both_ways`, int64."""
    if both_ways:
        buckets //= 2
    size, exact = distance.abs(), buckets // 2
    wide = torch.log(size.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = exact + (wide * (buckets - exact)).long()
    bucket = torch.where(size < exact, size, wide.clamp(max=buckets - 1))
    return bucket + (distance > 0) * buckets if both_ways else bucket
