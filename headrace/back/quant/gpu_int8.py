"""Weights of 8-bit integers as GPUs keep them (kernels/linear_int8): of checkpoints that store such
numbers, in safetensors or GGUF, or made of floats while loading.

O outputs, I inputs, G groups of inputs, R rows, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.back.kernels.linear_blocks.layout import LEVELS
from headrace.back.kernels.linear_int8.layout import Int8Weight, empty, packed_bytes
from headrace.back.parallel.bundle import CutGroup
from headrace.back.parallel.param import Copy, Param, StoredRows, copies
from headrace.back.quant import gguf_vectors as vectors
from headrace.back.quant.formats.groups import Groups
from headrace.back.quant.gguf_int4 import six_bits
from headrace.back.quant.gpu_int4 import group_columns
from headrace.back.quant.inputs import InputRange
from headrace.back.quant.kept import (
    INT8_ROWS,
    STORED_SCALE,
    KeptSchemes,
    bare,
    check_order,
    common_name,
    normal_values,
)
from headrace.back.quant.scheme import SCHEMES, Scheme
from headrace.base.config.quantization import Numbers

INT8_SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme for scheme in SCHEMES.values() if scheme.bits == 8 and not scheme.floating
}
"""What is kept as it is, by name."""
UNIT = 16
"""Inputs of a weight are a multiple of it, for the kernels."""
ONLINE_ELEMENTS = 1 << 25
"""Values quantized at a time."""
Unpacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of some rows: integers, scales [R, G], and minima where there are some."""


@dataclass(frozen=True)
class ByteBlocks:
    """A type of GGUF: `block` inputs in `size` bytes, `group` of which share a scale. `unpack`
    takes uint8 [R, B, size]; `minima`: it gives some."""

    block: int
    size: int
    group: int
    unpack: Callable[[torch.Tensor], Unpacked]
    minima: bool = False


def _float16(bytes_RBN: torch.Tensor) -> torch.Tensor:
    return bytes_RBN.contiguous().view(torch.float16).float()


def _planes(bytes_RBN: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields of so many bits: of all bytes the lowest ones, then the next, [R, B, 8 / bits * N]."""
    mask = (1 << bits) - 1
    return torch.cat([bytes_RBN >> at & mask for at in range(0, 8, bits)], -1)


def _q8_0(blocks_RBN: torch.Tensor) -> Unpacked:
    """A scale, then the integers."""
    values = blocks_RBN[..., 2:].contiguous().view(torch.int8)
    return values.flatten(1), _float16(blocks_RBN[..., :2]).flatten(1), None


def _fifth_bits(bytes_RBN: torch.Tensor) -> torch.Tensor:
    """32 bits, as 0 or 16."""
    at = torch.arange(8, device=bytes_RBN.device)
    return (bytes_RBN[..., None] >> at & 1).flatten(-2) << 4


def _q5_0(blocks_RBN: torch.Tensor) -> Unpacked:
    """A scale, the fifth bits of 32 values, and their low halves, all less 16: the first sixteen in
    the low halves of the bytes."""
    values = (_planes(blocks_RBN[..., 6:], 4) | _fifth_bits(blocks_RBN[..., 2:6])).to(torch.int8)
    return (values - 16).flatten(1), _float16(blocks_RBN[..., :2]).flatten(1), None


def _q5_1(blocks_RBN: torch.Tensor) -> Unpacked:
    """A scale, what is added, then as Q5_0 without the 16."""
    values = (_planes(blocks_RBN[..., 8:], 4) | _fifth_bits(blocks_RBN[..., 4:8])).to(torch.int8)
    scales, added = (_float16(blocks_RBN[..., at : at + 2]).flatten(1) for at in (0, 2))
    return values.flatten(1), scales, -added


def _q5_k(blocks_RBN: torch.Tensor) -> Unpacked:
    """Two scales and eight multipliers of each as Q4_K has them, a bit for each of 8 x 32 inputs,
    then four times 32 bytes of two halves."""
    outer = _float16(blocks_RBN[..., :4])
    scales, minima = six_bits(blocks_RBN[..., 4:16])
    high = _planes(blocks_RBN[..., 16:48], 1).unflatten(-1, (8, 32))
    low = _planes(blocks_RBN[..., 48:].unflatten(-1, (4, 32)), 4).flatten(-2).unflatten(-1, (8, 32))
    values = (low | high << 4).to(torch.int8).flatten(1)
    return values, (scales * outer[..., :1]).flatten(1), (minima * outer[..., 1:]).flatten(1)


def _levels(indices: torch.Tensor) -> torch.Tensor:
    return torch.tensor(LEVELS, dtype=torch.int8, device=indices.device)[indices.long()]


def _iq4_nl(blocks_RBN: torch.Tensor) -> Unpacked:
    """A scale, then indices of levels."""
    values = _levels(_planes(blocks_RBN[..., 2:], 4))
    return values.flatten(1), _float16(blocks_RBN[..., :2]).flatten(1), None


def _iq4_xs(blocks_RBN: torch.Tensor) -> Unpacked:
    """A scale, upper bits of eight multipliers, their lower ones, all less 32, then eight times 16
    bytes of indices."""
    at = torch.arange(0, 8, 2, device=blocks_RBN.device)
    high = (blocks_RBN[..., 2:4, None] >> at & 3).flatten(-2)
    low = torch.stack((blocks_RBN[..., 4:8] & 15, blocks_RBN[..., 4:8] >> 4), -1).flatten(-2)
    scales = ((low | high << 4).float() - 32) * _float16(blocks_RBN[..., :2])
    values = _levels(_planes(blocks_RBN[..., 8:].unflatten(-1, (8, 16)), 4))
    return values.flatten(1), scales.flatten(1), None


def _q6_k(blocks_RBN: torch.Tensor) -> Unpacked:
    """Of 128 inputs 64 bytes of low halves and 32 of upper bits, all less 32; a scale of 8 bits for
    16 inputs, and one for all."""
    low = _planes(blocks_RBN[..., :128].unflatten(-1, (2, 64)), 4)
    high = _planes(blocks_RBN[..., 128:192].unflatten(-1, (2, 32)), 2)
    values = (low | high << 4).to(torch.int8) - 32
    small = blocks_RBN[..., 192:208].contiguous().view(torch.int8).float()
    return values.flatten(1), (small * _float16(blocks_RBN[..., 208:210])).flatten(1), None


def _q3_k(blocks_RBN: torch.Tensor) -> Unpacked:
    """A bit for each of 8 x 32 inputs, that takes off 4 where it is not set; of 128 inputs 32 bytes
    of two bits; sixteen scales of 6 bits less 32, and one for all."""
    high = _planes(blocks_RBN[..., :32], 1)
    low = _planes(blocks_RBN[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-2)
    values = low.to(torch.int8) - (1 - high.to(torch.int8)) * 4
    scales = _planes(blocks_RBN[..., 96:104], 4) | _planes(blocks_RBN[..., 104:108], 2) << 4
    whole = (scales.float() - 32) * _float16(blocks_RBN[..., 108:110])
    return values.flatten(1), whole.flatten(1), None


def _vectors(numbers: Callable[[vectors.U8], vectors.WholeNumbers]) -> Callable[..., Unpacked]:
    """Of a type whose values are vectors of a grid, which the host looks up."""

    def unpack(blocks_RBN: torch.Tensor) -> Unpacked:
        rows, device = len(blocks_RBN), blocks_RBN.device
        values, scales = numbers(np.ascontiguousarray(blocks_RBN.flatten(0, 1).cpu().numpy()))
        both = (torch.from_numpy(one).to(device).view(rows, -1) for one in (values, scales))
        return next(both), next(both), None

    return unpack


BYTE_TYPES = {
    "Q8_0": ByteBlocks(32, 34, 32, _q8_0),
    "Q5_0": ByteBlocks(32, 22, 32, _q5_0),
    "Q5_1": ByteBlocks(32, 24, 32, _q5_1, minima=True),
    "Q5_K": ByteBlocks(256, 176, 32, _q5_k, minima=True),
    "IQ4_NL": ByteBlocks(32, 18, 32, _iq4_nl),
    "IQ4_XS": ByteBlocks(256, 136, 32, _iq4_xs),
    "Q6_K": ByteBlocks(256, 210, 16, _q6_k),
    "Q3_K": ByteBlocks(256, 110, 16, _q3_k),
    "IQ1_S": ByteBlocks(256, 50, 32, _vectors(vectors.iq1_s)),
    "IQ1_M": ByteBlocks(256, 56, 16, _vectors(vectors.iq1_m)),
    "IQ2_XXS": ByteBlocks(256, 66, 32, _vectors(vectors.iq2_xxs)),
    "IQ2_XS": ByteBlocks(256, 74, 16, _vectors(vectors.iq2_xs)),
    "IQ2_S": ByteBlocks(256, 82, 16, _vectors(vectors.iq2_s)),
    "IQ3_XXS": ByteBlocks(256, 98, 32, _vectors(vectors.iq3_xxs)),
    "IQ3_S": ByteBlocks(256, 110, 32, _vectors(vectors.iq3_s)),
}
"""Types of GGUF that are kept as bytes, by name. Source: ggml-quants.c of llama.cpp, b4000."""


def stored_int8(param: Param, kept: KeptSchemes) -> str | None:
    """The scheme or type in which all of a matrix is stored, if it can stay so: None where a split
    over ranks would cut a group."""
    stored = common_name({kept.get(piece.name, "") for piece in param.pieces})
    changed = any(piece.scale != 1.0 or piece.transposed for piece in param.pieces)
    if len(param.shape) != 2 or stored is None or changed:
        return None
    name = bare(stored)
    if (name not in INT8_SCHEMES and name not in BYTE_TYPES) or not served(param, _group(name)):
        return None
    assert param.tensor is not None, param
    per = BYTE_TYPES[name].block if name in BYTE_TYPES else _group(name)
    try:
        for copy in copies(param):
            group_columns(copy, per, param.tensor.shape[1])
    except CutGroup:
        return None
    return stored


def served(param: Param, group: int | None) -> bool:
    """Whether the kernels take a matrix of this size."""
    assert param.tensor is not None, param
    inputs = param.tensor.shape[1]
    return inputs % UNIT == 0 and inputs % (group or 1) == 0


def _group(name: str) -> int | None:
    return BYTE_TYPES[name].group if name in BYTE_TYPES else INT8_SCHEMES[name].group


class StoredInt8Weight:
    """A weight [outputs, inputs] filled with the numbers of a checkpoint, of a scheme or a type.
    `take` gives it to its layer."""

    def __init__(self, param: Param, name: str) -> None:
        assert param.tensor is not None, param
        fixed, name = name.endswith(STORED_SCALE), name.removesuffix(STORED_SCALE)
        int8_rows, name = name.endswith(INT8_ROWS), name.removesuffix(INT8_ROWS)
        self._name, self._group, self._param = name, _group(name), param
        outputs, self._inputs = param.tensor.shape
        self._weight: Int8Weight | None = empty(
            outputs, self._inputs, self._group, device=param.tensor.device, int8_rows=int8_rows,
            minima=name in BYTE_TYPES and BYTE_TYPES[name].minima,
        )  # fmt: skip
        self._range = InputRange() if fixed else None
        param.groups_on = param.tensor.device
        param.packed_bytes = self._weight.num_bytes
        param.tensor = None
        if name in BYTE_TYPES:
            param.on_blocks = self._write_blocks
        else:
            param.on_groups = self._write

    def take(self) -> Int8Weight:
        """The weight."""
        weight, self._weight = self._weight, None
        assert weight is not None, f"{self._param.name} was taken before"
        if self._range is None:
            return weight
        scale, zero = self._range.fixed or (1.0, 0)
        inputs_1 = torch.full((1,), scale, dtype=torch.float32, device=weight.device)
        zero_1 = torch.full_like(inputs_1, zero) if zero else None
        return replace(weight, inputs_1=inputs_1, zero_1=zero_1)

    def _write(self, copy: Copy, groups: Groups, numbers: Numbers) -> int | None:
        """Keeps one copy; the first of its rows with a scale of NaN or Inf, or None."""
        scheme = INT8_SCHEMES[self._name]
        source, target = group_columns(copy, self._group, self._inputs)
        scales = groups.scales_RG.float()
        scales = scales if scales.shape[1] == 1 else scales[:, source]
        values, _ = normal_values(groups, scales, source, scheme, numbers, copy.name)
        check_order(groups, copy, scheme)
        if self._range is not None:
            self._range.take(copy, groups, numbers)
        return self._keep(copy, target, (values, scales, None))

    def _write_blocks(self, copy: Copy, rows: StoredRows) -> int | None:
        """The same of blocks: their bytes are taken apart on the device."""
        kind = BYTE_TYPES[self._name]
        blocks, _ = group_columns(copy, kind.block, self._inputs)
        _, target = group_columns(copy, kind.group, self._inputs)
        cut = slice(blocks.start * kind.size, blocks.stop * kind.size)
        wanted = np.ascontiguousarray(rows.data[rows.order[copy.source[0]]][:, cut])
        data = torch.from_numpy(wanted).to(self._param.groups_on).unflatten(1, (-1, kind.size))
        return self._keep(copy, target, kind.unpack(data))

    def _keep(self, copy: Copy, groups: slice, unpacked: Unpacked) -> int | None:
        assert self._weight is not None, copy
        rows, columns = copy.target
        values, scales, minima = unpacked
        self._weight.values_OI[rows, columns] = values.to(self._weight.values_OI)
        self._weight.scales_OG[rows, groups] = scales.to(self._weight.scales_OG)
        bad = ~scales.isfinite().all(1)
        if minima is not None:
            assert self._weight.minima_OG is not None, self._name
            self._weight.minima_OG[rows, groups] = minima.to(self._weight.minima_OG)
            bad = bad | ~minima.isfinite().all(1)
        return int(bad.nonzero()[0]) if bad.any() else None


class OnlineInt8Weight:
    """A weight [outputs, inputs] that is quantized when it is full. `take` gives it to its
    layer."""

    def __init__(self, param: Param, scheme: Scheme) -> None:
        assert param.tensor is not None and param.tensor.dim() == 2, param
        self._param, self._scheme = param, scheme
        self._weight: Int8Weight | None = None
        param.packed_bytes = packed_bytes(*param.tensor.shape, scheme.group)
        param.on_filled = self._quantize
        param.defer()

    def take(self) -> Int8Weight:
        """The weight; a loader that does not announce full parameters has it quantized now."""
        if self._weight is None:
            self._quantize()
        weight, self._weight = self._weight, None
        assert weight is not None, f"{self._param.name} was taken before"
        return weight

    def _quantize(self) -> None:
        self._weight = quantize_int8(self._param.take(), self._scheme)


def quantize_int8(weight_OI: torch.Tensor, scheme: Scheme) -> Int8Weight:
    """By a scheme, some rows at a time: their float32 copies are small."""
    outputs, inputs = weight_OI.shape
    weight = empty(outputs, inputs, scheme.group, device=weight_OI.device)
    step = max(1, ONLINE_ELEMENTS // max(1, inputs))
    for first in range(0, outputs, step):
        rows = slice(first, first + step)
        values, scales, _ = scheme.quantize(weight_OI[rows])
        weight.values_OI[rows] = values
        weight.scales_OG[rows] = scales
    return weight
