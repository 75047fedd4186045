"""Attention within chunks: what a hit needs, and what may be given back."""

from __future__ import annotations

import random

import pytest

from headrace.core.kv.kinds.chunked import ChunkedKind


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
def test_most_held_is_never_exceeded(chunk: int, spare: int) -> None:
    kind = ChunkedKind(chunk, 4, spare_blocks=spare)
    for position in range(150):
        for tokens in (1, 4, 9):
            held = -(-(position + tokens) // 4) - kind.first_kept(position)
            assert held <= kind.most_held(position + tokens, done=0, chunk_tokens=tokens)
