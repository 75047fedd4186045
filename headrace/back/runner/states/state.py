"""The seam between the runner and a kind of model (ENG-22).

The runner does what every model needs: rows, block tables, batches, sampling. Whatever only some models need
(positions in several axes, encoder outputs, recurrent state) is kept by a `ModelState`, built once beside the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from headrace.back.attention.plan import Batch
from headrace.base.wire.step import RowStart


class ModelState(Protocol):
    """Per-row state of one kind of model, and its hooks, called in the order in which they are written here.

    `in_graphs`: a step needs nothing of this state, so that it may be replayed from a graph: `prepare` and `after` are
    then not called.
    """

    in_graphs: bool

    def end(self, rows: np.ndarray) -> None:
        """The rows are given back; called before `start` of the same step."""
        ...

    def start(self, start: RowStart) -> None:
        """A request takes a row; its state starts afresh, also after a preemption."""
        ...

    def prepare(self, batch: Batch, *, row_T: np.ndarray, gates: Mapping[str, bytes]) -> Batch:
        """The batch as the model wants it: other positions, extra inputs. `row_T` [T]: the row of each query token."""
        ...

    def after(self, batch: Batch, hidden_TE: torch.Tensor) -> None:
        """The step's forward pass is queued; recurrent state may be saved here."""
        ...
