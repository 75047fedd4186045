"""The state of a plain decoder: none. Positions are token indices and the batch goes to the model
as it is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from headrace.back.attention.plan import Batch
from headrace.back.runner.batch import StepShape
from headrace.base.wire.step import RowStart


class PlainDecoder:
    """The ModelState of models that need nothing beside tokens, positions and attention plans.

    Tokens that were not accepted leave keys and values behind, which later ones overwrite."""

    in_graphs = True
    repeatable = True
    host_until: np.ndarray | None = None
    media_tokens = 0
    media_width = 0
    media_rows: dict[str, int] = {}
    pools_whole = False

    def take(self, payloads: Mapping[str, bytes]) -> None:
        """Nothing is sent."""

    def forget_content(self) -> None:
        """Nothing is kept."""

    def end(self, rows: np.ndarray) -> None:
        """Nothing to forget."""

    def start(self, start: RowStart) -> None:
        """Nothing to remember."""

    def recorded_media(self, max_tokens: int) -> None:
        """No step waits for the host."""

    def prepare(self, batch: Batch, shape: StepShape) -> Batch:
        """The batch unchanged."""
        return batch

    def before(self, batch: Batch) -> None:
        """Nothing to load."""

    def after(self, batch: Batch, hidden_TE: torch.Tensor) -> None:
        """Nothing to save."""

    def verifying(self, batch: Batch) -> Batch:
        """The batch unchanged."""
        return batch

    def accept(self, batch: Batch, length_M: torch.Tensor) -> None:
        """Nothing goes back."""


class PlainEncoder(PlainDecoder):
    """The same for encoders, whose attention reads the bounds of the texts on the host."""

    in_graphs = False
