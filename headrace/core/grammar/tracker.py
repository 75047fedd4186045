"""One answer as the grammar hook follows it: reasoning first, if there is any, then the grammar.

    OPENING     the answer may begin with the tag that opens the reasoning, or with the grammar at
                once
    REASONING   anything goes until the closing tag; after the budget only the closing tag does, as
                its own token where the vocabulary has one: spelled out, the model does not take it
                for the tag and may write the tag again, into its answer
    GRAMMAR     the matcher says what may follow (line breaks behind the closing tag belong to the
                tag)
    FREE        nothing is asked any more

Tags are found in the tokens' text, so that it does not matter how they are cut into tokens.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.wire.grammar import ReasoningRule
from headrace.core.grammar.vocabulary_index import VocabularyIndex, overlaps
from headrace.core.ports import Matcher

MAX_BREAKS = 2
Int32 = npt.NDArray[np.int32]


class Phase(Enum):
    """Where an answer is."""

    OPENING = "opening"
    REASONING = "reasoning"
    GRAMMAR = "grammar"
    FREE = "free"


class MaskSpec(msgspec.Struct, frozen=True):
    """What a step needs for an answer: the matcher's mask (if `matcher`), and `extra` or-ed to it;
    without a matcher `extra` is the mask, or `only` the one token that may follow."""

    matcher: bool
    extra: Int32 | None = None
    only: int | None = None


class ConstraintTracker:
    """The state of one answer. `matcher` None: only the reasoning is bounded. `jumps_forward`:
    forced text is looked for."""

    def __init__(
        self,
        vocabulary_index: VocabularyIndex,
        rule: ReasoningRule | None,
        matcher: Matcher | None,
        *,
        jumps_forward: bool = True,
    ) -> None:
        self._jumps_forward = jumps_forward
        self._vocabulary_index = vocabulary_index
        self._budget = None if rule is None else rule.budget
        self._open = b"" if rule is None else rule.open.encode()
        self._close = b"" if rule is None else rule.close.encode()
        # a grammar waits for the tag itself
        until = () if rule is None or matcher is not None else rule.until
        self._ends = [self._close, *(tag.encode() for tag in until)]
        self._longest = max(map(len, self._ends))
        self._close_id = None if rule is None else vocabulary_index.token_of(self._close)
        self._fresh = matcher
        self.matcher = None if matcher is None else matcher.copy()
        self._alive = True
        self._head = b""
        self._tail = b""
        self._num_reasoning = 0
        self._breaks_left = 0
        self._forced: deque[int] = deque()
        self.phase = self._first_phase(rule)

    def _first_phase(self, rule: ReasoningRule | None) -> Phase:
        if rule is not None and rule.inside:
            return Phase.REASONING
        if rule is not None and rule.may_open:
            return Phase.OPENING
        return self._constrained

    @property
    def _constrained(self) -> Phase:
        return Phase.FREE if self._fresh is None else Phase.GRAMMAR

    def mask_spec(self) -> MaskSpec | None:
        """What the next token needs; None: it is free."""
        if self.phase is Phase.GRAMMAR:
            if self._forced:
                return MaskSpec(False, only=self._forced[0])
            return MaskSpec(True, self._vocabulary_index.break_ids if self._breaks_left else None)
        if self.phase is Phase.REASONING:
            return self._while_reasoning()
        if self.phase is Phase.OPENING and self._fresh is not None:
            rest = self._open[len(self._head) :]
            return MaskSpec(self._alive, self._vocabulary_index.leading_to(rest))
        return None

    def _while_reasoning(self) -> MaskSpec | None:
        if self._budget is not None and self._num_reasoning >= self._budget:
            if self._close_id is not None:
                return MaskSpec(False, only=self._close_id)
            done = overlaps(self._tail, self._close)[0]
            return MaskSpec(False, self._vocabulary_index.forcing(self._close[done:]))
        if self._fresh is None:
            return None
        mask = self._vocabulary_index.crossing(self._tail, self._close)
        return None if mask is None else MaskSpec(False, mask)

    def force(self) -> list[int]:
        """The tokens that must follow now, if any. From here on `mask_spec` allows them alone, one
        by one, so that an answer has the same tokens whether they are sampled or not."""
        if self.phase is not Phase.GRAMMAR or self._breaks_left or self.matcher is None:
            return list(self._forced)
        if self._jumps_forward:
            self._forced = deque(self.matcher.forced())
        return list(self._forced)

    def accept(self, token: int) -> bool:
        """Goes on by a token; false if it broke the grammar."""
        if self.phase is Phase.GRAMMAR:
            return self._accept_grammar(token)
        if self.phase is Phase.REASONING:
            self._num_reasoning += 1
            self._reason(self._piece(token))
        elif self.phase is Phase.OPENING:
            return self._accept_opening(token)
        return True

    def copy(self) -> ConstraintTracker:
        """Another one at the same place."""
        other = copy(self)
        other.matcher = None if self.matcher is None else self.matcher.copy()
        other._forced = self._forced.copy()
        return other

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return self.phase is Phase.GRAMMAR and self.matcher is not None and self.matcher.complete

    def _piece(self, token: int) -> bytes:
        pieces = self._vocabulary_index.pieces
        return pieces[token] if token < len(pieces) else b""

    def _accept_grammar(self, token: int) -> bool:
        assert self.matcher is not None
        if self._forced and self._forced.popleft() != token:
            self._forced.clear()
        if self._breaks_left and token in self._vocabulary_index.breaks:
            self._breaks_left -= 1
            return True
        self._breaks_left = 0
        return self.matcher.accept(token)

    def _accept_opening(self, token: int) -> bool:
        self._head += self._piece(token)
        if self.matcher is not None:
            self._alive = self._alive and self.matcher.accept(token)
        if self._head.startswith(self._open):
            self.phase = Phase.REASONING
            self._reason(self._head[len(self._open) :])
        elif not self._open.startswith(self._head):
            self.phase = self._constrained
            return self._alive
        return True

    def _reason(self, text: bytes) -> None:
        self._tail += text
        if any(end in self._tail for end in self._ends):
            self.phase = self._constrained
            self._breaks_left = MAX_BREAKS
            self.matcher = None if self._fresh is None else self._fresh.copy()
            return
        self._tail = self._tail[-self._longest :]
