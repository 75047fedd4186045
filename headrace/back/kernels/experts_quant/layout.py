"""How the packed weights of a mixture's experts lie in memory: for each expert the panels of 64
outputs of a linear layer, of gates, of ups and of downs.

A form's name is that of a block layout (linear_blocks/layout.py), or "int8" or "fp8": a scale for
each output, "fp8-g32" and "fp8-g128": and so many inputs (linear_quant/layout.py). X experts, O
outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.linear_blocks.layout import LAYOUTS, BlockWeight, Segment
from headrace.back.kernels.linear_quant.layout import PANEL, PackedWeight, packed_bytes
from headrace.back.parallel.bundle import FP8, FP8_GROUPS, INT8
from headrace.back.platforms import huge_pages

ROW_FORMS = {
    "int8": INT8,
    "fp8": FP8,
    **{f"fp8-g{size}": form for size, form in FP8_GROUPS.items()},
}
FORMS = (*ROW_FORMS, *LAYOUTS)
FLOATS = -1
"""`row_group` of forms that multiply floats."""


def row_group(form: str) -> int:
    """Inputs that share a scale of the activations; 0: all of them. FLOATS: they stay floats."""
    if form in ROW_FORMS:
        return 0 if form == "int8" else FLOATS
    return LAYOUTS[form].x_group


def matrix_bytes(form: str, outputs: int, inputs: int) -> int:
    """What a matrix takes in memory, padding included."""
    if form in ROW_FORMS:
        return packed_bytes(outputs, inputs, ROW_FORMS[form])
    return LAYOUTS[form].packed_bytes(outputs, inputs)


def takes(form: str, inputs: int) -> bool:
    """Whether a row of so many inputs is whole blocks, or may be padded."""
    if form not in FORMS:
        return False
    layout = LAYOUTS.get(form)
    return layout is None or layout.size == 0 or inputs % layout.block == 0


@dataclass(frozen=True, eq=False)
class ExpertPanels:
    """A matrix [outputs, inputs] of each expert: uint8 [X, ceil(O / 64), bytes of a panel]."""

    form: str
    outputs: int
    inputs: int
    panels_XPB: torch.Tensor

    def matrix(self, expert: int) -> PackedWeight | BlockWeight:
        """That of one expert, as a linear layer has it."""
        panels, size = self.panels_XPB[expert], (self.outputs, self.inputs)
        if self.form in ROW_FORMS:
            return PackedWeight(*size, panels, ROW_FORMS[self.form])
        return BlockWeight(self.inputs, (Segment(LAYOUTS[self.form], *size, panels),))


def empty_panels(form: str, experts: int, outputs: int, inputs: int) -> ExpertPanels:
    """Panels of zeros, to be filled."""
    count = -(-outputs // PANEL)
    shape = (experts, count, matrix_bytes(form, outputs, inputs) // count)
    return ExpertPanels(form, outputs, inputs, huge_pages.kept(shape, torch.uint8))


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """Gates and ups [I, E] and downs [E, I] of some experts."""

    gate: ExpertPanels
    up: ExpertPanels
    down: ExpertPanels

    def __len__(self) -> int:
        return len(self.gate.panels_XPB)

    @property
    def kind(self) -> ExpertsKind:
        """What a kernel is chosen by."""
        return ExpertsKind(len(self), self.gate.form, self.up.form, self.down.form)


@dataclass(frozen=True)
class ExpertsKind:
    """So many experts with these forms."""

    experts: int
    gate: str
    up: str
    down: str


def mixed_rows(kinds: tuple[ExpertsKind, ...]) -> str | None:
    """Why one call cannot multiply by experts of these kinds; None if it can."""
    ups = {row_group(form) for kind in kinds for form in (kind.gate, kind.up)}
    downs = {row_group(kind.down) for kind in kinds}
    if len(ups) > 1 or len(downs) > 1:
        return (
            f"prepares activations in one way, not in groups of {sorted(ups)} and {sorted(downs)}"
        )
    return None
