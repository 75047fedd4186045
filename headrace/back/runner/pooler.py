"""Hidden states to what pooled requests want, chunk by chunk as their prompts are computed.

The mean is summed over chunks in float32; a preempted request starts afresh. All vectors of a step go through the
classification head in one product. T query tokens of the step, Q of one row, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.back.runner.batch import StepShape
from headrace.base.errors import HeadraceError, NonFiniteLogits
from headrace.base.wire.params import RowPooling
from headrace.base.wire.request import Pooled
from headrace.base.wire.step import RowStart

Classify = Callable[[torch.Tensor], torch.Tensor]


class _Row:
    """One row that is pooled; `total_E` is the sum so far, for the mean."""

    __slots__ = ("asked", "num_prompt", "total_E")

    def __init__(self, asked: RowPooling, num_prompt: int) -> None:
        self.asked = asked
        self.num_prompt = num_prompt
        self.total_E: torch.Tensor | None = None

    def take(self, hidden_QE: torch.Tensor, first: int) -> torch.Tensor | None:
        """The vectors this chunk gives, [n, E]; `first` is its first position."""
        how, last = self.asked.how, first + hidden_QE.shape[0] == self.num_prompt
        if how == "tokens":
            return hidden_QE
        if how == "cls":
            return hidden_QE[:1] if first == 0 else None
        if how == "last":
            return hidden_QE[-1:] if last else None
        total_E = hidden_QE.float().sum(0)
        if self.total_E is not None:
            total_E += self.total_E
        self.total_E = total_E
        return (total_E / self.num_prompt)[None] if last else None


class Pooler:
    """The rows that are pooled."""

    def __init__(self, classify: Classify) -> None:
        self._classify = classify
        self._rows: dict[int, _Row] = {}

    @property
    def idle(self) -> bool:
        """Whether no row is pooled."""
        return not self._rows

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        if start.pooling is not None:
            self._rows[start.row] = _Row(start.pooling, start.num_prompt)

    def end(self, rows: np.ndarray) -> None:
        """The rows are given back."""
        for row in rows.tolist():
            self._rows.pop(row, None)

    def pool(
        self, shape: StepShape, hidden_TE: torch.Tensor
    ) -> tuple[list[tuple[int, Pooled]], dict[int, HeadraceError]]:
        """What the step gives, and the rows whose vectors are not finite, by index into the step's rows."""
        taken: list[tuple[int, int, torch.Tensor]] = []
        for index, row in enumerate(shape.rows.tolist()):
            owner = self._rows.get(row)
            if owner is None:
                continue
            begin, end = shape.query_start[index : index + 2].tolist()
            first = int(shape.position_T[begin])
            found = owner.take(hidden_TE[begin:end], first)
            if found is not None:
                taken.append((index, first if owner.asked.how == "tokens" else 0, found))
        return self._told(shape, taken, hidden_TE.dtype)

    def _told(
        self, shape: StepShape, taken: list[tuple[int, int, torch.Tensor]], dtype: torch.dtype
    ) -> tuple[list[tuple[int, Pooled]], dict[int, HeadraceError]]:
        pooled: list[tuple[int, Pooled]] = []
        failed: dict[int, HeadraceError] = {}
        for head in (False, True):
            mine = [
                (index, start, vectors)
                for index, start, vectors in taken
                if self._rows[int(shape.rows[index])].asked.head is head
            ]
            if not mine:
                continue
            stacked = torch.cat([vectors.float() for _, _, vectors in mine])
            if head:
                stacked = self._classify(stacked.to(dtype))
            values, at = stacked.cpu().numpy(), 0
            for index, start, vectors in mine:
                part = values[at : at + len(vectors)]
                at += len(vectors)
                if np.isfinite(part).all():
                    pooled.append((index, Pooled(start, part)))
                else:
                    failed[index] = NonFiniteLogits(
                        "the model's hidden states for this request are not finite"
                    )
        return pooled, failed
