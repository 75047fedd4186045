"""The encoder cache as the core keeps its books: which images, videos and sounds the workers hold,
who refers to them, and which go for others. An admission hook.

The workers do what the payload of a step says and decide nothing. An input is told to them once,
when the first request that has it starts; while a request that refers to it is in flight it stays,
also if that request is preempted. Afterwards it stays until its place is needed, the least recently
used first. A waiting request holds no place, so that no circle of waits can form.

The workers encode an input when a prompt's chunk first reaches its tokens: the tokens of a step
bound that work, and what a prefix hit covers is never encoded. While others run, what would hold
them up is encoded ahead instead: a request whose inputs are larger than a step may encode besides
(`WorkerFacts.media_rows`) is given its places and waits, and each step takes a part of a pass,
until all is there. One request is encoded ahead at a time, so that places are held for one at most.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.base.errors import MediaGone
from headrace.base.wire.media import (
    MEDIA_HOOK,
    MediaContent,
    MediaInput,
    MediaPayload,
    MediaWork,
)
from headrace.base.wire.request import EngineRequest
from headrace.core.media_checks import whole_inputs
from headrace.core.ports import AdmissionHook, AdmissionVerdict, none_computed

YES = AdmissionVerdict("yes")
MOST_KEPT_BYTES = 128 << 20
"""Of the content of inputs that the workers hold."""
MOST_PARTS = 64
"""Of a pass."""


@dataclass(slots=True)
class _Entry:
    """An input the workers hold; `users`: requests in flight that refer to it. `rows`: its
    content, for requests that come without it; b"": it is not kept."""

    num_tokens: int
    rows: bytes
    users: int = 0


@dataclass(slots=True)
class _Waiting:
    """A request with media that has not started, or has: then the workers know its inputs. `ends`:
    where their last tokens end. `wanted`: those that a prefix hit does not cover. `ahead`: the
    workers know them before it starts, as it is encoded ahead; that takes so many `parts`."""

    inputs: dict[bytes, MediaInput]
    ends: dict[bytes, int]
    wanted: frozenset[bytes] = frozenset()
    started: bool = False
    ahead: bool = False
    parts: int = 0


@dataclass(slots=True)
class _Pass:
    """Of an input that is encoded ahead: the parts done, those of its pass, and what share of a
    step a part takes."""

    done: int
    parts: int
    share: float


@dataclass(slots=True)
class _Chosen:
    """What the requests of the step that is planned take: `tokens` of new inputs (`added`), and
    the entries they refer to again; `share`: of what a step may encode beside others."""

    tokens: int = 0
    share: float = 0.0
    added: set[bytes] = field(default_factory=set)
    reused: set[bytes] = field(default_factory=set)


class EncoderCacheHook(AdmissionHook):
    """Holds a request back while its inputs find no place, or while the step has enough to take in.

    `capacity`: tokens the cache holds; `step_tokens`: new ones that one step takes in at most (one
    request may have more). `rows`: see WorkerFacts.media_rows.

    Invariants: the tokens of all entries are at most `capacity`; an entry without users is in
    `_unused`, least recently used first, and whole: one that nobody waits for while its pass is
    under way goes. `_void`: what goes before anything comes. `_passes`: the inputs that are encoded
    ahead. `_next`: the request whose inputs come with the next step, for that. `_running`: those of
    the last step. `_kept_bytes`: of the content of all entries.
    """

    name = MEDIA_HOOK

    def __init__(
        self, *, capacity: int, step_tokens: int, rows: Mapping[str, int] | None = None
    ) -> None:
        self._capacity = capacity
        self._step_tokens = step_tokens
        self._rows = rows or {}
        self._running: set[int] = set()
        self._passes: OrderedDict[bytes, _Pass] = OrderedDict()
        self._next: int | None = None
        self._requests: dict[int, _Waiting] = {}
        self._entries: dict[bytes, _Entry] = {}
        self._unused: OrderedDict[bytes, int] = OrderedDict()
        self._tokens = self._kept_bytes = 0
        self._void: list[bytes] = []
        self._chosen = _Chosen()
        self.num_added = 0
        self.num_reused = 0

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """See AdmissionHook; the sizes were checked (core/media_checks.py)."""
        if request.media:
            ends: dict[bytes, int] = {}
            for one in request.media:
                ends[one.key] = one.offset + one.num_tokens
            whole = whole_inputs(request.media)
            inputs = {key: self._with_content(one) for key, one in whole.items()}
            self._requests[request.id] = _Waiting(inputs, ends)
        return YES

    def _with_content(self, one: MediaInput) -> MediaInput:
        """The input with the content that was not sent: that of an input the workers hold, or of
        one that waits."""
        if not one.unsent:
            return one
        entry = self._entries.get(one.key)
        if entry is not None and entry.rows:
            return msgspec.structs.replace(one, rows=entry.rows, unsent=False)
        for request in self._requests.values():
            if one.key in request.inputs:
                rows = request.inputs[one.key].rows
                return msgspec.structs.replace(one, rows=rows, unsent=False)
        raise MediaGone(f"the content of an input of kind {one.kind} is not there: send it")

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """See AdmissionHook."""
        request = self._requests.get(request_id)
        if request is None or request.started:
            return YES
        alone = not self._running
        if request.ahead:
            left = self._left(request)
            if alone or not left:
                return YES
            done = request.parts - left
            return AdmissionVerdict(
                "not_now", f"{done} of {request.parts} parts of its inputs are encoded"
            )
        if not alone and request.inputs.keys() & self._passes.keys():
            return AdmissionVerdict("not_now", "its inputs are encoded for another")
        chosen = self._chosen
        reused = request.inputs.keys() & self._entries.keys()
        added = request.inputs.keys() - reused - chosen.added
        tokens = sum(request.inputs[key].num_tokens for key in added)
        if tokens and chosen.tokens and chosen.tokens + tokens > self._step_tokens:
            return AdmissionVerdict(
                "not_now", f"{tokens} tokens to encode, {chosen.tokens} are in this step already"
            )
        free = self._capacity - self._kept(chosen.reused | reused) - chosen.tokens
        if tokens > free:
            return AdmissionVerdict("not_now", f"{tokens} tokens to encode, room for {free}")
        share = 0.0 if alone else self._share(request, added, computed)
        ahead = share > 1.0
        if ahead and (self._passes or self._next not in (None, request_id)):
            return AdmissionVerdict("not_now", "inputs of another are encoded")
        if not ahead and chosen.share and chosen.share + share > 1.0:
            return AdmissionVerdict("not_now", "inputs of others are encoded in this step")
        chosen.tokens += tokens
        chosen.added |= added
        chosen.reused |= reused
        if ahead:
            self._next = request_id
            return AdmissionVerdict("not_now", "its inputs are encoded beside others' steps")
        chosen.share += share
        return YES

    def _share(self, request: _Waiting, added: set[bytes], computed: Callable[[], int]) -> float:
        """What a step would encode of these inputs, of what it may encode beside others."""
        sized = [key for key in added if self._cost(request.inputs[key])]
        first = computed() if sized else 0
        request.wanted = frozenset(key for key in sized if request.ends[key] > first)
        return sum(self._cost(request.inputs[key]) for key in request.wanted)

    def _cost(self, one: MediaInput) -> float:
        rows = self._rows.get(one.kind, 0)
        return math.prod(one.grid) / rows if rows and not one.embedded else 0.0

    def _left(self, request: _Waiting) -> int:
        """Parts of passes that are still to be taken."""
        open_ = (self._passes[key] for key in request.inputs if key in self._passes)
        return sum(one.parts - one.done for one in open_)

    def _kept(self, reused: set[bytes]) -> int:
        """Tokens of the entries that do not go for others."""
        return self._tokens - sum(self._unused[key] for key in self._unused.keys() - reused)

    def payload(self, request_ids: list[int]) -> bytes | None:
        """See AdmissionHook: what the workers drop and take in."""
        self._chosen = _Chosen()
        self._running = set(request_ids)
        if not (self._requests or self._void):
            return None
        added: list[MediaContent] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and not request.started:
                request.started = True
                if not request.ahead:
                    added += self._take(request.inputs)
                for key in request.inputs.keys() & self._passes.keys():
                    del self._passes[key]  # the step itself ends it
        added += self._take_ahead()
        work = self._advance()
        if not (added or work or self._void):
            return None
        payload = MediaPayload(
            evicted=tuple(self._make_room()), added=tuple(added), work=tuple(work)
        )
        return msgspec.msgpack.encode(payload)

    def _take_ahead(self) -> list[MediaContent]:
        """The request that is encoded ahead refers to its inputs from now on."""
        request = None if self._next is None else self._requests.get(self._next)
        self._next = None
        if request is None or request.started:
            return []
        new = request.wanted - self._entries.keys()
        added, request.ahead = self._take(request.inputs), True
        for key in (one for one in request.inputs if one in new):
            cost = self._cost(request.inputs[key])
            parts = min(MOST_PARTS, math.ceil(cost))
            self._passes[key] = _Pass(0, parts, cost / parts)
        request.parts = self._left(request)
        return added

    def _advance(self) -> list[MediaWork]:
        """What this step encodes ahead: a part of a pass, or as many small inputs."""
        work: list[MediaWork] = []
        room = 1.0
        for key, one in list(self._passes.items()):
            if work and one.share > room:
                break
            room -= one.share
            one.done += 1
            work.append(MediaWork(key=key, done=one.done, parts=one.parts))
            if one.done < one.parts:
                break
            del self._passes[key]
        return work

    def _take(self, inputs: dict[bytes, MediaInput]) -> list[MediaContent]:
        """The request refers to its inputs; those that are new."""
        added = []
        for key, one in inputs.items():
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(one.num_tokens, self._kept_rows(one))
                self._tokens += one.num_tokens
                self._kept_bytes += len(entry.rows)
                added.append(content_of(one))
                self.num_added += 1
            else:
                self._unused.pop(key, None)
                self.num_reused += 1
            entry.users += 1
        return added

    def _kept_rows(self, one: MediaInput) -> bytes:
        fits = self._kept_bytes + len(one.rows) <= MOST_KEPT_BYTES
        return one.rows if fits and not one.embedded else b""

    def _make_room(self) -> list[bytes]:
        evicted, self._void = self._void, []
        while self._tokens > self._capacity:
            key, _ = self._unused.popitem(last=False)
            self._drop(key)
            evicted.append(key)
        return evicted

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._tokens -= entry.num_tokens
        self._kept_bytes -= len(entry.rows)

    def finish(self, request_id: int) -> None:
        """See AdmissionHook: its inputs may go."""
        self._running.discard(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._release(request)

    def _release(self, request: _Waiting) -> None:
        """A request refers to its inputs no longer. A pass that nobody waits for ends."""
        for key in request.inputs if request.started or request.ahead else ():
            entry = self._entries[key]
            entry.users -= 1
            if not entry.users and self._passes.pop(key, None) is None:
                self._unused[key] = entry.num_tokens
            elif not entry.users:
                self._drop(key)
                self._void.append(key)

    def renew(self) -> None:
        """See AdmissionHook: other workers hold nothing; what waits will tell them."""
        self._entries.clear()
        self._unused.clear()
        self._void.clear()
        self._passes.clear()
        self._running.clear()
        self._tokens = self._kept_bytes = 0
        self._next, self._chosen = None, _Chosen()
        for request in self._requests.values():
            request.started = request.ahead = False

    def renew_content(self) -> None:
        """See AdmissionHook: what nobody uses now is not used again, nor what is encoded ahead."""
        for request in self._requests.values():
            if request.ahead and not request.started:
                self._release(request)
                request.ahead = False
        for key in self._unused:
            self._drop(key)
        self._void += self._unused
        self._unused.clear()

    def figures(self) -> dict[str, int]:
        """Inputs that requests have brought, and those of them whose outputs were there."""
        return {
            "media_queries": self.num_added + self.num_reused,
            "media_hits": self.num_reused,
        }

    @property
    def num_held(self) -> int:
        """See AdmissionHook."""
        return len(self._requests)


def content_of(one: MediaInput) -> MediaContent:
    """What the workers need of an input."""
    return MediaContent(
        key=one.key,
        kind=one.kind,
        grid=one.grid,
        rows=one.rows,
        cut=one.cut,
        embedded=one.embedded,
    )


def encoder_cache_hooks(
    capacity: int, step_tokens: int, rows: Mapping[str, int] | None = None
) -> Sequence[AdmissionHook]:
    """The hook of a model that takes media; none where it does not. See EncoderCacheHook."""
    if not capacity:
        return ()
    return (EncoderCacheHook(capacity=capacity, step_tokens=step_tokens, rows=rows),)
