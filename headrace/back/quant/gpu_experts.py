"""The weights of a mixture's experts as GPUs keep them (kernels/experts_fp8, experts_int4,
experts_bytes): made of floats once a layer's are loaded, or taken as the checkpoint stores them.

X experts, E width, I this rank's inner size of an expert; O outputs and I inputs of a matrix, G
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
import torch

from headrace.back.kernels.experts_bytes import layout as eight
from headrace.back.kernels.experts_bytes.layout import ByteForm
from headrace.back.kernels.experts_fp8 import layout as fp8
from headrace.back.kernels.experts_int4 import layout as int4
from headrace.back.kernels.experts_int4.layout import Int4Form
from headrace.back.parallel.bundle import CutGroup, Dim
from headrace.back.parallel.param import Copy, Param, StoredRows, copies, local_shape
from headrace.back.quant.experts import Floats, MatricesOf, cuts, part_of
from headrace.back.quant.formats.groups import Groups
from headrace.back.quant.gguf_int4 import BLOCK_TYPES, BlockType
from headrace.back.quant.gpu import GPU_SCHEMES, HELD_AS, scale_of_inputs
from headrace.back.quant.gpu_int4 import INT4_SCHEMES, made_of, unpacked_of
from headrace.back.quant.gpu_int8 import BYTE_TYPES, INT8_SCHEMES, ByteBlocks
from headrace.back.quant.kept import (
    LEVELLED,
    MICROSCALED,
    STORED_SCALE,
    bare,
    check_order,
    common_name,
    normal_values,
)
from headrace.back.quant.scheme import ONLINE_SCHEMES
from headrace.back.quant.stored import Stored
from headrace.base.config.quantization import Numbers

UNIT = 16
"""Inputs of a matrix are a multiple of it, for the kernels."""
GpuExperts = fp8.Fp8Experts | int4.Int4Experts | eight.ByteExperts
Numbers3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Values [O, I], scales and minima [O, G]."""


@dataclass(frozen=True)
class MixtureSizes:
    """Of a layer's experts on this rank."""

    experts: int
    width: int
    inner: int

    def of(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a "gate", an "up" or a "down"."""
        return (self.width, self.inner) if name == "down" else (self.inner, self.width)


class Kept(Protocol):
    """What keeps a scheme's numbers."""

    def empty(self, sizes: MixtureSizes, dtype: torch.dtype, device: torch.device) -> GpuExperts:
        """Experts to be filled."""
        ...

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """Of one matrix."""
        ...

    def write(self, experts: GpuExperts, name: str, expert: int, numbers: Numbers3) -> None:
        """Fills one matrix."""
        ...

    def quantize(self, weight_OI: torch.Tensor) -> Numbers3:
        """What `write` takes, of floats."""
        ...


@dataclass(frozen=True)
class KeptFp8:
    """e4m3 numbers; `group`: see ScaledMatrices. `online`: the scheme of those made while loading;
    `fixed`: the checkpoint holds scales of their inputs."""

    group: int | None
    online: str = "fp8"
    fixed: bool = False

    def empty(self, sizes: MixtureSizes, dtype: torch.dtype, device: torch.device) -> GpuExperts:
        """See Kept."""
        return fp8.empty_experts(
            self.group, sizes.experts, sizes.width, sizes.inner, device=device, fixed=self.fixed
        )

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """See Kept."""
        return fp8.matrix_bytes(outputs, inputs, self.group)

    def write(self, experts: GpuExperts, name: str, expert: int, numbers: Numbers3) -> None:
        """See Kept; values are bits or numbers."""
        assert isinstance(experts, fp8.Fp8Experts)
        _write_rows(experts.down if name == "down" else experts.up, name, expert, numbers)

    def quantize(self, weight_OI: torch.Tensor) -> Numbers3:
        """See Kept."""
        return ONLINE_SCHEMES[self.online].quantize(weight_OI)


def _write_rows(matrices: fp8.ScaledMatrices, name: str, expert: int, numbers: Numbers3) -> None:
    values_OI, scales_OG, _ = numbers
    rows = slice(0, len(values_OI))
    if name == "up":
        rows = slice(len(values_OI), 2 * len(values_OI))
    target = matrices.values_XOI[expert].view(torch.uint8)
    target[rows] = values_OI.view(torch.uint8).to(target.device)
    matrices.scales_XGO[expert, :, rows] = scales_OG.T.to(target.device)


@dataclass(frozen=True)
class KeptBytes:
    """8-bit integers, and MXFP8; `online`: the scheme of those made while loading."""

    form: ByteForm
    online: str

    def empty(self, sizes: MixtureSizes, dtype: torch.dtype, device: torch.device) -> GpuExperts:
        """See Kept."""
        return eight.empty_experts(
            self.form, sizes.experts, sizes.width, sizes.inner, device=device
        )

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """See Kept."""
        return fp8.matrix_bytes(outputs, inputs, self.form.group)

    def write(self, experts: GpuExperts, name: str, expert: int, numbers: Numbers3) -> None:
        """See Kept; values are bits or numbers."""
        assert isinstance(experts, eight.ByteExperts) and numbers[2] is None
        _write_rows(experts.down if name == "down" else experts.up, name, expert, numbers)

    def quantize(self, weight_OI: torch.Tensor) -> Numbers3:
        """See Kept."""
        return ONLINE_SCHEMES[self.online].quantize(weight_OI)


@dataclass(frozen=True)
class KeptInt4:
    """4-bit numbers of a scheme."""

    scheme: str

    @property
    def form(self) -> Int4Form:
        """What the numbers are."""
        scheme = INT4_SCHEMES[self.scheme]
        return Int4Form(scheme.group, scheme.asymmetric, scheme.floating)

    def empty(self, sizes: MixtureSizes, dtype: torch.dtype, device: torch.device) -> GpuExperts:
        """See Kept."""
        return int4.empty_experts(
            self.form, sizes.experts, sizes.width, sizes.inner, dtype=dtype, device=device
        )

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """See Kept."""
        return int4.matrix_bytes(self.form, outputs, inputs, dtype=dtype)

    def write(self, experts: GpuExperts, name: str, expert: int, numbers: Numbers3) -> None:
        """See Kept."""
        assert isinstance(experts, int4.Int4Experts)
        device = experts.up.words_NBW.device
        values, scales, minima = numbers
        lows = None if minima is None else minima.to(device)
        int4.write_matrix(experts, name, expert, values.to(device), scales.to(device), lows)

    def quantize(self, weight_OI: torch.Tensor) -> Numbers3:
        """See Kept."""
        return made_of(weight_OI, INT4_SCHEMES[self.scheme])


def kept_of(scheme: str) -> Kept | None:
    """What keeps a scheme's or type's numbers, None: nothing does."""
    stored = HELD_AS.get(scheme, scheme)
    if scheme in LEVELLED:
        return None
    if stored == MICROSCALED:
        return KeptBytes(ByteForm(32, floats=True), "mxfp8")
    if scheme in INT8_SCHEMES:
        return KeptBytes(ByteForm(INT8_SCHEMES[scheme].group), scheme)
    if scheme in BYTE_TYPES:
        kind = BYTE_TYPES[scheme]
        return None if kind.minima else KeptBytes(ByteForm(kind.group), "")
    if stored in GPU_SCHEMES:
        online, fixed = scheme if scheme in HELD_AS else "fp8", scheme.endswith(STORED_SCALE)
        return KeptFp8(GPU_SCHEMES[stored], online, fixed)
    if scheme in BLOCK_TYPES:
        scheme = BLOCK_TYPES[scheme].scheme
    return KeptInt4(scheme) if scheme in INT4_SCHEMES else None


def group_of(scheme: str) -> int:
    """Inputs that a cut must not part; 0: any cut will do."""
    if scheme in _TYPES:
        return _TYPES[scheme].block
    if scheme in GPU_SCHEMES:
        return GPU_SCHEMES[scheme] or 0
    return ({**INT4_SCHEMES, **INT8_SCHEMES}[scheme]).group or 0


_TYPES: dict[str, BlockType | ByteBlocks] = {**BLOCK_TYPES, **BYTE_TYPES}  # of GGUF


class OnlineGpuExperts:
    """Experts that are quantized once all of `params` are full. `take` gives them to their
    layer."""

    def __init__(
        self, params: Sequence[Param], floats: Floats, kept: Kept, sizes: MixtureSizes
    ) -> None:
        self._floats, self._kept, self._sizes, self._left = floats, kept, sizes, len(params)
        self._experts: GpuExperts | None = None
        self._lock = Lock()
        for param in params:
            param.on_filled = self._filled
            param.packed_bytes = _share(param, kept, sizes)
            if param.packed_bytes:
                param.defer()

    def take(self) -> GpuExperts:
        """The experts; a loader that does not announce full parameters has them quantized now."""
        if self._experts is None:
            self._quantize()
        experts, self._experts = self._experts, None
        assert experts is not None
        return experts

    def _filled(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._quantize()

    def _quantize(self) -> None:
        up_XIE, down_XEI = self._floats()
        sizes, inner = self._sizes, self._sizes.inner
        self._experts = self._kept.empty(sizes, up_XIE.dtype, up_XIE.device)
        if up_XIE.device.type == "meta":
            return
        for expert in range(sizes.experts):
            matrices = {
                "gate": up_XIE[expert, :inner], "up": up_XIE[expert, inner:],
                "down": down_XEI[expert],
            }  # fmt: skip
            for name, weight_OI in matrices.items():
                self._kept.write(self._experts, name, expert, self._kept.quantize(weight_OI))


def _share(param: Param, kept: Kept, sizes: MixtureSizes) -> int:
    """What a parameter's matrices take once quantized, about; 0: it is no matrix (biases)."""
    shape = local_shape(param)
    if len(shape) == 3:
        return shape[0] * kept.num_bytes(shape[1], shape[2], param.dtype)
    if len(shape) == 2 and min(shape) > 1 and shape[0] != sizes.experts:
        return kept.num_bytes(*shape, param.dtype)
    return 0


class StoredGpuExperts:
    """Experts filled with the numbers of a checkpoint. `take` gives them to their layer.

    Their parameters have no plain tensors; the loader hands blocks to `on_blocks`, or numbers of
    quantized tensors to `on_groups`.
    """

    def __init__(
        self,
        matrices: Sequence[MatricesOf],
        scheme: str,
        sizes: MixtureSizes,
        *,
        device: torch.device,
    ) -> None:
        kept = kept_of(scheme)
        assert kept is not None, scheme
        self._scheme, self._kept, self._sizes = scheme, kept, sizes
        dtype = matrices[0].param.dtype
        self._experts: GpuExperts | None = kept.empty(sizes, dtype, device)
        self._lock = Lock()
        for one in matrices:
            param = one.param
            param.packed_bytes = sum(
                sizes.experts * kept.num_bytes(*sizes.of(name), dtype) for name in one.names
            )
            param.tensor, param.groups_on = None, device
            if scheme in _TYPES:
                param.on_blocks = _blocks_writer(self, one)
            else:
                param.on_groups = _groups_writer(self, one)

    @property
    def kind(self) -> str:
        """The scheme or type."""
        return self._scheme

    def take(self) -> GpuExperts:
        """The experts."""
        experts, self._experts = self._experts, None
        assert experts is not None, "the experts were taken before"
        return experts

    def write_groups(
        self, matrices: MatricesOf, copy: Copy, groups: Groups, numbers: Numbers
    ) -> int | None:
        """Keeps the numbers of one copy; the first of its rows with a scale of NaN or Inf."""
        assert self._experts is not None
        scales = groups.scales_RG.float()
        self._take_inputs(copy, groups, {cut.name for cut in cuts(matrices, copy)})
        for cut in cuts(matrices, copy):
            _, inputs = self._sizes.of(cut.name)
            part, source = part_of(copy, groups, cut, inputs=inputs, group=group_of(self._scheme))
            numbers3 = self._numbers(part, source, numbers, copy)
            assert cut.first == 0, "an expert's rows come together"
            self._kept.write(self._experts, cut.name, cut.expert, numbers3)
        bad = ~scales.isfinite().all(1)
        return int(bad.nonzero()[0]) if bad.any() else None

    def _take_inputs(self, copy: Copy, groups: Groups, names: set[str]) -> None:
        """Of all experts the largest: tokens are quantized before they are sorted."""
        held = self._experts.inputs_2 if isinstance(self._experts, fp8.Fp8Experts) else None
        if held is None:
            return
        place = slice(1, 2) if "down" in names else slice(0, 1)
        scale_1 = scale_of_inputs(copy, groups).to(held.device)
        with self._lock:
            held[place] = torch.maximum(held[place], scale_1)

    def _numbers(self, part: Groups, source: slice, numbers: Numbers, copy: Copy) -> Numbers3:
        rows, scales = len(part.values_RC), part.scales_RG.float()
        scales = scales if scales.shape[1] == 1 else scales[:, source]
        if self._scheme in GPU_SCHEMES:
            return part.values_RC, scales.expand(rows, scales.shape[1]), None
        if self._scheme in INT8_SCHEMES:
            scheme = INT8_SCHEMES[self._scheme]
            values, _ = normal_values(part, scales, source, scheme, numbers, copy.name)
            check_order(part, copy, scheme)
            return values, scales.expand(rows, scales.shape[1]), None
        return unpacked_of(part, scales, source, INT4_SCHEMES[self._scheme], numbers, copy)

    def write_blocks(self, matrices: MatricesOf, copy: Copy, rows: StoredRows) -> int | None:
        """The same of blocks: their bytes are taken apart on the device."""
        assert self._experts is not None
        kind, device = _TYPES[self._scheme], matrices.param.groups_on
        order = rows.order[copy.source[0]]
        for cut in cuts(matrices, copy):
            begin = (copy.source[1].start or 0) + cut.columns.start
            end = begin + cut.columns.stop - cut.columns.start
            span = slice(begin // kind.block * kind.size, -(-end // kind.block) * kind.size)
            wanted = np.ascontiguousarray(rows.data[order[cut.rows]][:, span])
            data = torch.from_numpy(wanted).to(device).unflatten(1, (-1, kind.size))
            values, scales, minima = kind.unpack(data)
            bad = ~scales.isfinite().all(1)
            if minima is not None:
                bad = bad | ~minima.isfinite().all(1)
            if bad.any():
                return int(bad.nonzero()[0])
            self._kept.write(self._experts, cut.name, cut.expert, (values, scales, minima))
        return None


def _blocks_writer(
    experts: StoredGpuExperts, matrices: MatricesOf
) -> Callable[[Copy, StoredRows], int | None]:
    return lambda copy, rows: experts.write_blocks(matrices, copy, rows)


def _groups_writer(experts: StoredGpuExperts, matrices: MatricesOf) -> Callable[..., int | None]:
    return lambda copy, groups, numbers: experts.write_groups(matrices, copy, groups, numbers)


def stored_on_gpu(
    matrices: Sequence[MatricesOf], stored: Stored, sizes: MixtureSizes
) -> str | None:
    """The scheme or type that all of these matrices are stored in, if a GPU keeps it, cut as they
    are on this rank; None if not."""
    pieces = [piece for one in matrices for piece in one.param.pieces]
    scheme = common_name({stored.get(piece.name, "") for piece in pieces})
    if scheme is None or any(piece.scale != 1.0 for piece in pieces):
        return None
    if scheme not in GPU_SCHEMES:  # other experts multiply tokens as they are
        scheme = bare(scheme)
    if kept_of(scheme) is None or not served(sizes):
        return None
    group = group_of(scheme)
    return (
        scheme
        if all(_is_whole(one, copy, group) for one in matrices for copy in copies(one.param))
        else None
    )


def served(sizes: MixtureSizes) -> bool:
    """Whether the kernels take matrices of these sizes."""
    return sizes.width % UNIT == 0 and sizes.inner % UNIT == 0


def _is_whole(matrices: MatricesOf, copy: Copy, group: int) -> bool:
    """Whether no part of a matrix begins or ends within a group of inputs."""
    if not group:
        return True
    source = copy.source[1] if len(copy.shape) == 2 or matrices.in_turn else slice(0)
    try:
        Dim(1, per=group).cut((slice(0), slice(*source.indices(copy.shape[1])[:2])), copy.shape)
    except CutGroup:
        return False
    return matrices.dim == 0 or matrices.size % group == 0
