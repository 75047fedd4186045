"""Drafts from earlier texts, against a definition that counts (SPC-06)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.back.speculative.suffix import CORPUS_TOKENS, Corpus, SuffixDrafter
from headrace.base.config.resolved import SpeculationSpec, SuffixSpec


def drafter(*, depth: int = 24, requests: int = 100, factor: float = 1.0) -> SuffixDrafter:
    suffix = SuffixSpec(
        max_tree_depth=depth,
        max_cached_requests=requests,
        max_spec_factor=factor,
        min_token_prob=0.3,
    )
    spec = SpeculationSpec(method="suffix", num_tokens=15, max_rows=8, suffix=suffix)
    return SuffixDrafter(spec, torch.device("cpu"))


def told(one: SuffixDrafter, *texts: list[int]) -> SuffixDrafter:
    for text in texts:
        one._corpus.add(np.asarray(text, np.int32))
    return one


def counted(texts: list[list[int]], own: list[int], most: int, depth: int) -> list[set[int]]:
    """The tokens that may be drafted at each place: the most frequent ones, where several are as
    frequent; the first of them goes on, as in the drafter."""
    ends = [(text, end) for text in [*texts, own] for end in range(len(text) - (text is own))]
    longest = 0
    for length in range(1, min(len(own), depth) + 1):
        if any(text[max(0, end + 1 - length) : end + 1] == own[-length:] for text, end in ends):
            longest = length
    if not longest:
        return []
    going = [
        text[end + 1 :]
        for text, end in ends
        if end + 1 >= longest and text[end + 1 - longest : end + 1] == own[-longest:]
    ]
    whole, drafts = len(going), []
    for place in range(min(most, longest)):
        counts = Counter(rest[place] for rest in going if len(rest) > place)
        if not counts or max(counts.values()) < 0.3 * whole:
            break
        best = {token for token, count in counts.items() if count == max(counts.values())}
        drafts.append(best)
        going = [rest for rest in going if len(rest) > place and rest[place] == min(best)]
    return drafts


TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(TEXT, max_size=4), own=TEXT, most=st.integers(1, 15))
def test_the_most_frequent_tokens_behind_the_longest_suffix_are_drafted(
    texts: list[list[int]], own: list[int], most: int
) -> None:
    drafts = told(drafter(depth=6), *texts).drafts(np.asarray(own, np.int32), most)
    expected = counted(texts, own, most, 6)
    assert [min(one) for one in expected] == drafts


def test_an_earlier_answer_is_drafted_whole() -> None:
    text = [5, 6, 7, 8, 9, 10, 11, 12]
    one = told(drafter(factor=4.0), text)
    assert one.drafts(np.asarray([1, 6, 7], np.int32), 15) == text[3:]
    assert told(drafter(requests=0), text).drafts(np.asarray([1, 6, 7], np.int32), 15) == []


@pytest.mark.parametrize("size", [1, 1000, CORPUS_TOKENS + 5])
def test_the_oldest_texts_make_room(size: int) -> None:
    corpus = Corpus(1000)
    for number in range(2 + 3 * CORPUS_TOKENS // (size + 1) if size > 1 else 1500):
        corpus.add(np.full(size, number, np.int32))
    kept = corpus.tokens[corpus.tokens >= 0]
    assert number in kept and len(kept) <= CORPUS_TOKENS
    assert set(kept.tolist()) == set(range(number - len(set(kept.tolist())) + 1, number + 1))
    assert len(set(kept.tolist())) == min(1000, len(set(kept.tolist())))
