"""How a tensor is split over an axis of the mesh, as data: a layer takes its local shape from it,
the loader its ranges.

A merged projection (query, key and value rows in one matrix) is split part by part: each rank gets
its share of every part, one after another. A part with fewer units than ranks (KV heads) is
replicated: several ranks hold the same unit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from headrace.back.parallel.mesh import Axis
from headrace.base.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """`size` rows of the split dim in `units` that stay whole (heads); `name` is for messages.

    `uneven` parts may leave some ranks one unit more than others (vocabulary rows). `scale`: what
    the checkpoint's rows are multiplied with.
    """

    name: str
    size: int
    units: int
    uneven: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Span:
    """Rows `start .. start + size` of the global tensor, which lie at `local` on this rank."""

    start: int
    size: int
    local: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A split of dimension `dim` over mesh axis `axis`, part by part. `held`: the units of the one
    part that each rank has, in their order there; empty: neighbours, and equally many."""

    axis: str
    dim: int
    parts: tuple[Part, ...]
    held: tuple[tuple[int, ...], ...] = ()

    def spans(self, axis: Axis) -> tuple[Span, ...]:
        """This rank's ranges, in local order; neighbours in the global tensor are joined."""
        spans: list[Span] = []
        local = 0
        for start, size in self._ranges(axis):
            if spans and spans[-1].start + spans[-1].size == start:
                last = spans.pop()
                spans.append(Span(last.start, last.size + size, last.local))
            else:
                spans.append(Span(start, size, local))
            local += size
        return tuple(spans)

    def _ranges(self, axis: Axis) -> list[tuple[int, int]]:
        """First row and rows of what this rank has, in local order."""
        if self.held:
            (part,) = self.parts
            unit = part.size // part.units
            return [(index * unit, unit) for index in self.held[axis.rank]]
        shares = [_share(part, axis) for part in self.parts]
        begins = itertools.accumulate((part.size for part in self.parts), initial=0)
        return [(begin + start, size) for begin, (start, size) in zip(begins, shares, strict=False)]

    def local_size(self, axis: Axis) -> int:
        """Rows this rank holds."""
        return sum(size for _, size in self._ranges(axis))


def local_units(part: Part, axis: Axis) -> int:
    """Units of the part that this rank holds (at least one: fewer units than ranks are
    replicated)."""
    if part.uneven:
        return (axis.rank + 1) * part.units // axis.size - axis.rank * part.units // axis.size
    if part.units % axis.size == 0:
        return part.units // axis.size
    if axis.size % part.units == 0:
        return 1
    raise ConfigError(
        f"{axis.option} {axis.size} does not fit the model: {part.units} {part.name} can be neither "
        f"divided by it nor replicated evenly",
        field=axis.option,
    )


def divided(part: Part, axis: Axis) -> Part:
    """The part; a ConfigError if ranks would hold the same units of what is summed over them."""
    if part.units < axis.size and not part.uneven:
        raise ConfigError(
            f"{axis.option} {axis.size} does not fit the model: {part.units} {part.name} cannot be "
            "divided by it",
            field=axis.option,
        )
    return part


def local_size(part: Part, axis: Axis) -> int:
    """Rows of the part that this rank holds."""
    return _share(part, axis)[1]


def _share(part: Part, axis: Axis) -> tuple[int, int]:
    """(first row within the part, rows) of this rank."""
    count = local_units(part, axis)
    unit = part.size // part.units
    first = axis.rank * part.units // axis.size
    return first * unit, count * unit
