"""The grammar gate: holds a request back until its grammar is compiled, then says before each token what may follow.

The masks of a step are made when the tokens before it are known, while the workers compute that step (late payload):
they cost time only where making them takes longer than the forward pass. Rows without a grammar never have one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import EngineError, HeadraceError, InvalidRequest
from headrace.base.wire.grammar import GATE, NOTHING, Constraint, MaskBuffer, Vocabulary, unpack
from headrace.base.wire.request import EngineRequest
from headrace.core.grammar.compiler import CompileLimits, Compiler, Entry
from headrace.core.grammar.follower import Follower, Wish
from headrace.core.grammar.lexicon import Lexicon
from headrace.core.ports import Encode, Ends, Verdict

log = logging.getLogger(__name__)
_YES = Verdict("yes")
FEW_WORDS = 64
"""A mask with more words than this that allow something is not looked at for a forced text: the beginnings of one text
are fewer tokens. Looking costs up to 0.1 ms."""
_COMPILING = Verdict("not_now", "the grammar is being compiled")
Int32 = npt.NDArray[np.int32]


class _Held:
    """What the gate keeps for one request."""

    __slots__ = ("constraint", "entry", "failure", "follower")

    def __init__(self, constraint: Constraint, entry: Entry) -> None:
        self.constraint = constraint
        self.entry = entry
        self.follower: Follower | None = None
        self.failure: str | None = None


class _Wanted(NamedTuple):
    """A row that needs a mask."""

    row: int
    request_id: int
    held: _Held
    follower: Follower
    wish: Wish


def _only(mask: Int32, token: int) -> None:
    mask[:] = 0
    mask.view(np.uint32)[token >> 5] = 1 << (token & 31)


def _complete(mask: Int32, wish: Wish) -> None:
    """What the matcher has not filled."""
    if wish.only is not None:
        _only(mask, wish.only)
    elif wish.extra is not None and wish.matcher:
        mask |= wish.extra
    elif wish.extra is not None:
        mask[:] = wish.extra
    else:
        assert wish.matcher, "a wish for nothing"


class GrammarGate:
    """Implements ports.Gate. Invariant: `_held` has exactly the admitted requests with a constraint.

    `encoder` makes the tokenizer's encode (text, no control tokens): with it forced texts are cut into tokens as the
    model knows them. Without `jump` they are sampled all the same.
    """

    name = GATE

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        *,
        backend: str = "llguidance",
        limits: CompileLimits | None = None,
        encoder: Callable[[], Encode] | None = None,
        jump: bool = True,
    ) -> None:
        self._compiler = Compiler(load, backend=backend, limits=limits, encoder=encoder)
        self._held: dict[int, _Held] = {}
        self._masks: MaskBuffer | None = None
        self._jump = jump
        self._forced: dict[int, list[int]] = {}

    @property
    def num_held(self) -> int:
        """Requests with a constraint that have not ended."""
        return len(self._held)

    def admit(self, request: EngineRequest) -> Verdict:
        """Starts to compile what is new."""
        raw = request.gates.get(GATE)
        if raw is None:
            return _YES
        try:
            constraint = unpack(raw)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest("gates.grammar: malformed", field="gates.grammar") from None
        entry = self._compiler.get(constraint.grammar)
        self._held[request.id] = _Held(constraint, entry)
        return _YES

    def ready(self, request_id: int) -> Verdict:
        """Waits for the compiler; raises what it found."""
        held = self._held.get(request_id)
        if held is None or held.follower is not None:
            return _YES
        if not held.entry.done:
            return _COMPILING
        self._compiler.shrink()
        if (error := held.entry.error) is not None:
            field = held.constraint.field
            raise type(error)(f"{field}: {error.message}", field=field)
        engine = self._compiler.engine
        assert engine is not None, "compiled without an engine"
        matcher = held.entry.matcher
        held.follower = Follower(engine.lexicon, held.constraint.reasoning, matcher)
        return _YES

    def payload(self, request_ids: list[int]) -> bytes | None:
        """Nothing is known early."""
        return None

    def finish(self, request_id: int) -> None:
        """Forgets the request."""
        self._held.pop(request_id, None)

    def follows(self, request_ids: list[int]) -> bool:
        """Whether any of them has a constraint."""
        held = self._held
        return bool(held) and any(request_id in held for request_id in request_ids)

    def late(self, rows: Int32, request_ids: list[int]) -> memoryview:
        """The masks of these rows, as far as they need one now."""
        self._forced.clear()
        wanted: list[_Wanted] = []
        for row, request_id in zip(rows.tolist(), request_ids, strict=True):
            held = self._held.get(request_id)
            if held is not None and held.follower is not None:
                wish = held.follower.wish()
                if wish is not None:
                    wanted.append(_Wanted(row, request_id, held, held.follower, wish))
        if not wanted:
            return NOTHING
        wanted.sort(key=lambda entry: not entry.wish.matcher)
        if self._masks is None:
            self._masks = MaskBuffer(self._lexicon.words)
        masks = self._masks.begin(np.asarray([entry.row for entry in wanted], np.int32))
        self._fill(wanted, masks)
        for mask, entry in zip(masks, wanted, strict=True):
            _complete(mask, entry.wish)
        self._force(wanted, masks)
        return self._masks.payload()

    def forced(self) -> dict[int, list[int]]:
        """What `late` found to be without a choice."""
        found, self._forced = self._forced, {}
        return found if self._jump else {}

    def _force(self, wanted: list[_Wanted], masks: Int32) -> None:
        """Where few tokens may follow, they may all begin one text: then the tokenizer's own are taken."""
        few = np.count_nonzero(masks, axis=1) <= FEW_WORDS
        for index in np.flatnonzero(few).tolist():
            entry = wanted[index]
            if not entry.wish.matcher or entry.wish.extra is not None:
                continue
            if entry.held.failure is None and (tokens := entry.follower.force()):
                _only(masks[index], tokens[0])
                self._forced[entry.request_id] = tokens

    def _fill(self, wanted: list[_Wanted], masks: Int32) -> None:
        """The matchers' masks; one that failed lets its answer end, and the end is told by an error."""
        matchers = [
            entry.follower.matcher
            for entry in wanted
            if entry.wish.matcher and entry.follower.matcher is not None
        ]
        if not matchers:
            return
        engine = self._compiler.engine
        assert engine is not None
        for index, failure in enumerate(engine.backend.fill(matchers, masks[: len(matchers)])):
            if failure is not None:
                wanted[index].held.failure = failure
                masks[index] = self._lexicon.eos_mask

    @property
    def _lexicon(self) -> Lexicon:
        engine = self._compiler.engine
        assert engine is not None
        return engine.lexicon

    def landed(self, request_ids: list[int], tokens: list[int]) -> Ends:
        """Follows the new tokens."""
        ends: Ends = {}
        if not self._held:
            return ends
        for request_id, token in zip(request_ids, tokens, strict=True):
            held = self._held.get(request_id)
            if held is None or held.follower is None:
                continue
            if (failure := self._follow(held, held.follower, token)) is not None:
                ends[request_id] = failure
            elif held.follower.complete:
                ends[request_id] = "stop"
        return ends

    def _follow(self, held: _Held, follower: Follower, token: int) -> HeadraceError | None:
        if held.failure is not None:
            field = held.constraint.field
            return InvalidRequest(f"{field}: too complex to go on: {held.failure}", field=field)
        if not follower.accept(token):
            log.error("request out of step with its grammar at token %d", token)
            return EngineError("the answer went out of step with its grammar")
        return None
