"""API-03, REG-096: reasoning tokens, however tags, tokens and prompt lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.front.client.events import Delta, Ended
from headrace.front.server.parsed import ParsedAnswer, ParsedEnded
from tests.front.text.parsing.golden import parser_of

ACCENT = "é".encode()
CASES = [
    (["<think>", "a", "b", "</think>", "c"], False, 2),
    (["<th", "ink>a", "b", "</thi", "nk>c"], False, 1),
    (["a", "b", "</think>", "c"], True, 2),
    (["<think>", "a", "b"], False, 2),
    (["a", "<think>", "b"], True, 3),
    (["<think>", "a", "<think>", "b", "</think>", "c", "</think>"], False, 3),
    (["<think>", ACCENT[:1], ACCENT[1:], "</think>", "c"], False, 2),
    (["a", "b"], False, 0),
    (["</think>", "b"], True, 0),
]


def count(tokens: list[str | bytes], inside: bool, group: int) -> int:
    """Deltas of `group` tokens, cut at whole characters as the detokenizer does."""
    answer = ParsedAnswer(parser_of("none", inside=inside), dict(enumerate(tokens)))
    whole = b"".join(t if isinstance(t, bytes) else t.encode() for t in tokens)
    sent, at, last = 0, 0, 0
    for i in range(0, len(tokens), group):
        ids = list(range(i, min(i + group, len(tokens))))
        at += sum(
            len(t) if isinstance(t, bytes) else len(t.encode()) for t in tokens[i : i + group]
        )
        text = whole[:at].decode(errors="ignore")
        (made,) = answer.take(Delta(index=0, text=text[sent:], token_ids=ids))
        sent = len(text)
        assert made.num_reasoning >= last
        last = made.num_reasoning
    end = answer.take(Ended(index=0, reason="stop", num_output=len(tokens)))[-1]
    assert isinstance(end, ParsedEnded)
    return end.num_reasoning


@pytest.mark.parametrize(("tokens", "inside", "expected"), CASES)
@pytest.mark.parametrize("group", [1, 2, 16])
def test_tokens_between_the_tags_are_counted(
    tokens: list[str | bytes], inside: bool, expected: int, group: int
) -> None:
    assert count(tokens, inside, group) == expected


@given(
    thought=st.lists(st.sampled_from(["a", "bc", "\n", "<", "</t"]), max_size=8),
    rest=st.lists(st.sampled_from(["x", "\n", "<think>"]), max_size=5),
    group=st.integers(1, 16),
)
def test_any_grouping_counts_the_same(thought: list[str], rest: list[str], group: int) -> None:
    tokens: list[str | bytes] = ["<think>", *thought, "</think>", *rest]
    assert count(tokens, False, group) == len(thought)
