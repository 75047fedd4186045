"""The answers to one generation on their way from a core to their one reader.

They are admitted as a whole: an answer that finds the queue full waits for room as long as another
one has found some."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field

from headrace.base.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    HeadraceError,
    MediaGone,
    QueueFull,
    Unavailable,
)
from headrace.base.wire.control import Hello
from headrace.base.wire.request import (
    MARGIN,
    AbortRequests,
    Finished,
    Load,
    TokenBatch,
    TokenLogprobs,
)
from headrace.front.client.admission_retry import RETRY_S
from headrace.front.client.connection import Connection
from headrace.front.client.events import Event, Generation
from headrace.front.client.known_media import KnownMedia
from headrace.front.client.limits import Limits
from headrace.front.client.outputs import ChoiceState

ENDS_KEPT = 32  # the throughput is taken from the last so many ends
RETRIES_KEPT = 4096  # of so many refused requests it is known when they will be back
MAX_WAIT_S = 60.0  # stock clients wait no longer


@dataclass(eq=False)
class GenerationStream:
    """The answers to one generation, and its reader. `again(self, index)` sends an answer again;
    `waiting`: those that found no room, until then; `num_inside`: those that are with the core, or
    were; `num_cached`: prompt tokens found in the cache. Invariant: an answer with unread events is
    in `_unread` once."""

    core: CoreHandle
    num_prompt: int
    most_bytes: int
    again: Callable[[GenerationStream, int], None]
    on_queued: Callable[[], None] | None = None
    num_inside: int = 0
    num_cached: int = 0
    waiting: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    running: dict[int, ChoiceState] = field(default_factory=dict)
    _unread: deque[ChoiceState] = field(default_factory=deque)
    _reader: asyncio.Future[None] | None = None

    def add(self, request_id: int, answer: ChoiceState) -> None:
        """Takes an answer in that was just sent to the core."""
        self.running[request_id] = answer
        self.core.running[request_id] = self
        self.core.admission.sent += 1
        self.num_inside += 1

    async def next_events(self) -> list[Event]:
        """The next events, at least one; empty once every answer has ended."""
        while self.running or self._unread or self.waiting:
            events: list[Event] = []
            while self._unread:
                answer = self._unread[0]
                events += answer.take(self.num_prompt)
                if answer.error is not None:
                    if events:
                        break  # what was produced before it failed comes first
                    raise copy(answer.error)  # a traceback would make a circle of the kept one
                self._unread.popleft()
                answer.queued = False
            if events:
                return events
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return []

    def token(self, request_id: int, token_id: int, scored: TokenLogprobs | None) -> None:
        """One token of one answer."""
        answer = self.running[request_id]
        if answer.add_token(token_id, scored):
            self._remove(request_id)
            self.core.abort([request_id])
        elif answer.queued and answer.pending_bytes > self.most_bytes:
            message = f"nobody read the answer: more than {self.most_bytes} bytes wait"
            self.fail(request_id, DeadlineExceeded(message))
            self.core.abort([request_id])
        self.wake(answer)

    def fail(self, request_id: int, error: HeadraceError) -> None:
        """Ends one answer, and with it the generation, by an error."""
        answer = self._remove(request_id)
        answer.error = error
        self.wake(answer)

    def finished(self, end: Finished) -> None:
        """The core told the end of one answer."""
        answer = self.running[end.id]
        answer.finish(end)
        self._remove(end.id)
        if end.error is None:
            self.core.admission.ended()
        elif self._waits(answer):
            return
        self.wake(answer)

    def _waits(self, answer: ChoiceState) -> bool:
        """Whether an answer that failed is sent again: the queue was full, and another one is in it
        or came through; or its media were not sent with it, and are not there."""
        if not isinstance(answer.error, QueueFull | MediaGone):
            return False
        self.num_inside -= 1
        if isinstance(answer.error, MediaGone):
            self.core.known.forget()
            loop = asyncio.get_running_loop()
            self.waiting[answer.index] = loop.call_later(0.0, self._go_again, answer)
            return True
        if self.num_inside:
            loop = asyncio.get_running_loop()
            self.waiting[answer.index] = loop.call_later(RETRY_S, self._go_again, answer)
        return self.num_inside > 0

    def _go_again(self, answer: ChoiceState) -> None:
        del self.waiting[answer.index]
        try:
            self.again(self, answer.index)
        except HeadraceError as error:
            answer.error = error
            self.wake(answer)

    def wake(self, answer: ChoiceState) -> None:
        """Lets the reader know of an answer's new events."""
        if answer.queued:
            return
        answer.queued = True
        self._unread.append(answer)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def abort(self) -> None:
        """Ends what still runs; nobody reads it."""
        if self.running or self.waiting:
            for timer in self.waiting.values():
                timer.cancel()
            self.waiting.clear()
            ids = list(self.running)
            for request_id in ids:
                self._remove(request_id)
            self.core.abort(ids)

    def _remove(self, request_id: int) -> ChoiceState:
        self.core.running.pop(request_id, None)
        return self.running.pop(request_id)


class CoreHandle:
    """One core: its connection, and who waits for which of its requests."""

    def __init__(self, path: str, limits: Limits) -> None:
        self.connection = Connection(path, self, limits)
        self.known = KnownMedia()
        self.running: dict[int, GenerationStream] = {}
        self.admission = QueueAdmission(time.monotonic)

    @property
    def serves(self) -> bool:
        """Whether it is there, answers its heartbeat, and its answers are to be expected."""
        hello = self.connection.hello
        fine = hello is not None and not hello.trouble and not hello.failing
        return fine and self.connection.alive

    async def with_room(self, generation: Generation) -> Generation:
        """A generation with media as it is sent, once the connection has room for it."""
        await self.connection.room()
        return self.known.unsent(generation)

    def abort(self, ids: list[int]) -> None:
        """Tells the core to end requests; one that is away has none."""
        if ids:
            with suppress(Unavailable):
                self.connection.send(AbortRequests(tuple(ids)))

    def on_tokens(self, batch: TokenBatch) -> None:
        """Hands a step's tokens and ends to their answers. Ids that are unknown have just been
        aborted."""
        running, scores = self.running, batch.logprobs
        for request_id, count in batch.cached:
            if (stream := running.get(request_id)) is not None:
                stream.running[request_id].num_cached = stream.num_cached = count
        if batch.prompt_logprobs or batch.pooled or batch.captured or batch.queued:
            self._take_states(batch)
        tokens: list[int] = batch.tokens.tolist()
        for i, request_id in enumerate(batch.ids.tolist()):
            stream = running.get(request_id)
            if stream is None:
                continue
            try:  # not `_own_failure`: once per token
                stream.token(request_id, tokens[i], scores[i] if scores else None)
            except Exception as error:
                self._failed(stream, request_id, error)
        for end in batch.finished:
            if (stream := running.get(end.id)) is not None:
                with self._own_failure(stream, end.id):
                    stream.finished(end)

    def _take_states(self, batch: TokenBatch) -> None:
        """What is told of prompts, layers and the queue."""
        running = self.running
        for request_id in batch.queued:
            stream = running.get(request_id)
            if stream is not None and stream.on_queued is not None:
                stream.on_queued()
        for request_id, prompt_scores in batch.prompt_logprobs:
            if (stream := running.get(request_id)) is not None:
                with self._own_failure(stream, request_id):
                    stream.running[request_id].add_prompt_scores(prompt_scores)
        for request_id, pooled in batch.pooled:
            if (stream := running.get(request_id)) is not None:
                stream.running[request_id].add_pooled(pooled)
        for request_id, captured in batch.captured:
            if (stream := running.get(request_id)) is not None:
                stream.running[request_id].add_captured(captured)

    def on_load(self, load: Load) -> None:
        """What waits for the core, of all API processes."""
        self.admission.load = load
        self.admission.sent = 0

    def on_lost(self) -> None:
        """The core is gone: everything in flight fails at once."""
        self.admission.load = Load()
        self.known.forget()
        for request_id, stream in list(self.running.items()):
            stream.fail(
                request_id,
                EngineDead("the engine process ended while it ran the request", retry_after_s=1.0),
            )

    @contextmanager
    def _own_failure(self, stream: GenerationStream, request_id: int) -> Iterator[None]:
        """Whatever goes wrong with one answer is not the others'."""
        try:
            yield
        except Exception as error:
            self._failed(stream, request_id, error)

    def _failed(self, stream: GenerationStream, request_id: int, error: Exception) -> None:
        self.abort([request_id])
        if request_id in stream.running:
            stream.fail(request_id, EngineError(f"internal error ({type(error).__name__})"))


class QueueAdmission:
    """Keeps count for one core. Memory is bounded by ENDS_KEPT and RETRIES_KEPT."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=ENDS_KEPT)
        self._retries: deque[float] = deque(maxlen=RETRIES_KEPT)
        self.load = Load()
        self.sent = 0  # requests since then

    def ended(self) -> None:
        """A request has left the core."""
        self._ends.append(self._clock())

    def check_deadline(self, deadline_s: float, *, service_s: float = 0.0) -> None:
        """QueueFull if the core would refuse a request with this deadline, which takes so long from
        its start: known before the body is, its wait alone may be too long."""
        if not self.load.dues:
            return
        wait_s = self.load.wait_s(self.load.ahead(deadline_s) + self.sent)
        if wait_s and (wait_s + service_s) * MARGIN > deadline_s:
            raise QueueFull(
                f"requests wait about {wait_s:.2g} s now; this one's time is {deadline_s:.3g} s",
                retry_after_s=min(wait_s, MAX_WAIT_S) * random.uniform(1.0, 1.25),
            )

    def check(self, hello: Hello | None, in_flight: int) -> None:
        """Unavailable if the core holds as much as it takes; Retry-After is when those before will
        be done."""
        if hello is None or hello.max_in_flight is None or in_flight < hello.max_in_flight:
            return
        wait_s = self._wait_s(in_flight - hello.max_running)
        self._retries.append(self._clock() + wait_s)
        raise Unavailable(
            f"{in_flight} requests run or wait already, at most {hello.max_in_flight} may",
            retry_after_s=wait_s,
        )

    def _wait_s(self, waiting: int) -> float:
        """The waiting ones and those told to come back, over the throughput; spread, so that not
        all come at once."""
        now = self._clock()
        while self._retries and self._retries[0] <= now:
            self._retries.popleft()
        rate = 0.0
        if len(self._ends) > 1:
            rate = (len(self._ends) - 1) / max(now - self._ends[0], 1e-3)
        ahead = max(waiting, 0) + len(self._retries)
        wait_s = ahead / rate if rate else 1.0
        return min(max(wait_s, 1.0) * random.uniform(1.0, 1.25), MAX_WAIT_S)
