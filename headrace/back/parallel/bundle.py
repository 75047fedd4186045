"""A weight that is stored as several tensors: quantized values, scales, zeros, group index.

`WeightForm` says what the numbers mean, which is all that kernels are told of a checkpoint's
format. A `Bundle` says how each tensor lies beside the weight it stands for, dimension by
dimension; so one `Shard`, of the weight, splits all of them, and a split that would cut a group is
refused with its numbers. Nothing here knows a format's name: formats are bundles made elsewhere.

O outputs, I inputs, E experts; a weight is [O, I] or [E, O, I].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch


class Number(Enum):
    """What a quantized value is."""

    INT = "int"
    UINT = "uint"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT4_E2M1 = "float4_e2m1fn"
    TABLE = "index of a table of levels"


class Zeros(Enum):
    """What is taken off: nothing; an integer before scaling; a minimum after it."""

    NONE = "none"
    INTEGER = "integer"
    MINIMUM = "minimum"


Group = tuple[int, int]
"""Outputs and inputs that share a scale; 0: all of them."""


@dataclass(frozen=True, kw_only=True)
class WeightForm:
    """weight = (value - zero) * scale, or value * scale - minimum.

    bits         of a value; they are packed where there are fewer than 8
    number       what a value is
    group        outputs x inputs that share a scale (and a zero)
    scale_dtype  of the scales; float8_e8m0fnu are powers of two
    zeros        what is taken off
    outer        outputs x inputs that share a second, float32 or float16, scale of the scales;
                 None: there is one level
    ordered      inputs belong to groups by an index of their own, not by their place (act-order)
    """

    bits: int
    number: Number
    group: Group
    scale_dtype: torch.dtype
    zeros: Zeros = Zeros.NONE
    outer: Group | None = None
    ordered: bool = False

    def __str__(self) -> str:
        kind = self.number.value if self.number is not Number.TABLE else "table"
        group = "x".join(str(size or "all") for size in self.group)
        return f"{self.bits}-bit {kind}, a scale for {group} outputs x inputs"


INT8 = WeightForm(bits=8, number=Number.INT, group=(1, 0), scale_dtype=torch.float32)
"""Integers -127 .. 127, a scale for each output."""
FP8 = WeightForm(bits=8, number=Number.FLOAT8_E4M3, group=(1, 0), scale_dtype=torch.float32)
"""e4m3 numbers, a scale for each output."""
FP8_GROUPS = {size: replace(FP8, group=(1, size)) for size in (32, 128)}
"""The same with a scale for each output and so many inputs."""


@dataclass(frozen=True)
class Dim:
    """A dimension of a member: each `width` elements along it belong to `per` indices of dimension
    `of` of the weight, the last ones perhaps to fewer; `per` 0: to all of them. `of` None: it is
    no dimension of the weight's and is never split."""

    of: int | None = None
    per: int = 1
    width: int = 1

    def size(self, shape: Sequence[int]) -> int:
        """Elements along it where the weight has this shape."""
        if self.of is None or self.per == 0:
            return self.width
        return -(-shape[self.of] // self.per) * self.width

    def cut(self, rectangle: Sequence[slice], shape: Sequence[int]) -> slice:
        """The elements of a rectangle of the weight; CutGroup if it holds a part of a group."""
        if self.of is None or self.per == 0:
            return slice(0, self.width)
        start, stop = rectangle[self.of].start, rectangle[self.of].stop
        if start % self.per or (stop % self.per and stop != shape[self.of]):
            raise CutGroup(self.of, start, stop, self.per, shape[self.of])
        return slice(start // self.per * self.width, -(-stop // self.per) * self.width)


class CutGroup(ValueError):
    """A rectangle cuts a group: of dimension `dim`, indices `start` to `stop` of `size`, where
    `per` belong together."""

    def __init__(self, dim: int, start: int, stop: int, per: int, size: int) -> None:
        self.dim, self.start, self.stop, self.per, self.size = dim, start, stop, per, size
        super().__init__(
            f"indices {start} to {stop} of dimension {dim} cut a group of {per}; "
            f"{size} are {-(-size // per)} groups"
        )


@dataclass(frozen=True, kw_only=True)
class Member:
    """One tensor of a bundle.

    name       what stands instead of "weight" at the end of a checkpoint's name
    dtype      as it is stored and kept
    dims       how it lies beside the weight
    per_piece  each checkpoint tensor of a merged weight has one of its own (a scale of the whole
               tensor, a group index): kept side by side along a first dimension
    """

    name: str
    dtype: torch.dtype
    dims: tuple[Dim, ...]
    per_piece: bool = False

    def shape(self, weight: Sequence[int]) -> tuple[int, ...]:
        """Its shape beside a weight (of one checkpoint tensor) of this shape."""
        return tuple(dim.size(weight) for dim in self.dims)

    def cut(self, rectangle: Sequence[slice], weight: Sequence[int]) -> tuple[slice, ...]:
        """Its part of a rectangle of the weight; CutGroup if that cuts a group."""
        return tuple(dim.cut(rectangle, weight) for dim in self.dims)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The tensors that a weight is stored as, and what their numbers mean."""

    form: WeightForm
    members: tuple[Member, ...]

    def local_shape(
        self, member: Member, weight: Sequence[int], num_pieces: int
    ) -> tuple[int, ...]:
        """A member's shape on a rank whose weight has this shape."""
        shape = member.shape(weight)
        return (num_pieces, *shape) if member.per_piece else shape
