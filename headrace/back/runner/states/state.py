"""The seam between the runner and a kind of model.

The runner does what every model needs: rows, block tables, batches, sampling. Whatever only some
models need (positions in several axes, encoder outputs, recurrent state) is kept by a `ModelState`,
built once beside the KV memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from headrace.back.attention.plan import Batch
from headrace.back.runner.batch import StepShape
from headrace.base.wire.step import RowStart


class RecordedMedia(Protocol):
    """What a state adds to steps of fixed sizes that reach placeholders."""

    def send(self, shape: StepShape, *, tokens: int) -> None:
        """What the next step's tokens stand for, in a step of `tokens` with padding."""
        ...

    def on(self, batch: Batch) -> Batch:
        """The batch of a size, which reads what `send` has put there."""
        ...


class ModelState(Protocol):
    """Per-row state of one kind of model, and its hooks, called in the order in which they are
    written here.

    in_graphs    a step needs nothing of this state from the host, so that it may be replayed from a
                 graph: `prepare` is then called for exact steps alone. `before` and `after` are
                 work of the device on static tensors; they are recorded with the step
    repeatable   a step that failed for lack of memory may be run again: it leaves nothing behind
                 that its repetition would read
    host_until   int64 by row: steps with a query before this position of its row are run by
                 themselves, with `prepare`; None: none are
    media_tokens tokens of images and video that it keeps encoded, and
    media_width  numbers of each of them
    pools_whole  see WorkerFacts
    """

    in_graphs: bool
    repeatable: bool
    host_until: np.ndarray | None
    media_tokens: int
    media_width: int
    pools_whole: bool

    @property
    def media_rows(self) -> dict[str, int]:
        """See WorkerFacts."""
        ...

    def take(self, payloads: Mapping[str, bytes]) -> None:
        """The payloads that a step brings for the workers, by hook, before anything else of it; a
        step that is run again brings them again."""
        ...

    def forget_content(self) -> None:
        """The weights are others: what was made of requests' content is void where no row has
        it."""
        ...

    def end(self, rows: np.ndarray) -> None:
        """The rows are given back; called before `start` of the same step."""
        ...

    def start(self, start: RowStart) -> None:
        """A request takes a row; its state starts afresh, also after a preemption."""
        ...

    def recorded_media(self, max_tokens: int) -> RecordedMedia | None:
        """How steps before `host_until` are recorded too; None: they are run by themselves.
        `max_tokens`: of a step. Called once."""
        ...

    def prepare(self, batch: Batch, shape: StepShape) -> Batch:
        """The batch as the model wants it: other positions, extra inputs. `shape`: the host's view
        of the step."""
        ...

    def before(self, batch: Batch) -> None:
        """Before the forward pass: what each row begins with."""
        ...

    def after(self, batch: Batch, hidden_TE: torch.Tensor) -> None:
        """Behind the forward pass: what is kept of each row."""
        ...

    def verifying(self, batch: Batch) -> Batch:
        """The batch of steps that verify drafts, as the model wants it; called once for a size."""
        ...

    def accept(self, batch: Batch, length_M: torch.Tensor) -> None:
        """The drafts of such a step are verified, each row ends behind those that stand: it has
        length_M tokens, int32 by row. Recorded with the step, where that samples."""
        ...
