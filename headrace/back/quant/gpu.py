"""Weights of e4m3 numbers as GPUs keep them (kernels/linear_fp8): of checkpoints that store such
numbers, which are copied as they are, or made of floats while loading.

O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import replace
from threading import Lock

import torch

from headrace.back.kernels.linear_fp8.layout import FLOAT8, Fp8Weight
from headrace.back.parallel.bundle import CutGroup, Dim
from headrace.back.parallel.param import Copy, Param, copies
from headrace.back.quant.formats.groups import Groups
from headrace.back.quant.inputs import scale_of_inputs
from headrace.back.quant.kept import (
    BLOCKS,
    MICROSCALED,
    STORED_SCALE,
    KeptSchemes,
    common_name,
)
from headrace.back.quant.scheme import ONLINE_SCHEMES, Scheme, row_slices
from headrace.base.config.quantization import Numbers

FP8_STORED_SCALE = "fp8" + STORED_SCALE
GPU_SCHEMES: dict[str, int | None] = {
    "fp8": None,
    FP8_STORED_SCALE: None,
    BLOCKS: 128,
    MICROSCALED: 32,
}
"""Scheme -> inputs that share a scale; None: all of them."""
HELD_AS = {"fp8": "fp8", "fp8-tensor": "fp8", "fp8-block": BLOCKS, "mxfp8": MICROSCALED}
"""What is made while loading -> how it is kept."""
UNIT = 16
"""Inputs of a weight are a multiple of it, for the kernels."""
ONLINE_ELEMENTS = 1 << 25
"""Values quantized at a time."""


def stored_scheme(param: Param, kept: KeptSchemes) -> str | None:
    """The scheme in which all of a matrix is stored, if it can stay so: None where a split over
    ranks would cut a group."""
    scheme = common_name({kept.get(piece.name, "") for piece in param.pieces})
    changed = any(piece.scale != 1.0 or piece.transposed for piece in param.pieces)
    if len(param.shape) != 2 or scheme not in GPU_SCHEMES or changed or not served(param):
        return None
    try:
        for copy in copies(param):
            _groups_of(copy, param, GPU_SCHEMES[scheme])
    except CutGroup:
        return None
    return scheme


def served(param: Param) -> bool:
    """Whether the kernels take a matrix of this size."""
    assert param.tensor is not None, param
    return param.tensor.shape[1] % UNIT == 0


class StoredFp8Weight:
    """A weight [outputs, inputs] filled with the numbers of a checkpoint. `take` gives it to its
    layer."""

    def __init__(self, param: Param, scheme: str) -> None:
        self._param, self._group = param, GPU_SCHEMES[scheme]
        assert param.tensor is not None, param
        self._weight: Fp8Weight | None = _empty(param.tensor, self._group)
        if scheme == FP8_STORED_SCALE:
            scale_1 = torch.zeros(1, device=param.tensor.device)
            self._weight = replace(self._weight, input_scale_1=scale_1)
        self._lock = Lock()
        self._inputs = param.tensor.shape[1]
        param.packed_bytes = self._weight.num_bytes
        param.tensor = None
        param.on_groups = self._write

    def take(self) -> Fp8Weight:
        """The weight."""
        weight, self._weight = self._weight, None
        assert weight is not None, f"{self._param.name} was taken before"
        return weight

    def _write(self, copy: Copy, groups: Groups, numbers: Numbers) -> int | None:
        """Keeps one copy; the first of its rows with a scale of NaN or Inf, or None."""
        assert self._weight is not None and groups.zeros_RG is None, (copy, numbers)
        source, target = _groups_of(copy, self._param, self._group, self._inputs)
        scales = groups.scales_RG.float()
        scales = scales if scales.shape[1] == 1 else scales[:, source]
        rows, columns = copy.target
        bytes_OI = self._weight.values_OI.view(torch.uint8)
        bytes_OI[rows, columns] = groups.values_RC.view(torch.uint8).to(bytes_OI.device)
        self._take_scale(copy, groups)
        self._weight.scales_OG[rows, target] = scales.to(bytes_OI.device)
        bad = ~scales.isfinite().all(1)
        return int(bad.nonzero()[0]) if bad.any() else None

    def _take_scale(self, copy: Copy, groups: Groups) -> None:
        """Of parts that are multiplied together the largest: it is one input."""
        assert self._weight is not None
        held = self._weight.input_scale_1
        if held is None:
            return
        scale_1 = scale_of_inputs(copy, groups)
        with self._lock:
            torch.maximum(held, scale_1.to(held.device), out=held)


class OnlineFp8Weight:
    """A weight [outputs, inputs] that is quantized when it is full, by a scheme of HELD_AS. `take`
    gives it to its layer."""

    def __init__(self, param: Param, scheme: Scheme = ONLINE_SCHEMES["fp8"]) -> None:
        assert param.tensor is not None and param.tensor.dim() == 2, param
        self._param, self._scheme = param, scheme
        self._weight: Fp8Weight | None = None
        outputs, inputs = param.tensor.shape
        param.packed_bytes = outputs * (inputs + 4 * _num_groups(inputs, scheme.group))
        param.on_filled = self._quantize
        param.defer()

    def take(self) -> Fp8Weight:
        """The weight; a loader that does not announce full parameters has it quantized now."""
        if self._weight is None:
            self._quantize()
        weight, self._weight = self._weight, None
        assert weight is not None, f"{self._param.name} was taken before"
        return weight

    def _quantize(self) -> None:
        self._weight = quantize_weight(self._param.take(), self._scheme)


def quantize_weight(weight_OI: torch.Tensor, scheme: Scheme = ONLINE_SCHEMES["fp8"]) -> Fp8Weight:
    """By a scheme, some rows at a time: their float32 copies are small."""
    quantized, common = _empty(weight_OI, scheme.group), scheme.common(weight_OI)
    for rows in row_slices(*weight_OI.shape, scheme, ONLINE_ELEMENTS):
        bits, scales, _ = scheme.quantize(weight_OI[rows], common)
        quantized.values_OI.view(torch.int8)[rows] = bits
        quantized.scales_OG[rows] = scales
    return quantized


def _empty(like_OI: torch.Tensor, group: int | None) -> Fp8Weight:
    outputs, inputs = like_OI.shape
    groups = _num_groups(inputs, group)
    return Fp8Weight(
        torch.empty(outputs, inputs, dtype=FLOAT8, device=like_OI.device),
        torch.empty(outputs, groups, dtype=torch.float32, device=like_OI.device),
        group,
    )


def _num_groups(inputs: int, group: int | None) -> int:
    return 1 if group is None else -(-inputs // group)


def _groups_of(
    copy: Copy, param: Param, group: int | None, inputs: int | None = None
) -> tuple[slice, slice]:
    """The groups of a copy, in the checkpoint and in a weight of so many inputs; CutGroup if it
    cuts one."""
    if inputs is None:
        assert param.tensor is not None, param
        inputs = param.tensor.shape[1]
    dim = Dim(1, per=group or 0)
    here = copy.target[1]
    assert isinstance(here, slice)
    return dim.cut(copy.source, copy.shape), dim.cut((slice(0), here), (0, inputs))
