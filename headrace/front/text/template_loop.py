"""Short renders without a thread: the event loop itself speaks to a process of the pool.

A thread per render costs more than the render, and every hand-over of the interpreter is taken from the streams. So the
loop borrows one process while short renders are under way and sends them one behind the other; the answers come in
order. A render that keeps those behind it waiting for PATIENCE_S goes on alone: they, and all that come meanwhile, take
the pool's way (threads, the other process). Its own deadline is that of every render.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.front.text.template_pool import PIPE_BYTES, TemplatePool, Worker, reply_in

PATIENCE_S = 0.1
_READ_BYTES = 1 << 18


@dataclass(eq=False)
class _Sent:
    """A request on its way; its answer is None where it has to go another way."""

    size: int
    answer: asyncio.Future[dict[str, Any] | None]


class LoopRenderer:
    """Belongs to one event loop while anything is under way. Invariant: a process is borrowed if and only if so."""

    def __init__(self, pool: TemplatePool) -> None:
        self._pool = pool
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sent: deque[_Sent] = deque()
        self._bytes = 0
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._late = False

    async def render(self, source: str, variables: dict[str, Any]) -> str:
        """See TemplatePool.render."""
        sent = self._send(source, variables, asyncio.get_running_loop())
        reply = None if sent is None else await sent.answer
        if reply is None:
            return await asyncio.to_thread(self._pool.render, source, variables)
        return self._pool.text_of(reply)

    def _send(
        self, source: str, variables: dict[str, Any], loop: asyncio.AbstractEventLoop
    ) -> _Sent | None:
        """Sends a request if there is a process for it and room in its pipe."""
        if self._late or self._loop not in (None, loop):
            return None
        worker = self._worker or self._pool.borrow()
        if worker is None:
            return None
        frame = worker.frame(source, variables, self._pool.limits)
        if self._bytes + len(frame) > PIPE_BYTES:
            if self._worker is None:
                self._pool.give(worker)
            return None
        sent = _Sent(len(frame), loop.create_future())
        self._sent.append(sent)
        self._bytes += sent.size
        if self._worker is None:
            self._worker, self._loop = worker, loop
            loop.add_reader(worker.output, self._readable)
            self._watch()
        worker.sent(source)
        worker.write(frame)
        return sent

    def _readable(self) -> None:
        assert self._worker is not None
        piece = os.read(self._worker.output, _READ_BYTES)
        if not piece:
            self._end("messages: the chat template ended the process that rendered it")
            return
        self._buffer += piece
        while (reply := reply_in(self._buffer)) is not None:
            sent = self._sent.popleft()
            self._bytes -= sent.size
            if not sent.answer.done():
                sent.answer.set_result(reply)
            self._watch()

    def _watch(self) -> None:
        """Times the first of those under way; gives the process back where there is none."""
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sent:
            self._timer = self._loop.call_later(PATIENCE_S, self._hold_on)
        else:
            self._pool.give(self._leave())

    def _hold_on(self) -> None:
        """The first one takes long: nobody waits behind it any more."""
        assert self._loop is not None
        self._late = True
        limit_s = self._pool.limits.seconds
        for sent in list(self._sent)[1:]:
            if not sent.answer.done():
                sent.answer.set_result(None)
        message = f"messages: the chat template takes longer than {limit_s:g} s"
        self._timer = self._loop.call_later(max(limit_s - PATIENCE_S, 0.0), self._end, message)

    def _end(self, message: str) -> None:
        """The process is lost: the first one is refused, the others go another way."""
        refused = InvalidRequest(message, field="messages")
        first, *others = self._sent
        self._sent.clear()
        if not first.answer.done():
            first.answer.set_exception(refused)
        for sent in others:
            if not sent.answer.done():
                sent.answer.set_result(None)
        self._leave().close()
        self._pool.give(None)

    def _leave(self) -> Worker:
        """Lets go of the process."""
        assert self._worker is not None and self._loop is not None
        self._loop.remove_reader(self._worker.output)
        if self._timer is not None:
            self._timer.cancel()
        worker, self._worker, self._loop, self._timer = self._worker, None, None, None
        self._bytes, self._late = 0, False
        self._buffer.clear()
        return worker
