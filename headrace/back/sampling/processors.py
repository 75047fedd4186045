"""Logits processors of extensions: plain functions over one row, in the order the request names
them. They run on the host, behind the step, for the rows that ask for them alone.

A function gets the row's tokens so far (a list of ids: prompt and answer) and its logits, float32
[vocabulary], which it may change; it returns logits of the same shape. What it raises, or returns
instead, ends its request with that error; the step goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from headrace.back.sampling.features import FeatureRows
from headrace.base import extensions
from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.base.wire.step import RowStart

Processor = Callable[[list[int], torch.Tensor], torch.Tensor]


class RowProcessors:
    """Implements `features.LogitFeature`."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, ...]] = {}
        self._errors: dict[int, HeadraceError] = {}

    def start(self, start: RowStart) -> None:
        """See LogitFeature."""
        self._names[start.row] = start.sampling.logits_processors

    def end(self, row: int) -> None:
        """See LogitFeature."""
        self._names.pop(row, None)
        self._errors.pop(row, None)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """See LogitFeature."""
        pairs = zip(feature_rows.rows.tolist(), feature_rows.positions.tolist(), strict=True)
        for logits_V, (row, position) in zip(logits_KV, pairs, strict=True):
            tokens = feature_rows.tokens[row, :position].tolist()
            for name in self._names[row]:
                try:
                    logits_V.copy_(_processed(name, tokens, logits_V))
                except Exception as error:
                    self._errors[row] = _as_request(name, error)
                    break

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """See LogitFeature: functions keep no state here."""

    def take_errors(self, rows: np.ndarray) -> dict[int, HeadraceError]:
        """Index into the rows -> why a function has failed for it."""
        errors = {
            i: self._errors[row] for i, row in enumerate(rows.tolist()) if row in self._errors
        }
        self._errors.clear()
        return errors


def _processed(name: str, tokens: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    function = cast(Processor, extensions.load(extensions.LOGITS_PROCESSORS, name))
    result = function(list(tokens), logits_V)
    if not isinstance(result, torch.Tensor) or result.shape != logits_V.shape:
        shape = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise ValueError(f"it returned {shape}, not logits {list(logits_V.shape)}")
    return result


def _as_request(name: str, error: Exception) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return InvalidRequest(f"logits_processors: {error.message}", field="logits_processors")
    return InvalidRequest(
        f"logits_processors: {name} failed: {type(error).__name__}: {error}"[:500],
        field="logits_processors",
    )
