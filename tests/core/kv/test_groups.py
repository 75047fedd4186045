"""What holds over the KV groups of a model together."""

from __future__ import annotations

import random

import pytest

from headrace.base.errors import ConfigError
from headrace.base.wire.step import KVGroup, WorkerFacts
from headrace.core.kv.groups import KINDS, capacity_tokens, common_hit, kind_of
from headrace.core.kv.kinds.chunked import ChunkedKind
from headrace.core.kv.kinds.full import FullKind
from headrace.core.kv.kinds.kind import CacheKind
from headrace.core.kv.kinds.state import StateKind
from headrace.core.kv.kinds.window import WindowKind
from headrace.core.kv.manager import KVManager


def holds(kind: CacheKind, cached: list[bool], hit: int) -> bool:
    return all(cached[kind.hit_start(hit) : hit])


def random_kind(rng: random.Random) -> CacheKind:
    return rng.choice(
        [
            FullKind(4),
            StateKind(),
            WindowKind(rng.randrange(1, 20), 4, spare_blocks=1),
            ChunkedKind(rng.randrange(1, 20), 4, spare_blocks=1),
        ]
    )


def test_common_hit_is_the_longest_that_all_groups_allow() -> None:
    rng = random.Random(3)
    for _ in range(20_000):
        length = rng.randrange(12)
        kinds = [random_kind(rng) for _ in range(rng.randrange(1, 4))]
        ratios = [rng.choice([1, 1, 2, 3]) for _ in kinds]
        cached = [[rng.random() < 0.8 for _ in range(length)] for _ in kinds]
        best = max(
            h
            for h in range(length + 1)
            if all(
                h % ratio == 0 and holds(kind, row, h // ratio)
                for kind, ratio, row in zip(kinds, ratios, cached, strict=True)
            )
        )
        hit = common_hit(kinds, ratios, lambda g, i: cached[g][i], length)  # noqa: B023 - called in this turn
        assert hit == best, (kinds, ratios, cached)


def facts_of(*groups: KVGroup, num_blocks: int = 13) -> WorkerFacts:
    return WorkerFacts(
        num_blocks=num_blocks,
        block_tokens=4,
        groups=groups,
        logits_width=100,
        max_rows=4,
        max_model_len=5000,
    )


FULL = KVGroup(kind="full", caches=(0,))
WINDOW = KVGroup(kind="window", caches=(1,), span=17)


@pytest.mark.parametrize(
    ("groups", "tokens"),
    [
        ((FULL,), 48),
        ((WINDOW,), 5000),
        ((FULL, WINDOW), 24),
        ((FULL, KVGroup(kind="state", caches=(1,), num_slots=9)), 48),
        ((FULL, KVGroup(kind="cross", caches=(1,), span=30)), 16),
        ((KVGroup(kind="latent", caches=(0,), block_ratio=2),), 96),
        ((KVGroup(kind="full", caches=(0,), blocks_per_slab=5),), 240),
    ],
    ids=["full", "window", "full+window", "full+state", "full+cross", "latent by 8", "slabs"],
)
def test_capacity_is_the_longest_sequence_whose_least_need_fits(
    groups: tuple[KVGroup, ...], tokens: int
) -> None:
    manager = KVManager(facts_of(*groups), prefix_caching=False, chunk_tokens=64)
    assert manager.capacity_tokens == tokens
    assert manager.least_needed(tokens) <= 12
    assert tokens == 5000 or manager.least_needed(tokens + 1) > 12


@pytest.mark.parametrize("limit", range(0, 80, 3))
def test_capacity_is_searched_up_to_the_bound(limit: int) -> None:
    tokens = capacity_tokens(lambda tokens: tokens <= limit, step=4, bound=50)
    assert tokens == min(limit // 4 * 4, 50)


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'spiral'"):
        kind_of(KVGroup(kind="spiral", caches=(0,)), block_tokens=4, prefix_caching=True)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ("window", "chunked", "cross")])
def test_a_kind_without_its_span_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}' has span None"):
        kind_of(KVGroup(kind=kind, caches=(0,)), block_tokens=4, prefix_caching=True)
