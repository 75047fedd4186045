"""Where the reasoning ends, however its tag is cut into tokens (API-05, REG-097)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headrace.base.wire.grammar import ReasoningRule, Vocabulary
from headrace.core.grammar.follower import Follower, Phase, Wish
from headrace.core.grammar.lexicon import Lexicon

PIECES = [b"<", b"/", b"think", b">", b"</", b"</think>", b"a", b"nk>", b">\n\n", b">b", b"\n", b"thi",
          b"x</think>y", b"<think>", b"b", b"<eos>"]  # fmt: skip
LEXICON = Lexicon(Vocabulary(pieces=PIECES, special_ids=(15,), eos_ids=(15,), width=40))
ID = {piece: i for i, piece in enumerate(PIECES)}


class Letters:
    """A matcher of `ab`."""

    def __init__(self, text: bytes = b"") -> None:
        self.text = text

    def accept(self, token: int) -> bool:
        self.text += PIECES[token]
        return b"ab".startswith(self.text)

    @property
    def complete(self) -> bool:
        return self.text == b"ab"

    def copy(self) -> Letters:
        return Letters(self.text)


def inside(budget: int | None = None) -> Follower:
    rule = ReasoningRule(
        open="<think>", close="</think>", inside=True, may_open=False, budget=budget
    )
    return Follower(LEXICON, rule, Letters())


def allowed(wish: Wish | None) -> set[bytes]:
    if wish is None:
        return set(PIECES)
    assert wish.extra is not None
    bits = np.unpackbits(wish.extra.view(np.uint8), bitorder="little")
    return {PIECES[i] for i in np.flatnonzero(bits)}


def splits(text: bytes) -> list[list[int]]:
    """Every way to write `text` in tokens."""
    if not text:
        return [[]]
    return [
        [i, *rest]
        for i, piece in enumerate(PIECES)
        if piece and text.startswith(piece)
        for rest in splits(text[len(piece) :])
    ]


def test_every_spelling_of_the_tag_ends_the_reasoning() -> None:
    spellings = splits(b"a</think>")
    assert len(spellings) > 3
    for tokens in spellings:
        follower = inside()
        for token in tokens[:-1]:
            assert follower.accept(token)
            assert follower.phase is Phase.REASONING
        assert follower.accept(tokens[-1]) and follower.phase is Phase.GRAMMAR
        for token in (ID[b"a"], ID[b"b"]):
            assert follower.accept(token)
        assert follower.complete


def test_a_token_that_would_carry_text_across_the_tag_is_not_allowed() -> None:
    follower = inside()
    assert b"x</think>y" not in allowed(follower.wish())
    for piece in (b"</", b"think"):
        follower.accept(ID[piece])
    offered = allowed(follower.wish())
    assert b">b" not in offered and {b">", b">\n\n", b"a"} <= offered


def test_line_breaks_behind_the_tag_belong_to_it() -> None:
    follower = inside()
    for piece in (b"</", b"think", b">\n\n", b"\n"):
        assert follower.accept(ID[piece])
    wish = follower.wish()
    assert follower.phase is Phase.GRAMMAR and wish is not None and wish.matcher
    assert allowed(Wish(False, wish.extra)) == {b"\n"}
    assert follower.accept(ID[b"a"])
    assert follower.wish() == Wish(True, None), "no more once the answer has begun"


@pytest.mark.parametrize("head", list(itertools.product([b"a", b"<", b"</", b"/"], repeat=2)))
def test_a_spent_budget_allows_nothing_but_the_rest_of_the_tag(head: tuple[bytes, ...]) -> None:
    follower = inside(budget=2)
    for piece in head:
        assert follower.wish() is None or b"a" in allowed(follower.wish())
        follower.accept(ID[piece])
    text = b"".join(head)
    for _ in range(8):
        if follower.phase is not Phase.REASONING:
            break
        offered = allowed(follower.wish())
        assert offered, text
        piece = min(offered, key=len)
        text += piece
        follower.accept(ID[piece])
    assert follower.phase is Phase.GRAMMAR and text.endswith(b"</think>")
    assert text.count(b"</think>") == 1


def test_a_call_within_the_thoughts_is_not_cut_by_their_budget() -> None:
    rule = ReasoningRule(
        open="<think>", close="</think>", inside=True, may_open=False, budget=3, until=("<a>",)
    )
    for pieces in ([b"<", b"a", b">"], [b"b", b"<", b"a", b">"]):
        follower = Follower(LEXICON, rule, None)
        for piece in pieces[:3]:
            assert follower.wish() is None
            follower.accept(ID[piece])
        if len(pieces) == 3:
            assert follower.phase is Phase.FREE and follower.wish() is None
        else:
            assert allowed(follower.wish()) == {b"<", b"</", b"</think>"}, "spent before the call"
    held = Follower(LEXICON, rule, Letters())
    for piece in (b"<", b"a", b">"):
        held.accept(ID[piece])
    assert held.phase is Phase.REASONING, "a grammar waits for the tag"


def test_an_answer_may_open_its_reasoning_or_begin_at_once() -> None:
    rule = ReasoningRule(open="<think>", close="</think>", inside=False, may_open=True)
    for tokens, phase in (
        ([b"<think>"], Phase.REASONING),
        ([b"<", b"think", b">"], Phase.REASONING),
        ([b"<", b"thi", b"nk>"], Phase.REASONING),
        ([b"a"], Phase.GRAMMAR),
    ):
        follower = Follower(LEXICON, rule, Letters())
        wish = follower.wish()
        assert wish is not None and wish.matcher
        assert allowed(Wish(False, wish.extra)) >= {b"<", b"<think>"}
        for piece in tokens:
            assert follower.accept(ID[piece])
        assert follower.phase is phase


def test_earlier_turns_do_not_count() -> None:
    """REG-098: the prompt never reaches the follower; only this answer's tag does."""
    follower = inside()
    assert follower.phase is Phase.REASONING
    follower.accept(ID[b"a"])
    assert follower.phase is Phase.REASONING and not follower.complete
