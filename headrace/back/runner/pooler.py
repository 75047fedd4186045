"""Hidden states to what pooled requests want, chunk by chunk as their prompts are computed.

The mean is summed over chunks in float32; a preempted request starts afresh. All vectors of a step
go through the classification head in one product. T query tokens of the step, Q of one row, E
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import numpy as np
import torch

from headrace.back.kernels.upload import to_host
from headrace.back.layers.pooling import Projection, projected
from headrace.back.runner.batch import StepShape
from headrace.base import extensions
from headrace.base.errors import HeadraceError, InvalidRequest, NonFiniteLogits
from headrace.base.wire.pooling import POOLINGS, Pooled, RowPooling
from headrace.base.wire.step import RowStart

Classify = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """Pooled vectors of one step, to be read once the device has passed it: `counts[i]` rows of
    `values` belong to the step's row `index[i]`, from prompt position `start[i]` on. `errors`: of
    rows for which there are none."""

    index: list[int]
    start: list[int]
    counts: list[int]
    values: np.ndarray
    errors: Mapping[int, HeadraceError] = field(default_factory=dict)

    def read(self, failed: dict[int, HeadraceError]) -> list[tuple[int, Pooled]]:
        """What is finite, by index of the step's rows; the rest goes to `failed`."""
        failed.update(self.errors)
        pooled, at = [], 0
        for index, start, count in zip(self.index, self.start, self.counts, strict=True):
            values = self.values[at : at + count]
            at += count
            if np.isfinite(values).all():
                pooled.append((index, Pooled(start, values)))
            else:
                failed[index] = NonFiniteLogits(
                    "the model's hidden states for this request are not finite"
                )
        return pooled


class _Kind(Enum):
    """What becomes of a row's vectors."""

    POOLED = "pooled"
    TOKENS = "tokens"
    CLASSES = "classes"
    WEIGHTS = "weights"
    LEXICAL = "lexical"


LEXICAL_TOKENS = 64
"""So many tokens' weights of the whole vocabulary are there at a time."""


class _Row:
    """One row that is pooled; `total_E` is the sum so far, for the mean."""

    __slots__ = ("asked", "chunks", "function", "num_prompt", "total_E")

    def __init__(self, asked: RowPooling, num_prompt: int) -> None:
        self.asked = asked
        self.function = None if asked.how in POOLINGS else _foreign(asked.how)
        self.chunks: list[torch.Tensor] = []
        self.num_prompt = num_prompt
        self.total_E: torch.Tensor | None = None

    def take(self, hidden_QE: torch.Tensor, first: int) -> torch.Tensor | None:
        """The vectors this chunk gives, [n, E]; `first` is its first position."""
        how, last = self.asked.how, first + hidden_QE.shape[0] == self.num_prompt
        if self.function is not None:
            self.chunks.append(hidden_QE.float())
            return _applied(self.function, how, torch.cat(self.chunks)) if last else None
        if how == "tokens":
            return hidden_QE
        if how == "cls":
            return hidden_QE[:1] if first == 0 else None
        if how == "last":
            return hidden_QE[-1:] if last else None
        total_E = hidden_QE[max(0, self.asked.first - first) :].float().sum(0)
        if self.total_E is not None:
            total_E += self.total_E
        self.total_E = total_E
        if not last:
            return None
        mean_1E = (total_E / (self.num_prompt - self.asked.first))[None]
        return mean_1E.to(hidden_QE.dtype) if self.asked.head else mean_1E


def _none(errors: Mapping[int, HeadraceError]) -> Vectors:
    return Vectors(index=[], start=[], counts=[], values=np.zeros((0, 0)), errors=errors)


Pool = Callable[[torch.Tensor], torch.Tensor]


def _foreign(name: str) -> Pool:
    return cast(Pool, extensions.load(extensions.POOLERS, name))


def _applied(pool: Pool, name: str, hidden_QE: torch.Tensor) -> torch.Tensor:
    """[1, E] by a package's function; InvalidRequest, with its name, if it fails."""
    try:
        vector_E = pool(hidden_QE)
        wrong = None if vector_E.shape == hidden_QE.shape[1:] else f"gives {list(vector_E.shape)}"
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong is not None:
        raise InvalidRequest(
            f"extension {name}: {wrong}; a vector of {hidden_QE.shape[1]} numbers is wanted",
            field="pooling",
        )
    return vector_E.float()[None]


class Pooler:
    """Pools the `rows` that ask for it."""

    def __init__(self, classify: Classify, projection: Projection | None = None) -> None:
        self._classify = classify
        self._projection = projection or Projection()
        self._modules = {
            _Kind.POOLED: self._projection.of(tokens=False),
            _Kind.TOKENS: self._projection.of(tokens=True),
            _Kind.WEIGHTS: self._projection.weights,
        }
        self.rows: dict[int, _Row] = {}

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        if start.pooling is not None:
            self.rows[start.row] = _Row(start.pooling, start.num_prompt)

    def end(self, rows: np.ndarray) -> None:
        """The rows are given back."""
        for row in rows.tolist():
            self.rows.pop(row, None)

    def pool(self, shape: StepShape, hidden_TE: torch.Tensor) -> list[Vectors]:
        """What the step gives: one entry of each kind there is."""
        taken: dict[_Kind, list[tuple[int, int, torch.Tensor]]] = {kind: [] for kind in _Kind}
        errors: dict[int, HeadraceError] = {}
        for index, row in enumerate(shape.rows.tolist()):
            owner = self.rows.get(row)
            if owner is None:
                continue
            begin, end = shape.query_start[index : index + 2].tolist()
            first = int(shape.position_T[begin])
            try:
                state = self._state(owner, hidden_TE[begin:end], first)
            except InvalidRequest as error:  # of a package's function
                state, errors[index] = None, error
            if state is not None:
                start = first if owner.asked.how == "tokens" else 0
                taken[self._kind(owner.asked)].append((index, start, state))
        sent = [self._sent(parts, kind) for kind, parts in taken.items() if parts]
        return [*sent, _none(errors)] if errors else sent

    def _state(self, row: _Row, hidden_QE: torch.Tensor, first: int) -> torch.Tensor | None:
        return self._words(hidden_QE) if row.asked.how == "lexical" else row.take(hidden_QE, first)

    def _kind(self, asked: RowPooling) -> _Kind:
        if asked.how == "lexical":
            return _Kind.LEXICAL
        if asked.head:
            return _Kind.WEIGHTS if self._projection.weights else _Kind.CLASSES
        return _Kind.TOKENS if asked.how == "tokens" else _Kind.POOLED

    def _words(self, hidden_QE: torch.Tensor) -> torch.Tensor:
        """[1, V]: the most that any token of a text says of each word. An encoder has all of a text
        in one step."""
        parts = [self._classify(part).amax(0) for part in hidden_QE.split(LEXICAL_TOKENS)]
        return torch.stack(parts).amax(0, keepdim=True)

    def _sent(self, parts: list[tuple[int, int, torch.Tensor]], kind: _Kind) -> Vectors:
        """All vectors of one kind, on their way to the host."""
        values = torch.cat(
            [each if kind is _Kind.CLASSES else each.float() for _, _, each in parts]
        )
        if kind is _Kind.CLASSES:
            values = self._classify(values)
        else:
            values = projected(self._modules.get(kind, ()), values)
        counts = [vectors.shape[0] for _, _, vectors in parts]
        return Vectors(
            index=[index for index, _, _ in parts],
            start=[start for _, start, _ in parts],
            counts=counts,
            values=to_host(values).numpy(),
        )
