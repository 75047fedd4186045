"""Queries that grow with their position, so that the softmax of long contexts stays sharp.

T tokens, H heads, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.layers.scope import Scope
from headrace.back.parallel.shard import Part, Shard


class QueryFactors(Protocol):
    """What a layer's queries are multiplied by."""

    def factors(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Those of queries at these positions, [T, H or 1, 1] in the model's dtype."""
        ...


class QueryScaling(Protocol):
    """How queries grow with their position, as a layer's specification says it."""

    def build(self, scope: Scope, heads: int) -> QueryFactors:
        """The factors of a layer with so many heads, of which a rank holds its share."""
        ...


@dataclass(frozen=True, kw_only=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + offset) / length)), so
    that the softmax of long contexts stays sharp (Llama 4, "attention temperature")."""

    beta: float
    length: int
    offset: int = 0

    def table(self, max_positions: int) -> torch.Tensor:
        """The factors of all positions, float32."""
        position = torch.arange(max_positions, dtype=torch.float32).add_(self.offset)
        passed = position.div_(self.length).floor_()
        return 1 + self.beta * torch.log1p(passed)

    def build(self, scope: Scope, heads: int) -> QueryFactors:
        """See QueryScaling; layers with one scale share the table."""
        return _shared_table(scope, self)


@dataclass(frozen=True, kw_only=True)
class LateLogScale:
    """Queries at position p are multiplied by 1 + alpha * log((p + 1) / first), from where that is
    more than 1 (Inkling)."""

    alpha: float
    first: int

    def table(self, max_positions: int) -> torch.Tensor:
        """The factors of all positions, float32."""
        count = torch.arange(1, max_positions + 1, dtype=torch.float32)
        return 1 + self.alpha * count.div_(self.first).clamp_(min=1.0).log_()

    def build(self, scope: Scope, heads: int) -> QueryFactors:
        """See QueryScaling; layers with one scale share the table."""
        return _shared_table(scope, self)


@dataclass(frozen=True, kw_only=True)
class PowerScale:
    """Queries at position p are multiplied by (1 + (p + 1) / length) ** exponent, so that the
    softmax of layers without position embedding stays sharp (Beam; "scalable softmax", Nakanishi
    2025)."""

    exponent: float
    length: int

    def table(self, max_positions: int) -> torch.Tensor:
        """The factors of all positions, float32."""
        count = torch.arange(1, max_positions + 1, dtype=torch.float32)
        return count.div_(self.length).log1p_().mul_(self.exponent).exp_()

    def build(self, scope: Scope, heads: int) -> QueryFactors:
        """See QueryScaling; layers with one scale share the table."""
        return _shared_table(scope, self)


def _shared_table(scope: Scope, scale: QueryScale | LateLogScale | PowerScale) -> QueryFactors:
    tables = scope.ledger.tables
    if scale not in tables:
        table_P = scale.table(scope.max_positions)
        tables[scale] = table_P.to(scope.dtype).to(scope.device)
    return TableFactors(tables[scale])


class TableFactors:
    """`QueryFactors` of all heads alike: table_P, a factor for each position."""

    def __init__(self, table_P: torch.Tensor) -> None:
        self._table_P = table_P

    def factors(self, positions_T: torch.Tensor) -> torch.Tensor:
        """See QueryFactors."""
        return self._table_P[positions_T, None, None]


@dataclass(frozen=True)
class LearnedLogScale:
    """`HeadLogScale`, its parameters under this name."""

    name: str

    def build(self, scope: Scope, heads: int) -> QueryFactors:
        """See QueryScaling."""
        return HeadLogScale(scope / self.name, heads, Part(self.name, heads, heads))


class HeadLogScale:
    """Each head's queries at position p are multiplied by its own scale * log(p + 1) + bias, both
    learned (Mistral Large 4). `part`: the heads, of which a rank holds its share; None: all. The
    logarithms of all positions are one table of the model."""

    def __init__(self, scope: Scope, heads: int, part: Part | None = None) -> None:
        shard = None if part is None else Shard(axis="tp", dim=0, parts=(part,))
        self._scale = scope.param("scale", (heads,), shard=shard, init="zeros")
        self._bias = scope.param("bias", (heads,), shard=shard, init="ones")
        self._scale_H = self._bias_H = torch.empty(0)
        tables = scope.ledger.tables
        if HeadLogScale not in tables:
            position_P = torch.arange(1, scope.max_positions + 1, dtype=torch.float32)
            tables[HeadLogScale] = position_P.log().to(scope.dtype).to(scope.device)
        self._log_P = tables[HeadLogScale]
        scope.on_finish(self._finish)

    def factors(self, positions_T: torch.Tensor) -> torch.Tensor:
        """See QueryFactors."""
        return torch.addcmul(self._bias_H, self._log_P[positions_T, None], self._scale_H)[..., None]

    def _finish(self) -> None:
        self._scale_H, self._bias_H = self._scale.take(), self._bias.take()
