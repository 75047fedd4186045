"""The grammar hook: holds a request back until its grammar is compiled, then says before each token
what may follow.

The masks of a step are made when the tokens before it are known, while the workers compute that
step (deferred inputs): they cost time only where making them takes longer than the forward pass.
Rows without a grammar never have one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
from headrace.core.ports import AdmissionVerdict, Encode, Ends, none_computed

log = logging.getLogger(__name__)
_YES = AdmissionVerdict("yes")
FEW_WORDS = 64
"""A mask with more words than this that allow something is not looked at for a forced text: the
beginnings of one text are fewer tokens. Looking costs up to 0.1 ms."""
_COMPILING = AdmissionVerdict("not_now", "the grammar is being compiled")
Int32 = npt.NDArray[np.int32]
_NO_ROWS = np.zeros(0, np.int32)


class _Place:
    """Where an answer is, or would be behind drafts. `failure`: why it cannot go on; the next token
    ends it with this. `ahead`: the place behind the draft that may follow, for which masks have
    been made."""

    __slots__ = ("ahead", "draft", "failure", "tracker")

    def __init__(self, tracker: ConstraintTracker) -> None:
        self.tracker = tracker
        self.failure: HeadraceError | None = None
        self.draft = -1
        self.ahead: _Place | None = None

    def fail(self, error: Exception) -> HeadraceError:
        """Something of ours failed over this request: it ends, nobody else does."""
        log.error("a request's grammar failed", exc_info=error)
        self.failure = EngineError("the grammar of this request failed")
        return self.failure

    def mask_spec(self, ending: Int32) -> MaskSpec | None:
        """What may follow; `ending`, the mask that lets it end, where it cannot go on."""
        if self.failure is not None:
            return MaskSpec(False, ending)
        try:
            return self.tracker.mask_spec()
        except Exception as error:
            self.fail(error)
            return MaskSpec(False, ending)

    def follow(self, token: int) -> HeadraceError | None:
        """Goes on by a token; why it cannot."""
        if self.failure is not None:
            return self.failure
        try:
            accepted = self.tracker.accept(token)
        except Exception as error:
            return self.fail(error)
        if not accepted:
            log.error("request out of step with its grammar at token %d", token)
            return EngineError("the answer went out of step with its grammar")
        return None

    def behind(self, draft: int) -> _Place | None:
        """The place behind a draft that its mask allows, None where nothing comes behind it."""
        if self.failure is not None:
            return None
        ahead = _Place(self.tracker.copy())
        if ahead.follow(draft) is not None or ahead.tracker.complete:
            return None
        self.draft, self.ahead = draft, ahead
        return ahead


class _ConstrainedRequest:
    """What the hook keeps for one request; `place`: None until its grammar is compiled."""

    __slots__ = ("constraint", "entry", "place")

    def __init__(self, constraint: Constraint, entry: GrammarEntry) -> None:
        self.constraint = constraint
        self.entry = entry
        self.place: _Place | None = None


class _Lookahead(NamedTuple):
    """A row of a step, at the place before the first of its `drafts` for which there is no mask
    yet."""

    row: int
    request_id: int
    field: str
    place: _Place
    drafts: list[int]


class _MaskRow(NamedTuple):
    """A row that needs a mask."""

    row: _Lookahead
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

    def figures(self) -> dict[str, int]:
        """See AdmissionHook."""
        return {}

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

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """Waits for the compiler; raises what it found."""
        held = self._held.get(request_id)
        if held is None or held.place is not None:
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
        tracker = ConstraintTracker(
            engine.vocabulary_index,
            held.constraint.reasoning,
            matcher,
            jumps_forward=held.entry.jumps_forward,
        )
        held.place = _Place(tracker)
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

    def renew(self) -> None:
        """See AdmissionHook: the workers keep nothing of grammars."""

    def renew_content(self) -> None:
        """See AdmissionHook: they hold nothing else either."""

    @property
    def follows_drafts(self) -> bool:
        """See AdmissionHook."""
        return True

    def deferred_payload(
        self, rows: Int32, request_ids: list[int], drafts: Sequence[Int32]
    ) -> memoryview:
        """The masks of these rows, as far as they need one now; behind each draft that its mask
        allows there is one more."""
        self._forced.clear()
        ahead: list[_Lookahead] = []
        for row, request_id, tokens in zip(rows.tolist(), request_ids, drafts, strict=True):
            held = self._held.get(request_id)
            if held is not None and held.place is not None:
                held.place.ahead = None
                field = held.constraint.field
                ahead.append(_Lookahead(row, request_id, field, held.place, tokens.tolist()))
        if not ahead:
            return NOTHING
        if self._masks is None:
            self._masks = MaskBuffer(self._vocabulary_index.words)
        self._masks.begin(_NO_ROWS)
        offset = 0
        while ahead:
            ahead = self._mask(self._masks, ahead, offset)
            offset += 1
        return self._masks.payload()

    def _mask(self, buffer: MaskBuffer, rows: list[_Lookahead], offset: int) -> list[_Lookahead]:
        """The masks of these rows' tokens at an offset; the rows behind a draft that follows."""
        wanted: list[_MaskRow] = []
        free: list[_Lookahead] = []
        for row in rows:
            mask_spec = row.place.mask_spec(self._vocabulary_index.eos_mask)
            if mask_spec is not None:
                wanted.append(_MaskRow(row, mask_spec))
            elif row.drafts:
                free.append(row)
        wanted.sort(key=lambda entry: not entry.mask_spec.matcher)
        masks = buffer.add(np.asarray([entry.row.row for entry in wanted], np.int32), offset=offset)
        self._fill(wanted, masks)
        for mask, entry in zip(masks, wanted, strict=True):
            _complete(mask, entry.mask_spec)
        self._force(wanted, masks, tell=offset == 0)
        drafting = [entry.row for entry, mask in zip(wanted, masks, strict=True)
                    if entry.row.drafts and _allows(mask, entry.row.drafts[0])]  # fmt: skip
        return [row for row in map(_behind, (*free, *drafting)) if row is not None]

    def forced(self) -> dict[int, list[int]]:
        """The forced tokens that `deferred_payload` has seen."""
        forced, self._forced = self._forced, {}
        return forced if self._jump_forward else {}

    def _force(self, wanted: list[_MaskRow], masks: Int32, *, tell: bool) -> None:
        """Where few tokens may follow, they may all begin one text: then the tokenizer's own are
        taken. `tell`: the core may take them at once."""
        few = np.count_nonzero(masks, axis=1) <= FEW_WORDS
        for index in np.flatnonzero(few).tolist():
            row, mask_spec = wanted[index]
            if not mask_spec.matcher or mask_spec.extra is not None or row.place.failure:
                continue
            tokens = self._force_row(row.place, masks[index])
            if tokens and tell:
                self._forced[row.request_id] = tokens

    def _force_row(self, place: _Place, mask: Int32) -> list[int]:
        try:
            tokens = place.tracker.force()
        except Exception as error:
            place.fail(error)
            mask[:] = self._vocabulary_index.eos_mask
            return []
        if tokens:
            _only(mask, tokens[0])
        return tokens

    def _fill(self, wanted: list[_MaskRow], masks: Int32) -> None:
        """The matchers' masks; one that failed lets its answer end, and the end is told by an
        error."""
        matchers = [
            entry.row.place.tracker.matcher
            for entry in wanted
            if entry.mask_spec.matcher and entry.row.place.tracker.matcher is not None
        ]
        if not matchers:
            return
        engine = self._compiler.engine
        assert engine is not None
        for index, failure in enumerate(engine.backend.fill(matchers, masks[: len(matchers)])):
            if failure is not None:
                row = wanted[index].row
                row.place.failure = InvalidRequest(
                    f"{row.field}: too complex to go on: {failure}", field=row.field
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
            if held is None or held.place is None or request_id in ends:
                continue
            if (failure := _follow(held, held.place, token)) is not None:
                ends[request_id] = failure
            elif held.place.tracker.complete:
                ends[request_id] = "stop"
        return ends


def _allows(mask: Int32, token: int) -> bool:
    return bool(int(mask.view(np.uint32)[token >> 5]) >> (token & 31) & 1)


def _behind(row: _Lookahead) -> _Lookahead | None:
    """The row behind its next draft, if a token may follow that."""
    place = row.place.behind(row.drafts[0])
    return None if place is None else row._replace(place=place, drafts=row.drafts[1:])


def _follow(held: _ConstrainedRequest, place: _Place, token: int) -> HeadraceError | None:
    """A token counts. Behind a draft the place is as its mask has left it."""
    if place.ahead is not None and place.draft == token and place.failure is None:
        held.place = place.ahead
        return None
    return place.follow(token)
