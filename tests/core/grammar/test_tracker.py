"""Where the reasoning ends, however its tag is cut into tokens (API-05, REG-097)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headrace.base.wire.grammar import ReasoningRule, Vocabulary
from headrace.core.grammar.tracker import ConstraintTracker, MaskSpec, Phase
from headrace.core.grammar.vocabulary_index import VocabularyIndex

PIECES = [b"<", b"/", b"think", b">", b"</", b"</think>", b"a", b"nk>", b">\n\n", b">b", b"\n", b"thi",
          b"x</think>y", b"<think>", b"b", b"<eos>"]  # fmt: skip
INDEX = VocabularyIndex(Vocabulary(pieces=PIECES, special_ids=(15,), eos_ids=(15,), width=40))
ID = {piece: i for i, piece in enumerate(PIECES)}
SPELLED = VocabularyIndex(
    Vocabulary(
        pieces=[b"" if piece == b"</think>" else piece for piece in PIECES],
        special_ids=(15,),
        eos_ids=(15,),
        width=40,
    )
)
"""The same without a token that is the whole tag."""


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


def inside(budget: int | None = None, index: VocabularyIndex = INDEX) -> ConstraintTracker:
    rule = ReasoningRule(
        open="<think>", close="</think>", inside=True, may_open=False, budget=budget
    )
    return ConstraintTracker(index, rule, Letters())


def allowed(mask_spec: MaskSpec | None) -> set[bytes]:
    if mask_spec is None:
        return set(PIECES)
    if mask_spec.only is not None:
        return {PIECES[mask_spec.only]}
    assert mask_spec.extra is not None
    bits = np.unpackbits(mask_spec.extra.view(np.uint8), bitorder="little")
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
        tracker = inside()
        for token in tokens[:-1]:
            assert tracker.accept(token)
            assert tracker.phase is Phase.REASONING
        assert tracker.accept(tokens[-1]) and tracker.phase is Phase.GRAMMAR
        for token in (ID[b"a"], ID[b"b"]):
            assert tracker.accept(token)
        assert tracker.complete


def test_a_token_that_would_carry_text_across_the_tag_is_not_allowed() -> None:
    tracker = inside()
    assert b"x</think>y" not in allowed(tracker.mask_spec())
    for piece in (b"</", b"think"):
        tracker.accept(ID[piece])
    offered = allowed(tracker.mask_spec())
    assert b">b" not in offered and {b">", b">\n\n", b"a"} <= offered


def test_line_breaks_behind_the_tag_belong_to_it() -> None:
    tracker = inside()
    for piece in (b"</", b"think", b">\n\n", b"\n"):
        assert tracker.accept(ID[piece])
    mask_spec = tracker.mask_spec()
    assert tracker.phase is Phase.GRAMMAR and mask_spec is not None and mask_spec.matcher
    assert allowed(MaskSpec(False, mask_spec.extra)) == {b"\n"}
    assert tracker.accept(ID[b"a"])
    assert tracker.mask_spec() == MaskSpec(True, None), "no more once the answer has begun"


HEADS = list(itertools.product([b"a", b"<", b"</", b"/"], repeat=2))


@pytest.mark.parametrize("head", HEADS)
def test_a_spent_budget_allows_nothing_but_the_token_that_is_the_tag(
    head: tuple[bytes, ...],
) -> None:
    """Spelled out, the model does not know it for the tag, and writes the tag into its answer."""
    tracker = inside(budget=2)
    for piece in head:
        tracker.accept(ID[piece])
    assert allowed(tracker.mask_spec()) == {b"</think>"}
    assert tracker.accept(ID[b"</think>"]) and tracker.phase is Phase.GRAMMAR


def test_of_tokens_that_are_the_tag_the_special_one_is_taken() -> None:
    pieces = [b"</think>", b"a", b"</think>", b"</think>"]
    vocabulary = Vocabulary(pieces=pieces, special_ids=(2,), eos_ids=(1,), width=40)
    assert VocabularyIndex(vocabulary).token_of(b"</think>") == 2
    assert SPELLED.token_of(b"</think>") is None


@pytest.mark.parametrize("head", HEADS)
def test_a_spent_budget_allows_nothing_but_the_rest_of_a_tag_of_several_tokens(
    head: tuple[bytes, ...],
) -> None:
    tracker = inside(budget=2, index=SPELLED)
    for piece in head:
        assert tracker.mask_spec() is None or b"a" in allowed(tracker.mask_spec())
        tracker.accept(ID[piece])
    text = b"".join(head)
    for _ in range(8):
        if tracker.phase is not Phase.REASONING:
            break
        offered = allowed(tracker.mask_spec())
        assert offered, text
        piece = min(offered, key=len)
        text += piece
        tracker.accept(ID[piece])
    assert tracker.phase is Phase.GRAMMAR and text.endswith(b"</think>")
    assert text.count(b"</think>") == 1


def test_a_call_within_the_thoughts_is_not_cut_by_their_budget() -> None:
    rule = ReasoningRule(
        open="<think>", close="</think>", inside=True, may_open=False, budget=3, until=("<a>",)
    )
    for pieces in ([b"<", b"a", b">"], [b"b", b"<", b"a", b">"]):
        tracker = ConstraintTracker(INDEX, rule, None)
        for piece in pieces[:3]:
            assert tracker.mask_spec() is None
            tracker.accept(ID[piece])
        if len(pieces) == 3:
            assert tracker.phase is Phase.FREE and tracker.mask_spec() is None
        else:
            assert allowed(tracker.mask_spec()) == {b"</think>"}, "spent before the call"
    held = ConstraintTracker(INDEX, rule, Letters())
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
        tracker = ConstraintTracker(INDEX, rule, Letters())
        mask_spec = tracker.mask_spec()
        assert mask_spec is not None and mask_spec.matcher
        assert allowed(MaskSpec(False, mask_spec.extra)) >= {b"<", b"<think>"}
        for piece in tokens:
            assert tracker.accept(ID[piece])
        assert tracker.phase is phase


def test_earlier_turns_do_not_count() -> None:
    """REG-098: the prompt never reaches the tracker; only this answer's tag does."""
    tracker = inside()
    assert tracker.phase is Phase.REASONING
    tracker.accept(ID[b"a"])
    assert tracker.phase is Phase.REASONING and not tracker.complete
