"""Splits are data: every row of every part lands on the rank that owns it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.param import Param, WeightPiece, copies
from headrace.back.parallel.shard import Part, Shard, local_size, local_units
from headrace.base.errors import ConfigError

GROUP = cast(Any, SimpleNamespace())


def axis(rank: int, size: int) -> Axis:
    return Axis(size=size, rank=rank, group=GROUP if size > 1 else None)


def local(
    full: torch.Tensor, shard: Shard, axis: Axis, pieces: dict[str, WeightPiece]
) -> torch.Tensor:
    """What a loader that follows `copies` puts on a rank; `full` is the global tensor the pieces
    were cut from."""
    shape = list(full.shape)
    shape[shard.dim] = shard.local_size(axis)
    tensor = torch.full(shape, -1.0)
    param = Param(
        name="p",
        shape=tuple(full.shape),
        dtype=torch.float32,
        pieces=tuple(pieces.values()),
        tensor=tensor,
        shard=shard,
        spans=shard.spans(axis),
    )
    for copy in copies(param):
        piece = pieces[copy.name]
        stop = piece.offset + piece.shape[piece.dim]
        source = full.narrow(piece.dim, piece.offset, stop - piece.offset)
        tensor[copy.target] = source[copy.source]
    return tensor


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4),
    st.booleans(),
)
def test_ranks_together_hold_every_part_once_in_order(
    ranks: int, shapes: list[tuple[int, int]], merged: bool
) -> None:
    parts = tuple(
        Part(f"part{i}", units * ranks * rows, units * ranks)
        for i, (units, rows) in enumerate(shapes)
    )
    total = sum(part.size for part in parts)
    full = torch.arange(total * 2, dtype=torch.float32).view(total, 2)
    shard = Shard(axis="tp", dim=0, parts=parts)
    pieces, offset = {}, 0
    for part in parts:
        pieces[part.name] = WeightPiece(name=part.name, shape=(part.size, 2), offset=offset)
        offset += part.size
    if merged:
        pieces = {"all": WeightPiece(name="all", shape=(total, 2))}
    got = [local(full, shard, axis(rank, ranks), pieces) for rank in range(ranks)]
    start = 0
    for i, part in enumerate(parts):
        before = sum(local_size(earlier, axis(0, ranks)) for earlier in parts[:i])
        share = local_size(part, axis(0, ranks))
        whole = torch.cat([tensor[before : before + share] for tensor in got])
        assert torch.equal(whole, full[start : start + part.size])
        start += part.size


def test_a_split_along_the_inputs_takes_columns() -> None:
    full = torch.arange(12.0).view(2, 6)
    shard = Shard(axis="tp", dim=1, parts=(Part("heads", 6, 2),))
    pieces = {"w": WeightPiece(name="w", shape=(2, 6))}
    assert torch.equal(local(full, shard, axis(1, 2), pieces), full[:, 3:])


def test_fewer_heads_than_ranks_are_replicated_on_neighbours() -> None:
    part = Part("k_proj", 8, 2)
    starts = [
        Shard(axis="tp", dim=0, parts=(part,)).spans(axis(rank, 4))[0].start for rank in range(4)
    ]
    assert starts == [0, 0, 4, 4]
    assert local_units(part, axis(3, 4)) == 1


def test_heads_that_do_not_fit_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel 4 .* 6 q_proj"):
        local_units(Part("q_proj", 48, 6), axis(0, 4))


@given(st.integers(1, 50), st.integers(1, 5))
def test_uneven_parts_cover_every_row_once(rows: int, ranks: int) -> None:
    part = Part("vocabulary rows", rows, rows, uneven=True)
    seen: list[int] = []
    for rank in range(ranks):
        for span in Shard(axis="tp", dim=0, parts=(part,)).spans(axis(rank, ranks)):
            seen += range(span.start, span.start + span.size)
    assert seen == list(range(rows))
