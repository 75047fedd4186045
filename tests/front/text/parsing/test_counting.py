"""API-03, REG-096: reasoning tokens, however tags, tokens and prompt lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.front.client.events import Delta, Ended
from headrace.front.server.conversation.stages import ParsedAnswer, ParsedEnded
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


CALL = ['<tool_call>{"name": "f", ', '"arguments": {"s": "', "x", '"}', "}", "</tool", "_call", ">"]


@given(
    before=st.lists(st.sampled_from(["a", "bc ", "<"]), max_size=4),
    behind=st.lists(st.sampled_from(["\n", "<tool_call>", "x"]), max_size=8),
    group=st.integers(2, 16),
    held=st.integers(0, 1),
)
def test_the_one_call_ends_at_its_token_however_the_answer_is_grouped(
    before: list[str], behind: list[str], group: int, held: int
) -> None:
    """`held`: so many characters come with the next token, as they may begin a stop string."""
    tokens = [*before, *CALL, *behind]
    alone, together = one_call(tokens, 1, 0), one_call(tokens, group, held)
    assert together == alone and alone[0] == list(range(alone[1]))
    assert len(before) < alone[1] <= len(before) + len(CALL)


def one_call(tokens: list[str], group: int, held: int) -> tuple[list[int], int]:
    """The tokens of the answer whose one call is asked for, and how many were told at its end."""
    parser = parser_of("hermes", only_one_call=True)
    answer = ParsedAnswer(parser, dict(enumerate(tokens)))
    ids: list[int] = []
    sent = 0
    for i in range(0, len(tokens), group):
        known = "".join(tokens[: i + group])
        end = len(known) if i + group >= len(tokens) else max(sent, len(known) - held)
        some = list(range(i, min(i + group, len(tokens))))
        for made in answer.take(Delta(index=0, text=known[sent:end], token_ids=some)):
            if isinstance(made, Ended):
                return ids, made.num_output
            assert isinstance(made, Delta)
            ids += made.token_ids
        sent = end
    raise AssertionError("the call did not end the answer")
