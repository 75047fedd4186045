"""The grammar gate: holds a request back until its grammar is compiled, then says before each token what may follow.

The masks of a step are made when the tokens before it are known, while the workers compute that step (late payload):
they cost time only where making them takes longer than the forward pass. Rows without a grammar never have one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import EngineError, HeadraceError, InvalidRequest
from headrace.base.wire.grammar import GATE, Constraint, Vocabulary, pack_masks, unpack
from headrace.base.wire.request import EngineRequest
from headrace.core.grammar.compiler import CompileLimits, Compiler, Entry
from headrace.core.grammar.follower import Follower, Wish
from headrace.core.grammar.lexicon import Lexicon
from headrace.core.ports import Ends, Verdict

log = logging.getLogger(__name__)
_YES = Verdict("yes")
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


class GrammarGate:
    """Implements ports.Gate. Invariant: `_held` has exactly the admitted requests with a constraint."""

    name = GATE

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        *,
        backend: str = "llguidance",
        limits: CompileLimits | None = None,
    ) -> None:
        self._compiler = Compiler(load, backend=backend, limits=limits)
        self._held: dict[int, _Held] = {}

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

    def late(self, rows: Int32, request_ids: list[int]) -> bytes:
        """The masks of these rows, as far as they need one now."""
        wanted = []
        for row, request_id in zip(rows.tolist(), request_ids, strict=True):
            held = self._held.get(request_id)
            if held is not None and held.follower is not None:
                wish = held.follower.wish()
                if wish is not None:
                    wanted.append((row, held, held.follower, wish))
        if not wanted:
            return b""
        wanted.sort(key=lambda entry: not entry[3].matcher)
        masks = np.zeros((len(wanted), self._lexicon.words), np.int32)
        self._fill(wanted, masks)
        for mask, (_, _, _, wish) in zip(masks, wanted, strict=True):
            if wish.extra is not None:
                mask |= wish.extra
        return pack_masks(np.asarray([entry[0] for entry in wanted], np.int32), masks)

    def _fill(self, wanted: list[tuple[int, _Held, Follower, Wish]], masks: Int32) -> None:
        """The matchers' masks; one that failed lets its answer end, and the end is told by an error."""
        matchers = [
            follower.matcher
            for _, _, follower, wish in wanted
            if wish.matcher and follower.matcher is not None
        ]
        if not matchers:
            return
        engine = self._compiler.engine
        assert engine is not None
        for index, failure in enumerate(engine.backend.fill(matchers, masks[: len(matchers)])):
            if failure is not None:
                wanted[index][1].failure = failure
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
                ends[request_id] = None
        return ends

    def _follow(self, held: _Held, follower: Follower, token: int) -> HeadraceError | None:
        if held.failure is not None:
            field = held.constraint.field
            return InvalidRequest(f"{field}: too complex to go on: {held.failure}", field=field)
        if not follower.accept(token):
            log.error("request out of step with its grammar at token %d", token)
            return EngineError("the answer went out of step with its grammar")
        return None
