"""The weights of a mixture's experts as GPUs keep them (kernels/experts_fp8, experts_int4,
experts_bytes): made of floats once a layer's are loaded, or taken as the checkpoint stores them.

X experts, E width, I this rank's inner size of an expert; O outputs and I inputs of a matrix, G
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np
import torch

from headrace.back.kernels.experts_fp8 import layout as fp8
from headrace.back.parallel.bundle import CutGroup, Dim
from headrace.back.parallel.param import Copy, Param, StoredRows, copies, local_shape
from headrace.back.quant.experts import Floats, MatricesOf, cuts, part_of
from headrace.back.quant.formats.groups import Groups
from headrace.back.quant.gpu import GPU_SCHEMES
from headrace.back.quant.gpu_expert_forms import (
    TYPES,
    GpuExperts,
    Kept,
    MixtureSizes,
    Numbers3,
    group_of,
    kept_of,
)
from headrace.back.quant.gpu_int4 import INT4_SCHEMES, unpacked_of
from headrace.back.quant.gpu_int8 import INT8_SCHEMES
from headrace.back.quant.inputs import scale_of_inputs
from headrace.back.quant.kept import (
    bare,
    check_order,
    common_name,
    normal_values,
)
from headrace.back.quant.stored import Stored
from headrace.base.config.quantization import Numbers

UNIT = 16
"""Inputs of a matrix are a multiple of it, for the kernels."""


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
            if scheme in TYPES:
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
        kind, device = TYPES[self._scheme], matrices.param.groups_on
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
