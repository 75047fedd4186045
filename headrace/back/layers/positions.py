"""Positions that are added to the tokens' embeddings: a table of the checkpoint, or sines and
cosines (Vaswani et al. 2017, section 3.5). P positions, E hidden size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.embedding.op import OP, Embedding, EmbeddingProblem
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.scope import Scope, not_loaded


class Positions(Protocol):
    """`lookup(positions_T)` gives what is added, [T, E]."""

    lookup: Embedding


class PositionsSpec(Protocol):
    """A kind of positions as data of its decoder; `build` makes it on this rank."""

    def build(self, scope: Scope, width: int) -> Positions:
        """`scope` is that of the embeddings."""
        ...


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A table of `rows` positions under `name`, behind `unused` rows that no text reaches."""

    name: str
    rows: int
    unused: int = 0

    def build(self, scope: Scope, width: int) -> Positions:
        """See PositionsSpec."""
        rows = self.rows + self.unused
        return TokenEmbedding(scope / self.name, rows, width, unused=self.unused)


@dataclass(frozen=True, kw_only=True)
class SinusoidalPositions:
    """Sines, then cosines, of (p + first) * 10000^(-i / (E/2 - spread)) for i = 0 .. E/2 - 1, times
    `scale`."""

    first: int = 0
    spread: int = 0
    scale: float = 1.0

    def build(self, scope: Scope, width: int) -> Positions:
        """See PositionsSpec."""
        return _Sinusoids(scope, width, self)


class _Sinusoids:
    def __init__(self, scope: Scope, width: int, spec: SinusoidalPositions) -> None:
        self.lookup: Embedding = not_loaded
        self._scope, self._width, self._spec = scope, width, spec
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        scope, spec, half = self._scope, self._spec, self._width // 2
        step = -math.log(10_000) / (half - spec.spread)
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * step)
        rows = max(scope.max_positions, scope.encoder_tokens)
        place_P = torch.arange(spec.first, spec.first + rows, dtype=torch.float32)
        angles = place_P[:, None] * frequencies
        values = torch.cat((angles.sin(), angles.cos()), dim=1) * spec.scale
        table_PE = values.to(scope.dtype).to(scope.device)
        problem = EmbeddingProblem(
            device=scope.kind, dtype=scope.dtype, rows=len(table_PE), width=self._width
        )
        self.lookup = scope.bind(OP, problem, table_PE)
