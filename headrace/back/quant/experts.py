"""The weights of a mixture's experts in packed panels (kernels/experts_quant): made of floats once
a layer's are loaded, or taken as the checkpoint stores them.

X experts, E width, I this rank's inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch

from headrace.back.kernels.experts_quant.layout import (
    ROW_FORMS,
    ExpertPanels,
    ExpertsKind,
    PackedExperts,
    empty_panels,
    matrix_bytes,
    mixed_rows,
    takes,
)
from headrace.back.kernels.linear_blocks.layout import (
    LAYOUTS,
    STORED_LAYOUTS,
    BlockWeight,
    write_quantized,
)
from headrace.back.kernels.linear_blocks.native import pack_rows
from headrace.back.kernels.linear_quant.layout import PackedWeight, write_panels
from headrace.back.kernels.native.library import loaded
from headrace.back.parallel.bundle import CutGroup, Dim
from headrace.back.parallel.param import Copy, Param, StoredRows, copies, local_shape
from headrace.back.quant.formats.groups import Groups
from headrace.back.quant.kept import PANEL_SCHEMES, bare, normal
from headrace.back.quant.online import layout_of, pack_into, row_form
from headrace.back.quant.scheme import Scheme
from headrace.back.quant.stored import Stored, blocks_of
from headrace.base.config.quantization import Numbers

Floats = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Gives up [X, 2I, E] (gates, then ups) and down [X, E, I]."""


@dataclass(frozen=True, kw_only=True)
class MatricesOf:
    """How a parameter holds matrices of experts: matrix k, of expert k // len(names), is named
    names[k % len(names)] ("gate", "up" or "down"). `dim` 0: its `size` outputs lie from k * size
    on; 1: `size` inputs do. `in_turn`: the parameter is [X, inputs, outputs], an expert's matrices
    one output each in turn, and `size` is the outputs of one."""

    param: Param
    names: tuple[str, ...]
    size: int
    dim: int = 0
    in_turn: bool = False


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What of a copy's rectangle is one matrix: rows and columns of it, which become outputs from
    `first` on."""

    name: str
    expert: int
    first: int
    rows: slice
    columns: slice


def form_of(scheme: Scheme) -> str:
    """The form of panels that holds a scheme's numbers."""
    layout, form = layout_of(scheme), row_form(scheme)
    if layout is not None:
        return layout.name
    return next(name for name, one in ROW_FORMS.items() if one == form)


class OnlineExperts:
    """Experts that are packed once all of `params` are full. `take` gives them to their layer."""

    def __init__(
        self, params: Sequence[Param], floats: Floats, scheme: Scheme, *, experts: int
    ) -> None:
        self._floats, self._scheme, self._left = floats, scheme, len(params)
        self._packed: PackedExperts | None = None
        self._lock = Lock()
        for param in params:
            param.on_filled = self._filled
            param.packed_bytes = _share(param, form_of(scheme), experts)

    def take(self) -> PackedExperts:
        """The packed experts; a loader that does not announce full parameters has them packed
        now."""
        if self._packed is None:
            self._pack()
        packed, self._packed = self._packed, None
        assert packed is not None
        return packed

    def _filled(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._pack()

    def _pack(self) -> None:
        up_XIE, down_XEI = self._floats()
        inner = down_XEI.shape[2]
        self._packed = PackedExperts(
            gate=_packed(up_XIE[:, :inner], self._scheme),
            up=_packed(up_XIE[:, inner:], self._scheme),
            down=_packed(down_XEI, self._scheme),
        )


def _packed(weight_XOI: torch.Tensor, scheme: Scheme) -> ExpertPanels:
    panels = empty_panels(form_of(scheme), *weight_XOI.shape)
    for expert, weight_OI in enumerate(weight_XOI):
        pack_into(weight_OI, scheme, panels.matrix(expert))
    return panels


def _share(param: Param, form: str, experts: int) -> int:
    """What a parameter's matrices take once packed, about: those of a 2-D one are cut by rows or
    columns, of a 3-D one are whole. 0: it is no matrix (biases)."""
    shape = local_shape(param)
    if len(shape) == 3:
        return shape[0] * matrix_bytes(form, shape[1], shape[2])
    if len(shape) == 2 and min(shape) > 1 and shape[0] != experts:
        return matrix_bytes(form, *shape)
    return 0


class StoredExperts:
    """Experts filled with the numbers of a checkpoint. `take` gives them to their layer.

    Their parameters have no plain tensors; the loader hands blocks to `on_blocks`, or numbers of
    quantized tensors to `on_groups`.
    """

    def __init__(
        self,
        matrices: Sequence[MatricesOf],
        schemes: dict[str, str],
        *,
        experts: int,
        width: int,
        inner: int,
        meta: bool,
    ) -> None:
        self._schemes = schemes
        self._forms = {name: _form(scheme) for name, scheme in schemes.items()}
        sizes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        self._sizes = sizes
        self._panels: dict[str, ExpertPanels] | None = None
        if not meta:
            self._panels = {
                name: empty_panels(self._forms[name], experts, *size)
                for name, size in sizes.items()
            }
        for one in matrices:
            param, total = one.param, 0
            for name in one.names:
                total += experts * matrix_bytes(self._forms[name], *sizes[name])
            param.packed_bytes, param.tensor = total, None
            if schemes[one.names[0]] in STORED_LAYOUTS:
                param.on_blocks = _blocks_writer(self, one)
            else:
                param.on_groups = _groups_writer(self, one)

    @property
    def kind(self) -> str:
        """The forms of gates, ups and downs."""
        return "/".join(dict.fromkeys(self._forms.values()))

    def take(self) -> PackedExperts:
        """The packed experts."""
        assert self._panels is not None, "the experts were taken before"
        panels, self._panels = self._panels, None
        return PackedExperts(gate=panels["gate"], up=panels["up"], down=panels["down"])

    def write_blocks(self, matrices: MatricesOf, copy: Copy, rows: StoredRows) -> int | None:
        """Packs the blocks of one copy; the first source row with a scale of NaN or Inf."""
        assert self._panels is not None
        wanted = np.ascontiguousarray(rows.order[copy.source[0]])
        for cut in cuts(matrices, copy):
            panels = self._panels[cut.name]
            matrix = panels.matrix(cut.expert)
            assert isinstance(matrix, BlockWeight)
            (segment,) = matrix.segments
            begin = (copy.source[1].start or 0) + cut.columns.start
            end = begin + cut.columns.stop - cut.columns.start
            data = rows.data[:, _block_columns(panels.form, begin, end, copy.shape[1])]
            bad = pack_rows(loaded(), segment, cut.first, data, wanted[cut.rows])
            if bad is not None:
                return bad
        return None

    def write_groups(
        self, matrices: MatricesOf, copy: Copy, groups: Groups, numbers: Numbers
    ) -> int | None:
        """Packs the numbers of one copy; the first of its rows with a scale of NaN or Inf."""
        assert self._panels is not None
        scales = groups.scales_RG.float()
        for cut in cuts(matrices, copy):
            scheme = PANEL_SCHEMES[self._schemes[cut.name]]
            panels = self._panels[cut.name]
            part, source = part_of(copy, groups, cut, inputs=panels.inputs, group=scheme.group or 0)
            mine = part.scales_RG if scales.shape[1] == 1 else part.scales_RG[:, source]
            values, mine, minima = normal(part, mine, source, scheme, numbers, copy.name)
            _write(panels.matrix(cut.expert), cut.first, values.contiguous(), mine, minima)
        bad = ~scales.isfinite().all(1)
        return int(bad.nonzero()[0]) if bad.any() else None


def _write(
    matrix: PackedWeight | BlockWeight,
    first: int,
    values_OI: torch.Tensor,
    scales_OG: torch.Tensor,
    minima_OG: torch.Tensor | None,
) -> None:
    assert first == 0, "an expert's rows come together"
    if isinstance(matrix, PackedWeight):
        write_panels(matrix, 0, values_OI, scales_OG)
    else:
        write_quantized(matrix.segments[0], 0, values_OI, scales_OG, minima_OG)


def _blocks_writer(
    experts: StoredExperts, matrices: MatricesOf
) -> Callable[[Copy, StoredRows], int | None]:
    return lambda copy, rows: experts.write_blocks(matrices, copy, rows)


def _groups_writer(experts: StoredExperts, matrices: MatricesOf) -> Callable[..., int | None]:
    return lambda copy, groups, numbers: experts.write_groups(matrices, copy, groups, numbers)


def part_of(
    copy: Copy, groups: Groups, cut: Cut, *, inputs: int, group: int
) -> tuple[Groups, slice]:
    """What of a copy's numbers is one matrix, of so many inputs, and which of its groups."""
    begin = (copy.source[1].start or 0) + cut.columns.start
    rectangle = slice(0, 1), slice(begin, begin + inputs)
    source = Dim(1, per=group).cut(rectangle, (1, copy.shape[1]))
    scales = groups.scales_RG.float()
    part = Groups(
        values_RC=groups.values_RC[cut.rows, cut.columns],
        scales_RG=scales if len(scales) == 1 else scales[cut.rows],
        zeros_RG=None if groups.zeros_RG is None else groups.zeros_RG[cut.rows],
        added_RG=None if groups.added_RG is None else groups.added_RG[cut.rows],
        group_C=groups.group_C,
    )
    return part, source


def cuts(matrices: MatricesOf, copy: Copy) -> Iterator[Cut]:
    names, size, every = matrices.names, matrices.size, slice(None)
    if matrices.in_turn:
        expert = copy.target[0]
        assert isinstance(expert, slice)
        for i, name in enumerate(names):
            turn, inputs = slice(i, None, len(names)), copy.target[1]
            assert isinstance(inputs, slice)
            columns = slice(0, inputs.stop - inputs.start)
            yield Cut(name=name, expert=expert.start, first=0, rows=turn, columns=columns)
        return
    rows, columns = copy.target
    assert isinstance(rows, slice) and isinstance(columns, slice)
    span = columns if matrices.dim else rows
    for k in range(span.start // size, -(-span.stop // size)):
        start, stop = max(span.start, k * size), min(span.stop, (k + 1) * size)
        part = slice(start - span.start, stop - span.start)
        yield Cut(
            name=names[k % len(names)],
            expert=k // len(names),
            first=rows.start if matrices.dim else start - k * size,
            rows=every if matrices.dim else part,
            columns=part if matrices.dim else slice(0, columns.stop - columns.start),
        )


def _form(scheme: str) -> str:
    return scheme if scheme in STORED_LAYOUTS else form_of(PANEL_SCHEMES[scheme])


def stored_schemes(
    matrices: Sequence[MatricesOf], stored: Stored, *, width: int, inner: int
) -> dict[str, str] | None:
    """The scheme or type of gates, ups and downs, if all of each name have one, and there is a
    kernel that reads them so, cut as they are on this rank; None if not."""
    schemes: dict[str, str] = {}
    for one in matrices:
        for i, piece in enumerate(one.param.pieces):
            scheme = bare(stored.get(piece.name, ""))
            if (scheme not in PANEL_SCHEMES and scheme not in STORED_LAYOUTS) or piece.scale != 1.0:
                return None
            single = len(one.param.pieces) == 1
            for name in one.names if single else (one.names[i % len(one.names)],):
                if schemes.setdefault(name, scheme) != scheme:
                    return None
    forms = {name: _form(scheme) for name, scheme in schemes.items()}
    kind = ExpertsKind(0, forms["gate"], forms["up"], forms["down"])
    whole = (
        takes(forms["gate"], width) and takes(forms["up"], width) and takes(forms["down"], inner)
    )
    if mixed_rows((kind,)) is not None or not whole or not _whole_groups(matrices, schemes):
        return None
    return schemes


def _whole_groups(matrices: Sequence[MatricesOf], schemes: dict[str, str]) -> bool:
    """Whether no part of a matrix on this rank begins or ends within a group of inputs."""
    for one in matrices:
        for copy in copies(one.param):
            for name in one.names:
                group = _group(schemes[name])
                dim = one.param.shard.dim if one.param.shard else None
                source = copy.source[1] if len(copy.shape) == 2 or one.in_turn else slice(0)
                start, stop, _ = source.indices(copy.shape[1])
                if group and (start % group or (stop % group and stop != copy.shape[1])):
                    return False
                if one.dim == 1 and dim is not None and group and one.size % group:
                    return False
    return True


def _group(scheme: str) -> int:
    layout = STORED_LAYOUTS.get(scheme)
    return layout.block if layout else PANEL_SCHEMES[scheme].group or 0


def _block_columns(form: str, begin: int, end: int, inputs: int) -> slice:
    rectangle = slice(0, 1), slice(begin, end)
    try:
        return blocks_of(LAYOUTS[form]).cut(rectangle, (1, inputs))[1]
    except CutGroup as error:  # stored_schemes has looked
        raise AssertionError(form, begin, end) from error
