from __future__ import annotations

import random

import pytest

from headrace.base.errors import ConfigError
from headrace.base.wire.step import KVGroup
from headrace.core.kv.groups import capacity_blocks, common_hit, kind_of, least_blocks
from headrace.core.kv.kinds.full import FullKind
from headrace.core.kv.kinds.window import WindowKind


def holds(kind: FullKind | WindowKind, cached: list[bool], hit: int) -> bool:
    return all(cached[kind.hit_start(hit) : hit])


def test_common_hit_is_the_longest_that_all_groups_allow() -> None:
    rng = random.Random(3)
    for _ in range(20_000):
        length = rng.randrange(12)
        kinds = [
            rng.choice([FullKind(), WindowKind(rng.randrange(1, 20), 4, spare_blocks=1)])
            for _ in range(rng.randrange(1, 4))
        ]
        cached = [[rng.random() < 0.8 for _ in range(length)] for _ in kinds]
        best = max(
            h
            for h in range(length + 1)
            if all(holds(kind, row, h) for kind, row in zip(kinds, cached, strict=True))
        )
        assert common_hit(kinds, lambda g, i: cached[g][i], length) == best  # noqa: B023 - called in this turn


def test_capacity_is_the_longest_sequence_whose_least_need_fits() -> None:
    kinds = [FullKind(), WindowKind(17, 4, spare_blocks=1)]
    for usable in range(1, 60):
        blocks = capacity_blocks(kinds, usable, bound=1000)
        assert least_blocks(kinds, blocks) <= usable < least_blocks(kinds, blocks + 1)


def test_windows_alone_hold_sequences_of_any_length() -> None:
    assert capacity_blocks([WindowKind(17, 4, spare_blocks=1)], 10, bound=5000) == 5000


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'state'"):
        kind_of(KVGroup(kind="state", layers=(0,)), block_tokens=4, prefix_caching=True)
