"""The answers to one generation on their way from a core to their one reader.

They are admitted as a whole: an answer that finds the queue full waits for room as long as another one has found some.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.base.errors import DeadlineExceeded, HeadraceError, QueueFull
from headrace.base.wire.request import Finished, TokenLogprobs
from headrace.front.client.connection import Connection
from headrace.front.client.events import Event
from headrace.front.client.outputs import Answer
from headrace.front.client.room import Room
from headrace.front.client.together import RETRY_S


class Home(Protocol):
    """The core that makes the answers. `running`: by request, who reads it."""

    connection: Connection
    running: dict[int, Stream]
    room: Room

    def abort(self, ids: list[int]) -> None:
        """Tells the core to end requests."""
        ...


@dataclass(eq=False)
class Stream:
    """The answers to one generation, and its reader. `again(self, index)` sends an answer again; `waiting`: those that
    found no room, until then; `num_inside`: those that are with the core, or were; `num_cached`: prompt tokens found in
    the cache. Invariant: an answer with unread events is in `_unread` once."""

    core: Home
    num_prompt: int
    most_bytes: int
    again: Callable[[Stream, int], None]
    num_inside: int = 0
    num_cached: int = 0
    waiting: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    running: dict[int, Answer] = field(default_factory=dict)
    _unread: deque[Answer] = field(default_factory=deque)
    _reader: asyncio.Future[None] | None = None

    def add(self, request_id: int, answer: Answer) -> None:
        """Takes an answer in that was just sent to the core."""
        self.running[request_id] = answer
        self.core.running[request_id] = self
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
                    raise answer.error
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
            self.core.room.ended()
        elif self._waits(answer):
            return
        self.wake(answer)

    def _waits(self, answer: Answer) -> bool:
        """Whether an answer that failed is sent again: the queue was full, and another one is in it or came through."""
        if not isinstance(answer.error, QueueFull):
            return False
        self.num_inside -= 1
        if self.num_inside:
            loop = asyncio.get_running_loop()
            self.waiting[answer.index] = loop.call_later(RETRY_S, self._go_again, answer)
        return self.num_inside > 0

    def _go_again(self, answer: Answer) -> None:
        del self.waiting[answer.index]
        try:
            self.again(self, answer.index)
        except HeadraceError as error:
            answer.error = error
            self.wake(answer)

    def wake(self, answer: Answer) -> None:
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

    def _remove(self, request_id: int) -> Answer:
        self.core.running.pop(request_id, None)
        return self.running.pop(request_id)
