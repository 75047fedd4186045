"""A safetensors checkpoint with quantized weights as a source of plain ones: each is dequantized, a
run of rows at a time, as it is copied to where the model wants it.

On a device the stored tensors are brought there first, and become floats there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import torch

from headrace.back.models.load.safetensors import TORCH_DTYPES, SafetensorsSource
from headrace.back.models.load.source import HOST, CheckpointTensor
from headrace.back.parallel.param import StoredRows
from headrace.back.quant.cache_scales import CacheScales
from headrace.back.quant.formats import KEPT_READERS, WHOLE, reader_of
from headrace.back.quant.formats.groups import Groups, joined
from headrace.back.quant.kept import BITSANDBYTES, kept_scheme, levelled_scheme
from headrace.base.config.cache_scales import CACHE_ZEROS, cache_scale
from headrace.base.config.quantization import Numbers, StoredQuantization
from headrace.base.config.quantized_tensors import (
    QuantizedTensor,
    find_quantized,
)
from headrace.base.config.resolved import Decision
from headrace.base.errors import CheckpointError

HOST_ELEMENTS, DEVICE_ELEMENTS = 1 << 20, 1 << 25
"""Values that are floats at once: on the host what a core's cache holds."""


class QuantizedSource:
    """The tensors of `files`, the quantized weights under their own names."""

    def __init__(self, files: SafetensorsSource, quantization: StoredQuantization) -> None:
        self.where = files.where
        self._files, self._quantization = files, quantization
        tensors = find_quantized(quantization, files.entries, files.content, files.where)
        self._weights = tensors.weights
        self._scales = tensors.activation_scales
        hidden = tensors.claimed | tensors.activation_scales
        plain = {name: entry for name, entry in files.entries.items() if name not in hidden}
        self.entries: Mapping[str, CheckpointTensor] = plain | {
            name: self._entry(weight) for name, weight in tensors.weights.items()
        }

    def _entry(self, weight: QuantizedTensor) -> CheckpointTensor:
        values = self._files.entries[weight.members["values"]]
        asked = weight.numbers.activations
        whole = asked is None or asked.symmetric or "input_zeros" in weight.members
        return CheckpointTensor(
            shape=weight.shape,
            dtype=weight.kind,
            where=values.where,
            order=values.order,
            dequantized=True,
            scheme=self._scheme(weight),
            activations=asked,
            input_scale=whole and "inputs" in weight.members,
        )

    def _scheme(self, weight: QuantizedTensor) -> str:
        if weight.numbers.arrangement in BITSANDBYTES:
            scales = self._files.entries[weight.members["scales"]]
            return levelled_scheme(weight, math.prod(scales.shape)) or ""
        return kept_scheme(weight, lambda: self._order(weight)) or ""

    def _order(self, weight: QuantizedTensor) -> torch.Tensor:
        """The group of each input, where it is stored."""
        return self._member(weight.members["order"], (), (slice(None),), HOST)

    def decisions(self) -> tuple[Decision, ...]:
        """What of the checkpoint is not made use of."""
        if not self._quantization.rules:
            why = "it is to be made while loading, which --quantization asks for (fp8, int8, ...)"
            return (Decision("quantization", self._quantization.method, "floats, as stored", why),)
        scales = [name for name in self._scales if cache_scale(name) is None]
        if not scales:
            return ()
        why = "activations get scales as they come"
        return (Decision("scales", f"{len(scales)} stored", "not used", why),)

    def cache_scales(self) -> CacheScales | None:
        """Those of the KV cache; CheckpointError names one that is no positive number. None: there
        are none."""
        scales: dict[str, dict[str, torch.Tensor]] = {}
        for name in sorted(self._scales):
            if CACHE_ZEROS.fullmatch(name) and bool(self._member(name, (), (), HOST).any()):
                raise CheckpointError(
                    f"{self.where}: {name} is not 0; keys and values are quantized without zero "
                    "points"
                )
            of = cache_scale(name)
            if of is None:
                continue
            scale = self._member(name, (), (), HOST).float()
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise CheckpointError(
                    f"{self.where}: {name} is {scale.flatten()[:4].tolist()}; the scale of a KV "
                    "cache must be a positive number"
                )
            for half in of.half:
                if scales.setdefault(of.module, {}).setdefault(half, scale) is not scale:
                    raise CheckpointError(
                        f"{self.where}: {name} is a second {half} scale of the KV cache of "
                        f"{of.module}"
                    )
        return CacheScales(scales, self.where) if scales else None

    def copy(
        self, name: str, shape: tuple[int, ...], source: tuple[slice, ...], target: torch.Tensor
    ) -> None:
        """Writes `weight[source]`, dequantized in float32, in the target's dtype."""
        weight = self._weights.get(name)
        if weight is None:
            self._files.copy(name, shape, source, target)
            return
        *outer, rows, columns = (
            slice(*cut.indices(size)) for cut, size in zip(source, shape, strict=True)
        )
        for place in product(*(range(cut.stop - cut.start) for cut in outer)):
            index = tuple(cut.start + i for cut, i in zip(outer, place, strict=True))
            self._copy_matrix(weight, index, rows, columns, target[place])

    def _copy_matrix(
        self,
        weight: QuantizedTensor,
        index: tuple[int, ...],
        rows: slice,
        columns: slice,
        target: torch.Tensor,
    ) -> None:
        on_host = target.device.type == "cpu"
        width = max(1, columns.stop - columns.start)
        step = max(32, (HOST_ELEMENTS if on_host else DEVICE_ELEMENTS) // width // 32 * 32)
        if weight.numbers.arrangement in WHOLE:
            step = max(1, rows.stop - rows.start)

        def read(role: str, *cuts: slice) -> torch.Tensor:
            return self._member(weight.members[role], index, cuts, target.device)

        reader = reader_of(weight.numbers.arrangement)
        for first in range(rows.start, rows.stop, step):
            part = slice(first, min(first + step, rows.stop))
            groups = reader(weight, read, part, columns)
            at = slice(part.start - rows.start, part.stop - rows.start)
            target[at].copy_(groups.dequantized())

    def _member(
        self, name: str, index: tuple[int, ...], cuts: tuple[slice, ...], device: torch.device
    ) -> torch.Tensor:
        entry = self._files.entries[name]
        lead = tuple(slice(i, i + 1) for i in index) if len(entry.shape) > len(index) else ()
        missing = len(entry.shape) - len(lead) - len(cuts)
        cuts = (*lead, *cuts, *(slice(None),) * missing)
        sizes = [
            len(range(*cut.indices(size))) for cut, size in zip(cuts, entry.shape, strict=True)
        ]
        part = torch.empty(sizes, dtype=TORCH_DTYPES[entry.dtype], device=device)
        self._files.copy(name, entry.shape, cuts, part)
        return part.view(sizes[len(lead) :])

    def blocks(self, name: str) -> StoredRows:
        """There are none in this format."""
        return self._files.blocks(name)

    def groups(
        self, name: str, source: tuple[slice, ...], device: torch.device = HOST
    ) -> tuple[Groups, Numbers]:
        """A rectangle as it is stored, of three dimensions that of one expert; on a device some
        rows at a time, whose words are wide while they are taken apart."""
        weight = self._weights[name]
        *outer, rows, columns = (
            slice(*cut.indices(size)) for cut, size in zip(source, weight.shape, strict=True)
        )
        assert all(cut.stop == cut.start + 1 for cut in outer), (name, source)
        index = tuple(cut.start for cut in outer)

        def read(role: str, *cuts: slice) -> torch.Tensor:
            return self._member(weight.members[role], index, cuts, device)

        reader = KEPT_READERS[weight.numbers.arrangement]
        width = max(1, columns.stop - columns.start)
        step = max(32, DEVICE_ELEMENTS // width // 32 * 32) if device.type != "cpu" else rows.stop
        parts = [
            reader(weight, read, slice(first, min(first + step, rows.stop)), columns)
            for first in range(rows.start, rows.stop, step)
        ]
        return joined(parts), weight.numbers

    def close(self) -> None:
        """Closes the files."""
        self._files.close()
