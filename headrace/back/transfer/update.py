"""New weights for a loaded model, in one or several pushes, while nothing of it runs.

A push is checked whole before anything changes: names, shapes, dtypes, and that all numbers are
finite. What it completes is in the live model when it returns. So an update of one push changes
everything or nothing; one of several leaves a mixture until `finish`, which its caller tells.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.back.models.load import Origin
from headrace.back.models.load.fill import (
    COPY_THREADS,
    DEVICE_COPY_THREADS,
    check,
    initialise,
    write,
)
from headrace.back.models.load.source import PLAIN, Source, renamed, separate_experts
from headrace.back.models.weights import Copy, Param, copies
from headrace.back.parallel.param import local_pieces
from headrace.back.platforms.device_threads import device_pool
from headrace.back.transfer.shadow import Cut, Shadow, Unit, give_memory
from headrace.base.errors import CheckpointError, InvalidRequest

_SCAN_ELEMENTS = 1 << 24


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
        self._pushed: set[str] = set()
        self.num_bytes = 0

    def push(self, source: Source, *, last: bool = False) -> None:
        """Takes in all tensors of a source. InvalidRequest if one of them is not the model's, comes
        twice, or holds NaN or Inf; then nothing has changed. `last`: see `finish`."""
        source = self._named(source)
        self._check(source)
        self._scan(source)
        self._pushed |= source.entries.keys()
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
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def finish(self) -> None:
        """Nothing more comes: commits what has come in part. InvalidRequest if that is a part of
        what the model keeps packed."""
        self.push(_Nothing(), last=True)

    def _named(self, source: Source) -> Source:
        plan = self._shadow.plan
        wanted = {piece.name for param in plan.params for piece in param.pieces}
        return separate_experts(renamed(source, plan.renamed), wanted)

    def _check(self, source: Source) -> None:
        try:
            check(self._shadow.plan, source, whole=False)
        except CheckpointError as error:
            raise InvalidRequest(f"weights: {error.message}", field="weights") from None
        for name in source.entries:
            if name in self._pushed:
                raise InvalidRequest(f"weights: {name} comes twice in one update", field="weights")
        for param in self._param.values():
            for piece in param.pieces:
                entry = source.entries.get(piece.name)
                if entry is None:
                    continue
                packed = param.on_groups is not None or param.on_blocks is not None
                if packed and (entry.dtype in PLAIN or not entry.dequantized):
                    raise InvalidRequest(
                        f"weights: {piece.name} is {entry.dtype}, and the checkpoint holds it "
                        "quantized: give it as the checkpoint does, or serve one of plain weights "
                        "with --quantization",
                        field="weights",
                    )

    def _scan(self, source: Source) -> None:
        """Refuses NaN and Inf; packed numbers tell of a damaged scale when they are written."""
        names = [name for name in source.entries if name in self._names]
        extremes = [
            (name, values.aminmax())
            for name in names
            for values in self._parts_of(name, source)
            if values.numel()
        ]
        if not extremes:
            return
        ends = torch.stack([end for _, both in extremes for end in both]).isfinite().view(-1, 2)
        for bad in (~ends.all(dim=1)).nonzero().flatten().tolist()[:1]:  # waits for the device once
            name = extremes[bad][0]
            where = source.entries[name].where
            raise InvalidRequest(
                f"weights: tensor {name!r} in {where} holds NaN or Inf", field="weights"
            )

    def _parts_of(self, name: str, source: Source) -> Iterator[torch.Tensor]:
        """A tensor in float32, some rows at a time."""
        entry = source.entries[name]
        if entry.quantized or not entry.shape:
            return
        rows = max(1, _SCAN_ELEMENTS // max(1, math.prod(entry.shape[1:])))
        for first in range(0, entry.shape[0], rows):
            cut = slice(first, min(first + rows, entry.shape[0]))
            shape = (cut.stop - cut.start, *entry.shape[1:])
            values = torch.empty(shape, dtype=torch.float32, device=self._device)
            whole = (slice(None),) * (len(shape) - 1)
            source.copy(name, entry.shape, (cut, *whole), values)
            yield values

    @functools.cached_property
    def _names(self) -> set[str]:
        return {name for names in self._pieces.values() for name in names}

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
