"""New weights for a loaded model, in one or several pushes, while nothing of it runs.

A push is checked whole before anything changes: names, shapes, dtypes, and that all numbers are
finite. What it completes is in the live model when it returns. So an update of one push changes
everything or nothing; one of several leaves a mixture until `finish`, which its caller tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.back.models.load import Origin
from headrace.back.models.load.fill import (
    COPY_THREADS,
    DEVICE_COPY_THREADS,
    initialise,
    write,
)
from headrace.back.models.load.source import Source
from headrace.back.models.weights import Copy, Param, copies
from headrace.back.parallel.param import local_pieces
from headrace.back.platforms.device_threads import device_pool
from headrace.back.transfer.direct import DirectWeights, direct_weights
from headrace.back.transfer.intake import Intake
from headrace.back.transfer.shadow import Cut, Shadow, Unit, give_memory


class WeightUpdate:
    """One update of one model on this rank.

    `_left`: by parameter (id) the copies that have not come; `_rows`: those that have.
    """

    def __init__(self, origin: Origin, device: torch.device) -> None:
        self._shadow = Shadow(origin)
        self._origin = origin
        self._device = device
        params = [param for unit in self._shadow.units for param in unit.own]
        self._param = {id(param): param for param in params}
        self._left = {id(param): list(copies(param)) for param in params}
        self._pieces = {id(param): {one.name for one in local_pieces(param)} for param in params}
        self._rows: dict[int, list[Cut]] = {id(param): [] for param in params}
        self._filled: set[int] = set()
        names = {name for names in self._pieces.values() for name in names}
        self._intake = Intake(self._shadow.plan, names, device)
        self.num_bytes = 0

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of its pushes went so far."""
        return self._intake.seconds

    def push(self, source: Source, *, last: bool = False) -> None:
        """Takes in all tensors of a source. InvalidRequest if one of them is not the model's, comes
        twice, or holds NaN or Inf; then nothing has changed. `last`: see `finish`."""
        source = self._intake.checked(source)
        with self._intake.phase("copy"):
            self._take_in(source, last)
        self._intake.wait()

    def _take_in(self, source: Source, last: bool) -> None:
        threads = COPY_THREADS if self._device.type == "cpu" else DEVICE_COPY_THREADS
        with device_pool(threads, "weights") as pool:
            parts = self._parts(source, pool) if last else []
            for unit in self._shadow.units:
                if self._will_be_full(unit, source) and not unit.is_committed:
                    self._fill(unit, source, pool)
                    self.num_bytes += self._shadow.commit(unit)
                elif not last:
                    self._fill(unit, source, pool)
            for unit in parts:
                if self._is_full_itself(unit):
                    self.num_bytes += self._shadow.commit(unit)
                else:
                    self.num_bytes += self._shadow.commit_rows(unit, self._rows)

    def finish(self) -> None:
        """Nothing more comes: commits what has come in part. InvalidRequest if that is a part of
        what the model keeps packed."""
        self.push(_Nothing(), last=True)

    def direct(self) -> DirectWeights | None:
        """How the next update does without a second model, as far as this one has shown it."""
        return direct_weights(self._shadow.plan, self._shadow.held)

    def _will_be_full(self, unit: Unit, source: Source) -> bool:
        """Whether all that the unit needs has come, or comes with this source, and it needs any."""
        params = unit.params
        touched = any(self._touched(param, source) for param in params)
        return touched and all(self._completes(param, source) for param in params)

    def _touched(self, param: Param, source: Source) -> bool:
        has_come = bool(self._rows[id(param)]) or id(param) in self._filled
        return has_come or any(name in source.entries for name in self._pieces[id(param)])

    def _completes(self, param: Param, source: Source) -> bool:
        if (
            param.optional
            and param.name in self._origin.absent
            and not self._touched(param, source)
        ):
            return True
        return all(copy.name in source.entries for copy in self._left[id(param)])

    def _is_full_itself(self, unit: Unit) -> bool:
        return bool(unit.own) and all(id(param) in self._filled for param in unit.own)

    def _fill(self, unit: Unit, source: Source, pool: ThreadPoolExecutor) -> None:
        """Writes what has come for the unit's parameters."""
        params = [param for param in unit.params if id(param) not in self._filled]
        work = list(self._work(params, source))
        for param, _ in work:
            give_memory(param)

        def one(pair: tuple[Param, Copy]) -> None:
            write(pair[0], pair[1], source, scan_finite=False)

        list(pool.map(one, work))
        for param, copy in work:
            self._left[id(param)].remove(copy)
            self._rows[id(param)].append(copy.target)
        for param in params:
            lacking = param.optional and param.name in self._origin.absent
            if self._left[id(param)] and not (lacking and self._completes(param, source)):
                continue
            if self._left[id(param)]:
                give_memory(param)
                initialise(param)
            if id(param) not in self._filled:
                self._filled.add(id(param))
                param.filled()

    def _work(self, params: list[Param], source: Source) -> Iterator[tuple[Param, Copy]]:
        for param in params:
            for copy in self._left[id(param)]:
                if copy.name in source.entries:
                    yield param, copy

    def _parts(self, source: Source, pool: ThreadPoolExecutor) -> list[Unit]:
        """The units that stay without a part of what they need, filled and ready to be committed;
        InvalidRequest if one cannot be, before anything changes."""
        parts = []
        for unit in self._shadow.units:
            if unit.is_committed or self._will_be_full(unit, source):
                continue
            own = any(self._touched(param, source) for param in unit.own)
            held = not unit.own and any(self._touched(param, source) for param in unit.params)
            if not own and not held:
                continue
            self._fill(unit, source, pool)
            if not self._is_full_itself(unit):
                self._shadow.finish_part(unit)
            parts.append(unit)
        return parts


class _Nothing:
    """A source without tensors."""

    where = "nothing"
    entries: dict[str, object] = {}
