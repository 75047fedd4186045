"""ENG-09, REG-014: the jumping search for a window hit equals brute force and looks at no block twice."""

from __future__ import annotations

import random

import pytest

from headrace.core.kv.kinds.window import WindowKind


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
def test_most_held_is_never_exceeded(window: int) -> None:
    kind = WindowKind(window, 4, spare_blocks=1)
    for position in range(100):
        for chunk_blocks in (1, 2, 3):
            filled = -(-position // 4)
            held = filled + chunk_blocks - kind.first_kept(position)
            tokens = 4 * (filled + chunk_blocks)
            assert held <= kind.most_held(tokens, done=0, chunk_tokens=4 * chunk_blocks)
