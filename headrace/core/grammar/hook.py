"""The grammar hook: holds a request back until its grammar is compiled, then says before each token
what may follow.

The masks of a step are made when the tokens before it are known, while the workers compute that
step (deferred inputs): they cost time only where making them takes longer than the forward pass.
Rows without a grammar never have one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import EngineError, HeadraceError, InvalidRequest
from headrace.base.wire.grammar import (
    GRAMMAR_HOOK,
    NOTHING,
    Constraint,
    MaskBuffer,
    Vocabulary,
    unpack,
)
from headrace.base.wire.request import EngineRequest
from headrace.core.grammar.compiler import CompileLimits, Compiler, GrammarEntry
from headrace.core.grammar.tracker import ConstraintTracker, MaskSpec
from headrace.core.grammar.vocabulary_index import VocabularyIndex
from headrace.core.ports import AdmissionVerdict, Encode, Ends

log = logging.getLogger(__name__)
_YES = AdmissionVerdict("yes")
FEW_WORDS = 64
"""A mask with more words than this that allow something is not looked at for a forced text: the
beginnings of one text are fewer tokens. Looking costs up to 0.1 ms."""
_COMPILING = AdmissionVerdict("not_now", "the grammar is being compiled")
Int32 = npt.NDArray[np.int32]


class _ConstrainedRequest:
    """What the hook keeps for one request."""

    __slots__ = ("constraint", "entry", "failure", "tracker")

    def __init__(self, constraint: Constraint, entry: GrammarEntry) -> None:
        self.constraint = constraint
        self.entry = entry
        self.tracker: ConstraintTracker | None = None
        self.failure: HeadraceError | None = None
        """Why it cannot go on; the next token ends it with this."""

    def fail(self, error: Exception) -> None:
        """Something of ours failed over this request: it ends, nobody else does."""
        log.error("a request's grammar failed", exc_info=error)
        self.failure = EngineError("the grammar of this request failed")

    def mask_spec(self, tracker: ConstraintTracker, ending: Int32) -> MaskSpec | None:
        """What may follow; `ending`, the mask that lets it end, where it cannot go on."""
        try:
            return tracker.mask_spec() if self.failure is None else MaskSpec(False, ending)
        except Exception as error:
            self.fail(error)
            return MaskSpec(False, ending)


class _MaskRow(NamedTuple):
    """A row that needs a mask."""

    row: int
    request_id: int
    held: _ConstrainedRequest
    tracker: ConstraintTracker
    mask_spec: MaskSpec


def _only(mask: Int32, token: int) -> None:
    mask[:] = 0
    mask.view(np.uint32)[token >> 5] = 1 << (token & 31)


def _complete(mask: Int32, mask_spec: MaskSpec) -> None:
    """What the matcher has not filled."""
    if mask_spec.only is not None:
        _only(mask, mask_spec.only)
    elif mask_spec.extra is not None and mask_spec.matcher:
        mask |= mask_spec.extra
    elif mask_spec.extra is not None:
        mask[:] = mask_spec.extra
    else:
        assert mask_spec.matcher, "a mask_spec for nothing"


class GrammarHook:
    """Implements ports.AdmissionHook. Invariant: `_held` has exactly the admitted requests with a
    constraint.

    `encoder` makes the tokenizer's encode (text, no control tokens): with it forced texts are cut
    into tokens as the model knows them. Without `jump_forward` they are sampled all the same.
    """

    name = GRAMMAR_HOOK

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        *,
        backend: str = "llguidance",
        limits: CompileLimits | None = None,
        encoder: Callable[[], Encode] | None = None,
        jump_forward: bool = True,
    ) -> None:
        self._compiler = Compiler(load, backend=backend, limits=limits, encoder=encoder)
        self._held: dict[int, _ConstrainedRequest] = {}
        self._masks: MaskBuffer | None = None
        self._jump_forward = jump_forward
        self._forced: dict[int, list[int]] = {}

    @property
    def num_held(self) -> int:
        """Requests with a constraint that have not ended."""
        return len(self._held)

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """Starts to compile what is new."""
        raw = request.hook_payloads.get(GRAMMAR_HOOK)
        if raw is None:
            return _YES
        try:
            constraint = unpack(raw)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(
                "hook_payloads.grammar: malformed", field="hook_payloads.grammar"
            ) from None
        entry = self._compiler.get(constraint.grammar, tenant=request.tenant)
        self._held[request.id] = _ConstrainedRequest(constraint, entry)
        return _YES

    def ready(self, request_id: int) -> AdmissionVerdict:
        """Waits for the compiler; raises what it found."""
        held = self._held.get(request_id)
        if held is None or held.tracker is not None:
            return _YES
        if not held.entry.done:
            return _COMPILING
        self._compiler.shrink()
        if (error := held.entry.error) is not None:
            field = held.constraint.field
            raise type(error)(
                f"{field}: {error.message}", field=field, retry_after_s=error.retry_after_s
            )
        engine = self._compiler.engine
        assert engine is not None, "compiled without an engine"
        matcher = held.entry.matcher
        held.tracker = ConstraintTracker(
            engine.vocabulary_index, held.constraint.reasoning, matcher
        )
        return _YES

    def payload(self, request_ids: list[int]) -> bytes | None:
        """Nothing is known early."""
        return None

    def finish(self, request_id: int) -> None:
        """Forgets the request."""
        self._held.pop(request_id, None)

    def defers(self, request_ids: list[int]) -> bool:
        """Whether any of them has a constraint."""
        held = self._held
        return bool(held) and any(request_id in held for request_id in request_ids)

    def deferred_payload(self, rows: Int32, request_ids: list[int]) -> memoryview:
        """The masks of these rows, as far as they need one now."""
        self._forced.clear()
        wanted: list[_MaskRow] = []
        for row, request_id in zip(rows.tolist(), request_ids, strict=True):
            held = self._held.get(request_id)
            if held is not None and held.tracker is not None:
                mask_spec = held.mask_spec(held.tracker, self._vocabulary_index.eos_mask)
                if mask_spec is not None:
                    wanted.append(_MaskRow(row, request_id, held, held.tracker, mask_spec))
        if not wanted:
            return NOTHING
        wanted.sort(key=lambda entry: not entry.mask_spec.matcher)
        if self._masks is None:
            self._masks = MaskBuffer(self._vocabulary_index.words)
        masks = self._masks.begin(np.asarray([entry.row for entry in wanted], np.int32))
        self._fill(wanted, masks)
        for mask, entry in zip(masks, wanted, strict=True):
            _complete(mask, entry.mask_spec)
        self._force(wanted, masks)
        return self._masks.payload()

    def forced(self) -> dict[int, list[int]]:
        """The forced tokens that `deferred_payload` has seen."""
        forced, self._forced = self._forced, {}
        return forced if self._jump_forward else {}

    def _force(self, wanted: list[_MaskRow], masks: Int32) -> None:
        """Where few tokens may follow, they may all begin one text: then the tokenizer's own are
        taken."""
        few = np.count_nonzero(masks, axis=1) <= FEW_WORDS
        for index in np.flatnonzero(few).tolist():
            entry = wanted[index]
            if not entry.mask_spec.matcher or entry.mask_spec.extra is not None:
                continue
            if entry.held.failure is None:
                self._force_row(entry, masks[index])

    def _force_row(self, entry: _MaskRow, mask: Int32) -> None:
        try:
            tokens = entry.tracker.force()
        except Exception as error:
            entry.held.fail(error)
            mask[:] = self._vocabulary_index.eos_mask
            return
        if tokens:
            _only(mask, tokens[0])
            self._forced[entry.request_id] = tokens

    def _fill(self, wanted: list[_MaskRow], masks: Int32) -> None:
        """The matchers' masks; one that failed lets its answer end, and the end is told by an
        error."""
        matchers = [
            entry.tracker.matcher
            for entry in wanted
            if entry.mask_spec.matcher and entry.tracker.matcher is not None
        ]
        if not matchers:
            return
        engine = self._compiler.engine
        assert engine is not None
        for index, failure in enumerate(engine.backend.fill(matchers, masks[: len(matchers)])):
            if failure is not None:
                held, field = wanted[index].held, wanted[index].held.constraint.field
                held.failure = InvalidRequest(
                    f"{field}: too complex to go on: {failure}", field=field
                )
                masks[index] = self._vocabulary_index.eos_mask

    @property
    def _vocabulary_index(self) -> VocabularyIndex:
        engine = self._compiler.engine
        assert engine is not None
        return engine.vocabulary_index

    def accept_tokens(self, request_ids: list[int], tokens: list[int]) -> Ends:
        """Follows the new tokens."""
        ends: Ends = {}
        if not self._held:
            return ends
        for request_id, token in zip(request_ids, tokens, strict=True):
            held = self._held.get(request_id)
            if held is None or held.tracker is None or request_id in ends:
                continue
            if (failure := self._follow(held, held.tracker, token)) is not None:
                ends[request_id] = failure
            elif held.tracker.complete:
                ends[request_id] = "stop"
        return ends

    def _follow(
        self, held: _ConstrainedRequest, tracker: ConstraintTracker, token: int
    ) -> HeadraceError | None:
        if held.failure is not None:
            return held.failure
        try:
            accepted = tracker.accept(token)
        except Exception as error:
            held.fail(error)
            return held.failure
        if not accepted:
            log.error("request out of step with its grammar at token %d", token)
            return EngineError("the answer went out of step with its grammar")
        return None
