"""The kinds of caches (ENG-09, REG-014): what a hit needs, what is kept and held; and what holds over the groups of a
model together.
"""

from __future__ import annotations

import random

import pytest

from headrace.base.errors import ConfigError
from headrace.base.wire.step import KVGroup, WorkerFacts
from headrace.core.kv.kinds import (
    KINDS,
    CacheKind,
    ChunkedKind,
    FullKind,
    StateKind,
    WindowKind,
    capacity_tokens,
    common_hit,
    kind_of,
)
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


def kind_with(hit_blocks: int) -> WindowKind:
    """A window that needs so many blocks behind a hit."""
    kind = WindowKind(hit_blocks * 4 + 1, 4, spare_blocks=1)
    assert kind.hit_blocks == hit_blocks
    return kind


def brute_force(cached: list[bool], end: int, needed: int) -> int:
    return max(h for h in range(end + 1) if all(cached[max(0, h - needed) : h]))


@pytest.mark.parametrize("num_cases", [40_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_window_hit_equals_brute_force_on_random_cases(num_cases: int) -> None:
    rng = random.Random(9)
    for _ in range(num_cases):
        length, needed = rng.randrange(13), rng.randrange(6)
        share = rng.choice((0.3, 0.6, 0.9))
        cached = [rng.random() < share for _ in range(length)]
        probes: list[int] = []
        end = rng.randint(0, length)
        hit = kind_with(needed).longest_hit(lambda i: probes.append(i) or cached[i], end)  # noqa: B023 - called in this turn
        assert hit == brute_force(cached, end, needed), (cached, end, needed)
        assert len(set(probes)) == len(probes), "a block was probed twice"


def test_a_prefix_shorter_than_the_window_is_found() -> None:
    assert kind_with(5).longest_hit([True, False, True].__getitem__, 3) == 1


def test_search_jumps_over_misses() -> None:
    probes: list[int] = []
    assert kind_with(64).longest_hit(lambda i: bool(probes.append(i)), 8192) == 0
    assert len(probes) == 8192 // 64


@pytest.mark.parametrize("window", [1, 2, 4, 5, 16, 17])
@pytest.mark.parametrize("spare", [0, 1])
def test_no_block_that_a_query_can_reach_is_given_back(window: int, spare: int) -> None:
    kind = WindowKind(window, 4, spare_blocks=spare)
    for position in range(100):
        oldest = max(0, position - window + 1)
        kept = kind.first_kept(position)
        assert kept <= oldest // 4
        assert kept == max(0, oldest // 4 - spare)


@pytest.mark.parametrize("window", [1, 4, 5, 16, 17])
def test_a_window_never_holds_more_than_its_most(window: int) -> None:
    kind = WindowKind(window, 4, spare_blocks=1)
    for position in range(100):
        for chunk_blocks in (1, 2, 3):
            filled = -(-position // 4)
            held = filled + chunk_blocks - kind.first_kept(position)
            tokens = 4 * (filled + chunk_blocks)
            assert held <= kind.most_held(tokens, done=0, chunk_tokens=4 * chunk_blocks)


def test_a_hit_equals_brute_force_on_random_cases() -> None:
    rng = random.Random(4)
    for _ in range(10_000):
        chunk, length = rng.randrange(1, 30), rng.randrange(13)
        kind = ChunkedKind(chunk, 4, spare_blocks=1)
        cached = [rng.random() < 0.7 for _ in range(length)]
        best = max(h for h in range(length + 1) if all(cached[4 * h // chunk * chunk // 4 : h]))
        assert kind.longest_hit(cached.__getitem__, length) == best, (chunk, cached)


def test_a_hit_at_the_end_of_a_chunk_needs_nothing() -> None:
    kind = ChunkedKind(16, 4, spare_blocks=1)
    assert kind.longest_hit(lambda index: False, 8) == 8
    assert kind.hit_start(8) == 8 and kind.hit_start(7) == 4


@pytest.mark.parametrize("chunk", [1, 4, 5, 16, 17])
@pytest.mark.parametrize("spare", [0, 1])
def test_what_a_query_reads_is_kept(chunk: int, spare: int) -> None:
    kind = ChunkedKind(chunk, 4, spare_blocks=spare)
    for position in range(120):
        assert kind.first_kept(position) <= position // chunk * chunk // 4
        again = (position - 1) // 4  # the hit of the same prompt sent again
        if spare and position > 0:
            assert kind.first_kept(position) <= kind.hit_start(again)


@pytest.mark.parametrize("chunk", [1, 4, 5, 16, 17])
@pytest.mark.parametrize("spare", [0, 1])
def test_chunks_never_hold_more_than_their_most(chunk: int, spare: int) -> None:
    kind = ChunkedKind(chunk, 4, spare_blocks=spare)
    for position in range(150):
        for tokens in (1, 4, 9):
            held = -(-(position + tokens) // 4) - kind.first_kept(position)
            assert held <= kind.most_held(position + tokens, done=0, chunk_tokens=tokens)
