"""The encoder cache as the core keeps its books: which images, videos and sounds the workers hold,
who refers to them, and which go for others. An admission hook.

The workers do what the payload of a step says and decide nothing. An input is told to them once,
when the first request that has it starts; while a request that refers to it is in flight it stays,
also if that request is preempted. Afterwards it stays until its place is needed, the least recently
used first. A waiting request holds no place, so that no circle of waits can form.

The workers encode an input when a prompt's chunk first reaches its tokens: the tokens of a step
bound that work, and what a prefix hit covers is never encoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.base.wire.media import MEDIA_HOOK, MediaContent, MediaInput, MediaPayload
from headrace.base.wire.request import EngineRequest
from headrace.core.media_checks import whole_inputs
from headrace.core.ports import AdmissionHook, AdmissionVerdict

YES = AdmissionVerdict("yes")


@dataclass(slots=True)
class _Entry:
    """An input the workers hold; `users`: requests in flight that refer to it."""

    num_tokens: int
    users: int = 0


@dataclass(slots=True)
class _Waiting:
    """A request with media that has not started, or has: then the workers know its inputs."""

    inputs: dict[bytes, MediaInput]
    started: bool = False


@dataclass(slots=True)
class _Chosen:
    """What the requests of the step that is planned take: `tokens` of new inputs (`added`), and
    the entries they refer to again."""

    tokens: int = 0
    added: set[bytes] = field(default_factory=set)
    reused: set[bytes] = field(default_factory=set)


class EncoderCacheHook(AdmissionHook):
    """Holds a request back while its inputs find no place, or while the step has enough to take in.

    `capacity`: tokens the cache holds; `step_tokens`: new ones that one step takes in at most (one
    request may have more).

    Invariants: the tokens of all entries are at most `capacity`; an entry without users is in
    `_unused`, least recently used first. `_void`: what was made with other weights, and goes
    before anything comes.
    """

    name = MEDIA_HOOK

    def __init__(self, *, capacity: int, step_tokens: int) -> None:
        self._capacity = capacity
        self._step_tokens = step_tokens
        self._requests: dict[int, _Waiting] = {}
        self._entries: dict[bytes, _Entry] = {}
        self._unused: OrderedDict[bytes, int] = OrderedDict()
        self._tokens = 0
        self._void: list[bytes] = []
        self._chosen = _Chosen()
        self.num_added = 0
        self.num_reused = 0

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """See AdmissionHook; the sizes were checked (core/media_checks.py)."""
        if request.media:
            self._requests[request.id] = _Waiting(whole_inputs(request.media))
        return YES

    def ready(self, request_id: int) -> AdmissionVerdict:
        """See AdmissionHook."""
        request = self._requests.get(request_id)
        if request is None or request.started:
            return YES
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
        chosen.tokens += tokens
        chosen.added |= added
        chosen.reused |= reused
        return YES

    def _kept(self, reused: set[bytes]) -> int:
        """Tokens of the entries that do not go for others."""
        return self._tokens - sum(self._unused[key] for key in self._unused.keys() - reused)

    def payload(self, request_ids: list[int]) -> bytes | None:
        """See AdmissionHook: what the workers drop and take in."""
        self._chosen = _Chosen()
        if not self._requests:
            return None
        added: list[MediaContent] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and not request.started:
                request.started = True
                added += self._take(request.inputs)
        if not added:
            return None
        evicted = self._make_room()
        payload = MediaPayload(evicted=tuple(evicted), added=tuple(added))
        return msgspec.msgpack.encode(payload)

    def _take(self, inputs: dict[bytes, MediaInput]) -> list[MediaContent]:
        """The request refers to its inputs; those that are new."""
        added = []
        for key, one in inputs.items():
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(one.num_tokens)
                self._tokens += one.num_tokens
                added.append(content_of(one))
                self.num_added += 1
            else:
                self._unused.pop(key, None)
                self.num_reused += 1
            entry.users += 1
        return added

    def _make_room(self) -> list[bytes]:
        evicted, self._void = self._void, []
        while self._tokens > self._capacity:
            key, tokens = self._unused.popitem(last=False)
            del self._entries[key]
            self._tokens -= tokens
            evicted.append(key)
        return evicted

    def finish(self, request_id: int) -> None:
        """See AdmissionHook: its inputs may go."""
        request = self._requests.pop(request_id, None)
        for key in request.inputs if request is not None and request.started else ():
            entry = self._entries[key]
            entry.users -= 1
            if not entry.users:
                self._unused[key] = entry.num_tokens

    def renew(self) -> None:
        """See AdmissionHook: other workers hold nothing; what waits will tell them."""
        self._entries.clear()
        self._unused.clear()
        self._void.clear()
        self._tokens = 0
        self._chosen = _Chosen()
        for request in self._requests.values():
            request.started = False

    def renew_content(self) -> None:
        """See AdmissionHook: what nobody uses now is not used again."""
        for key, tokens in self._unused.items():
            del self._entries[key]
            self._tokens -= tokens
        self._void += self._unused
        self._unused.clear()

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


def encoder_cache_hooks(capacity: int, step_tokens: int) -> Sequence[AdmissionHook]:
    """The hook of a model that takes media; none where it does not."""
    if not capacity:
        return ()
    return (EncoderCacheHook(capacity=capacity, step_tokens=step_tokens),)
