"""What every push is checked for before anything changes: names, shapes, dtypes, and that all
numbers are finite."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from headrace.back.models.load.fill import check
from headrace.back.models.load.source import PLAIN, Source, renamed, separate_experts
from headrace.back.models.weights import WeightPlan
from headrace.back.transfer.sources import TensorSource
from headrace.base.errors import CheckpointError, InvalidRequest

_SCAN_ELEMENTS = 1 << 24


class Intake:
    """Of one update. `names`: tensors of which this rank takes a part; `seconds`: where its time
    went, of a GPU's work under "wait"."""

    def __init__(self, plan: WeightPlan, names: Collection[str], device: torch.device) -> None:
        self._plan, self._names, self._device = plan, names, device
        pieces = [(param, piece.name) for param in plan.params for piece in param.pieces]
        self._wanted = {name for _, name in pieces}
        self._packed = [
            name
            for param, name in pieces
            if param.on_groups is not None or param.on_blocks is not None
        ]
        self._pushed: set[str] = set()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block as `name`."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        with self.phase("wait"):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def checked(self, source: Source) -> Source:
        """The source by the model's names. InvalidRequest if a tensor is not the model's, came
        before, or holds NaN or Inf."""
        with self.phase("check"):
            source = separate_experts(renamed(source, self._plan.renamed), self._wanted)
            self._check(source)
        with self.phase("scan"):
            self._scan(source)
        self._pushed |= source.entries.keys()
        return source

    def _check(self, source: Source) -> None:
        try:
            check(self._plan, source, whole=False)
        except CheckpointError as error:
            raise InvalidRequest(f"weights: {error.message}", field="weights") from None
        for name in source.entries:
            if name in self._pushed:
                raise InvalidRequest(f"weights: {name} comes twice in one update", field="weights")
        for name in self._packed:
            entry = source.entries.get(name)
            if entry is not None and (entry.dtype in PLAIN or not entry.dequantized):
                raise InvalidRequest(
                    f"weights: {name} is {entry.dtype}, and the checkpoint holds it quantized: give "
                    "it as the checkpoint does, or serve one of plain weights with --quantization",
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
        """A tensor in memory of the device, or in float32, some rows at a time."""
        entry = source.entries[name]
        if entry.quantized or not entry.shape:
            return
        if isinstance(source, TensorSource) and source.tensor(name).device == self._device:
            yield source.tensor(name)
            return
        rows = max(1, _SCAN_ELEMENTS // max(1, math.prod(entry.shape[1:])))
        for first in range(0, entry.shape[0], rows):
            cut = slice(first, min(first + rows, entry.shape[0]))
            shape = (cut.stop - cut.start, *entry.shape[1:])
            values = torch.empty(shape, dtype=torch.float32, device=self._device)
            whole = (slice(None),) * (len(shape) - 1)
            source.copy(name, entry.shape, (cut, *whole), values)
            yield values
