"""Adapters apart from the layers with slots for them (adapters.py): which modules of a checkpoint
these compute, an adapter's matrices as stored, and what a rank holds of them.

R ranks, I inputs, O outputs, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from headrace.back.parallel.param import Param, WeightPiece
from headrace.base.config.adapter_options import KINDS

MAGNITUDES, TABLES, EXPERTS = KINDS


@dataclass(frozen=True, kw_only=True)
class AdaptedModule:
    """A linear layer of the checkpoint, all of which or a part of which an `AdaptedLinear` is.
    `parts`: those of its parts that the module's outputs fill; `pieces`: where in them. `kind`:
    "linear", "table" (of so many `inputs`) or "parameter" (of `experts` such layers, without a
    module of their own)."""

    inputs: int
    outputs: int
    parts: tuple[int, ...]
    pieces: tuple[WeightPiece, ...]
    kind: str = "linear"
    experts: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterShare:
    """What one adapter holds for one linear layer, on this rank, in host memory: a [P, R, I] and b
    [R, O] in the model's dtype, R the most of its parts' ranks; scale float32 [P], rank int32 [P].
    `turn_2O`: see op lora_linear, once `turn` was told the `squares_O`: |W + s B A| squared of each
    output, of this rank's inputs; `magnitude_O`: negative where there is none; `plain_b_RO`: b,
    which the factors are in already, without them.
    """

    a_PRI: torch.Tensor
    b_RO: torch.Tensor
    scale_P: torch.Tensor
    rank_P: torch.Tensor
    magnitude_O: torch.Tensor | None = None
    squares_O: torch.Tensor | None = None
    turn_2O: torch.Tensor | None = None
    plain_b_RO: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What goes into slots."""
        both = (self.a_PRI, self.b_RO, self.scale_P, self.rank_P)
        return both if self.turn_2O is None else (*both, self.turn_2O)


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """An adapter's two matrices of one module, as stored: a [R, I], b [O, R], any float dtype, and
    magnitudes [O], if it has some."""

    a_RI: torch.Tensor
    b_OR: torch.Tensor
    scale: float
    magnitude_O: torch.Tensor | None = None


def modules_of(weight: Param, parts: tuple[int, ...]) -> dict[str, AdaptedModule]:
    """The checkpoint's linear layers that a weight is put together from; `parts`: its outputs."""
    modules: dict[str, AdaptedModule] = {}
    ends = list(accumulate(parts))
    by_name: dict[str, list[WeightPiece]] = {}
    for piece in weight.pieces:
        by_name.setdefault(piece.name.removesuffix(".weight"), []).append(piece)
    for name, pieces in by_name.items():
        outputs, inputs = reversed(pieces[0].shape) if pieces[0].transposed else pieces[0].shape
        spans = [(one.offset, one.offset + _rows(one, outputs)) for one in pieces]
        covered = tuple(
            part
            for part, end in enumerate(ends)
            if any(first < end and last > end - parts[part] for first, last in spans)
        )
        modules[name] = AdaptedModule(
            inputs=inputs, outputs=outputs, parts=covered, pieces=tuple(pieces)
        )
    return modules


def _rows(piece: WeightPiece, outputs: int) -> int:
    return outputs if piece.rows is None else piece.rows[1]
