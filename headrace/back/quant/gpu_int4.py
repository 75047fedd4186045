"""Weights of 4-bit numbers as GPUs keep them (kernels/linear_int4): of checkpoints that store such
numbers, in safetensors or GGUF, or made of floats while loading.

A weight waits unpacked on its device, a byte a value, until its last piece is there. O outputs, I
inputs, G groups of inputs, R rows, B blocks of a row.
"""

from __future__ import annotations

from dataclasses import replace
from threading import Lock

import numpy as np
import torch

from headrace.back.kernels.linear_int4.layout import (
    LARGEST_LIFTED,
    OFFSET,
    ROWS,
    Int4Weight,
    empty,
    packed_bytes,
    write,
)
from headrace.back.parallel.bundle import CutGroup, Dim
from headrace.back.parallel.param import Copy, Param, StoredRows, copies
from headrace.back.quant.formats.groups import Groups
from headrace.back.quant.gguf_int4 import BLOCK_TYPES, FINE, Unpacked
from headrace.back.quant.kept import (
    INT8_ROWS,
    LEVELLED,
    NVFP4,
    ORDERED,
    WHOLE_INT4,
    KeptSchemes,
    check_order,
    normal_values,
)
from headrace.back.quant.scheme import ONLINE_SCHEMES, SCHEMES, Scheme
from headrace.base.config.quantization import Numbers
from headrace.base.errors import CheckpointError

INT4_SCHEMES: dict[str, Scheme] = {
    **{scheme.name: scheme for scheme in SCHEMES.values() if scheme.bits == 4},
    **{name: Scheme(name, 4, None, asymmetric=asym) for asym, name in WHOLE_INT4.items()},
    NVFP4: ONLINE_SCHEMES["nvfp4"],
    FINE: Scheme(FINE, 4, 16, asymmetric=True),
    **{name: Scheme(name, 4, size, floating=True) for name, (_, size) in LEVELLED.items()},
}
"""What is kept as it is, by name."""
UNIT = 16
"""Inputs of a weight are a multiple of it, for the kernels."""
ONLINE_ELEMENTS = 1 << 25
"""Values quantized at a time."""
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitudes of e2m1 numbers."""


def e2m1_bits(doubled_OI: torch.Tensor) -> torch.Tensor:
    """uint8: the bits of e2m1 numbers that are given as twice themselves (scheme.py)."""
    sizes = torch.tensor(_DOUBLED, device=doubled_OI.device)
    bits = torch.bucketize(doubled_OI.abs().long(), sizes)
    return (bits | (doubled_OI < 0).long() << 3).to(torch.uint8)


def stored_int4(param: Param, kept: KeptSchemes) -> str | None:
    """The scheme or type in which all of a matrix is stored, if it can stay so: None where a split
    over ranks would cut a group."""
    names = {kept.get(piece.name, "") for piece in param.pieces}
    changed = any(piece.scale != 1.0 or piece.transposed for piece in param.pieces)
    if len(param.shape) != 2 or len(names) != 1 or changed or not served(param):
        return None
    stored = names.pop()
    name, ordered, _ = stored.removesuffix(INT8_ROWS).partition(ORDERED)
    if name not in INT4_SCHEMES and name not in BLOCK_TYPES:
        return None
    if ordered and not all(_has_all_inputs(copy) for copy in copies(param)):
        return None
    per = BLOCK_TYPES[name].block if name in BLOCK_TYPES else INT4_SCHEMES[name].group
    assert param.tensor is not None, param
    try:
        for copy in copies(param):
            group_columns(copy, per, param.tensor.shape[1])
    except CutGroup:
        return None
    return stored


def _has_all_inputs(copy: Copy) -> bool:
    return copy.source[1] in (slice(None), slice(0, copy.shape[1]))


def served(param: Param) -> bool:
    """Whether the kernels take a matrix of this size."""
    assert param.tensor is not None, param
    return param.tensor.shape[1] % UNIT == 0


class StoredInt4Weight:
    """A weight [outputs, inputs] filled with the numbers of a checkpoint, of a scheme or a type.
    `take` gives it to its layer."""

    def __init__(self, param: Param, name: str) -> None:
        assert param.tensor is not None, param
        self._int8_rows = name.endswith(INT8_ROWS)
        name, ordered, _ = name.removesuffix(INT8_ROWS).partition(ORDERED)
        self._type = BLOCK_TYPES.get(name)
        self._scheme = INT4_SCHEMES[name if self._type is None else self._type.scheme]
        self._param, self._dtype, self._device = param, param.dtype, param.tensor.device
        self._outputs, self._inputs = param.tensor.shape
        self._waiting: Unpacked | None = None
        self._weight: Int4Weight | None = None
        self._lock = Lock()
        param.packed_bytes = _bytes_of(param, self._scheme)
        self._order_I: torch.Tensor | None = None
        if ordered:
            self._order_I = torch.empty(self._inputs, dtype=torch.int32, device=self._device)
            param.packed_bytes += self._order_I.nbytes
        param.tensor = None
        param.groups_on = self._device
        if self._type is None:
            param.on_groups = self._write
        else:
            param.on_blocks = self._write_blocks
        param.on_filled = self._pack

    def take(self) -> Int4Weight:
        """The weight; on the meta device nothing has filled it."""
        if self._device.type == "meta":
            self._waiting = self._empty()
            self._pack()
        weight, self._weight = self._weight, None
        assert weight is not None, f"{self._param.name} was taken before"
        return weight

    def _write(self, copy: Copy, groups: Groups, numbers: Numbers) -> int | None:
        """Keeps one copy; the first of its rows with a scale of NaN or Inf, or None."""
        source, target = group_columns(copy, self._scheme.group, self._inputs)
        if self._order_I is not None:
            groups = self._in_order(groups)
        scales = groups.scales_RG.float()
        scales = scales if scales.shape[1] == 1 else scales[:, source]
        unpacked = unpacked_of(groups, scales, source, self._scheme, numbers, copy)
        return self._keep(copy.target[0], copy.target[1], target, unpacked)

    def _in_order(self, groups: Groups) -> Groups:
        """With the inputs of a group side by side. All pieces have one order (kept.ORDERED)."""
        assert groups.group_C is not None and self._order_I is not None
        group_C, order = groups.group_C.sort(stable=True)
        self._order_I.copy_(order)
        return replace(groups, values_RC=groups.values_RC[:, order], group_C=group_C)

    def _write_blocks(self, copy: Copy, rows: StoredRows) -> int | None:
        """The same of blocks: their bytes are taken apart on the device."""
        assert self._type is not None
        kind = self._type
        blocks, _ = group_columns(copy, kind.block, self._inputs)
        _, target = group_columns(copy, self._scheme.group, self._inputs)
        cut = slice(blocks.start * kind.size, blocks.stop * kind.size)
        wanted = np.ascontiguousarray(rows.data[rows.order[copy.source[0]]][:, cut])
        data = torch.from_numpy(wanted).to(self._device).unflatten(1, (-1, kind.size))
        return self._keep(copy.target[0], copy.target[1], target, kind.unpack(data))

    def _keep(
        self, rows: slice | int, columns: slice | int, groups: slice, unpacked: Unpacked
    ) -> int | None:
        with self._lock:
            if self._waiting is None:
                self._waiting = self._empty()
        values_OI, scales_OG, minima_OG = self._waiting
        values, scales, minima = unpacked
        values_OI[rows, columns] = values.to(values_OI)
        scales_OG[rows, groups] = scales.to(scales_OG)
        if minima_OG is not None:
            assert minima is not None, self._param.name
            minima_OG[rows, groups] = minima.to(minima_OG)
        bad = ~scales.isfinite().all(1)
        if minima is not None:
            bad = bad | ~minima.isfinite().all(1)
        return int(bad.nonzero()[0]) if bad.any() else None

    def _empty(self) -> Unpacked:
        scheme, device = self._scheme, self._device
        groups = 1 if scheme.group is None else -(-self._inputs // scheme.group)
        numbers = [
            torch.empty(self._outputs, groups, dtype=self._dtype, device=device) for _ in range(2)
        ]
        values = torch.empty(self._outputs, self._inputs, dtype=torch.uint8, device=device)
        return values, numbers[0], numbers[1] if scheme.asymmetric else None

    def _pack(self) -> None:
        waiting, self._waiting = self._waiting, None
        assert waiting is not None, self._param.name
        packed = _packed(waiting, self._scheme, self._dtype)
        levels, _ = LEVELLED.get(self._scheme.name, ("e2m1", 0))
        packed = replace(packed, levels=levels)
        self._weight = replace(packed, order_I=self._order_I, int8_rows=self._int8_rows)


class OnlineInt4Weight:
    """A weight [outputs, inputs] that is quantized when it is full. `take` gives it to its
    layer."""

    def __init__(self, param: Param, scheme: Scheme) -> None:
        assert param.tensor is not None and param.tensor.dim() == 2, param
        self._param, self._scheme = param, scheme
        self._weight: Int4Weight | None = None
        param.packed_bytes = _bytes_of(param, scheme)
        param.on_filled = self._quantize
        param.defer()

    def take(self) -> Int4Weight:
        """The weight; a loader that does not announce full parameters has it quantized now."""
        if self._weight is None:
            self._quantize()
        weight, self._weight = self._weight, None
        assert weight is not None, f"{self._param.name} was taken before"
        return weight

    def _quantize(self) -> None:
        self._weight = quantize_int4(self._param.take(), self._scheme)


def quantize_int4(weight_OI: torch.Tensor, scheme: Scheme) -> Int4Weight:
    """By a scheme, some rows at a time: their float32 copies are small."""
    outputs, inputs = weight_OI.shape
    weight = empty(
        outputs, inputs, scheme.group, minima=scheme.asymmetric, dtype=weight_OI.dtype,
        device=weight_OI.device, floats=scheme.floating,
    )  # fmt: skip
    step, common = _step(inputs), scheme.common(weight_OI)
    for first in range(0, outputs, step):
        write(weight, first // ROWS, *made_of(weight_OI[first : first + step], scheme, common))
    return weight


def made_of(
    weight_OI: torch.Tensor, scheme: Scheme, common: torch.Tensor | None = None
) -> Unpacked:
    """What `write` takes, of floats; `common` as of Scheme.quantize."""
    values, scales, minima = scheme.quantize(weight_OI, common)
    if scheme.floating:
        return e2m1_bits(values), 2 * scales, None
    return values if scheme.asymmetric else values + OFFSET, scales, minima


def unpacked_of(
    groups: Groups,
    scales_RG: torch.Tensor,
    source: slice,
    scheme: Scheme,
    numbers: Numbers,
    copy: Copy,
) -> Unpacked:
    """What `write` takes, of a checkpoint's numbers, of which `source` are the groups."""
    if scheme.floating:
        check_scales(scales_RG, copy.name)
        return groups.values_RC, scales_RG, None
    values, minima = normal_values(groups, scales_RG, source, scheme, numbers, copy.name)
    check_order(groups, copy, scheme)
    return values if minima is not None else values + OFFSET, scales_RG, minima


def check_scales(scales: torch.Tensor, name: str) -> None:
    """That bfloat16 holds what kernels make of scales of e2m1 numbers."""
    finite = scales[scales.isfinite()]
    if finite.numel() and float(finite.max()) > LARGEST_LIFTED:
        raise CheckpointError(
            f"{name}: a scale is {float(finite.max()):g}, above {LARGEST_LIFTED:g}, the largest "
            "that the kernels of GPUs take",
            field="quantization_config",
        )


def _packed(unpacked: Unpacked, scheme: Scheme, dtype: torch.dtype) -> Int4Weight:
    values_OI, scales_OG, minima_OG = unpacked
    outputs, inputs = values_OI.shape
    weight = empty(
        outputs, inputs, scheme.group, minima=scheme.asymmetric, dtype=dtype,
        device=values_OI.device, floats=scheme.floating,
    )  # fmt: skip
    if values_OI.device.type == "meta":
        return weight
    step = _step(inputs)
    for first in range(0, outputs, step):
        rows = slice(first, first + step)
        minima = None if minima_OG is None else minima_OG[rows]
        write(weight, first // ROWS, values_OI[rows], scales_OG[rows], minima)
    return weight


def _step(inputs: int) -> int:
    """Rows at a time, whole tiles."""
    return ROWS * max(1, ONLINE_ELEMENTS // (ROWS * max(1, inputs)))


def _bytes_of(param: Param, scheme: Scheme) -> int:
    assert param.tensor is not None, param
    outputs, inputs = param.tensor.shape
    return packed_bytes(outputs, inputs, scheme.group, minima=scheme.asymmetric, dtype=param.dtype)


def group_columns(copy: Copy, per: int | None, inputs: int) -> tuple[slice, slice]:
    """The groups of a copy, in the checkpoint and in a weight of so many inputs; CutGroup if it
    cuts one."""
    dim = Dim(1, per=per or 0)
    here = copy.target[1]
    assert isinstance(here, slice)
    return dim.cut(copy.source, copy.shape), dim.cut((slice(0), here), (0, inputs))
