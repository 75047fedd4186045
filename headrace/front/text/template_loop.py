"""Short renders without a thread: the event loop itself speaks to a process of the pool.

A thread per render costs more than the render, and every hand-over of the interpreter is taken from
the streams. So the loop keeps one process and sends it short renders one behind the other; the
answers come in order. A render that keeps those behind it waiting for PATIENCE_S goes on alone:
they, and all that come meanwhile, take the pool's way (threads, other processes). Its own deadline
is that of every render.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.front.text.template_pool import PIPE_BYTES, TemplatePool, Worker, reply_in

PATIENCE_S = 0.5
_READ_BYTES = 1 << 18
_Answer = asyncio.Future[dict[str, Any] | None]


class LoopRenderer:
    """Serves the event loop that first asked. `_sent`: what is under way, with its size; an answer
    is None where it has to go another way. Invariant: while something is under way, a timer runs
    that looks whether replies come."""

    def __init__(self, pool: TemplatePool) -> None:
        self._pool = pool
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sent: deque[tuple[int, _Answer]] = deque()
        self._bytes = 0
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._replies = self._seen = 0
        self._late_at: int | None = None

    async def render(self, source: str, variables: dict[str, Any]) -> str:
        """See TemplatePool.render."""
        answer = self._send(source, variables)
        reply = None if answer is None else await answer
        if reply is None:
            return await asyncio.to_thread(self._pool.render, source, variables)
        return self._pool.text_of(reply)

    def close(self) -> None:
        """Ends the process."""
        if self._worker is not None:
            self._worker.close()
            self._pool.give(None)
            self._worker = None

    def _send(self, source: str, variables: dict[str, Any]) -> _Answer | None:
        """Sends a request, if there is a process for it with room in its pipe."""
        loop = asyncio.get_running_loop()
        worker = self._worker or self._join(loop)
        if worker is None or self._late_at == self._replies or self._loop is not loop:
            return None
        frame = worker.frame(source, variables)
        if self._bytes + len(frame) > PIPE_BYTES:
            return None
        worker.write(frame, source)
        answer: _Answer = loop.create_future()
        self._sent.append((len(frame), answer))
        self._bytes += len(frame)
        if self._timer is None:
            self._timer = loop.call_later(PATIENCE_S, self._check)
        return answer

    def _join(self, loop: asyncio.AbstractEventLoop) -> Worker | None:
        """Takes a process that runs already; starting one would hold up the loop."""
        self._worker = self._pool.borrow()
        if self._worker is not None:
            self._loop = loop
            loop.add_reader(self._worker.output, self._readable)
        return self._worker

    def _readable(self) -> None:
        assert self._worker is not None
        piece = os.read(self._worker.output, _READ_BYTES)
        if not piece:
            self._end("messages: the chat template ended the process that rendered it")
        self._buffer += piece
        while (reply := reply_in(self._buffer)) is not None:
            size, answer = self._sent.popleft()
            self._bytes -= size
            self._replies += 1
            if not answer.done():  # else the client left, or it went another way
                answer.set_result(reply)

    def _check(self) -> None:
        """No reply since the last look: the first one takes long, and nobody waits behind it; at
        last it is ended."""
        assert self._loop is not None
        self._timer, delay_s = None, PATIENCE_S
        limit_s = self._pool.limits.seconds
        if not self._sent:
            return
        if self._seen != self._replies:
            self._seen = self._replies
        elif self._late_at != self._replies:
            self._late_at, delay_s = self._replies, max(limit_s - PATIENCE_S, 0.0)
            for _, answer in list(self._sent)[1:]:
                _settle(answer, None)
        else:
            self._end(f"messages: the chat template takes longer than {limit_s:g} s")
            return
        self._timer = self._loop.call_later(delay_s, self._check)

    def _end(self, message: str) -> None:
        """The process is lost: the first one is refused, the others go another way."""
        assert self._worker is not None and self._loop is not None
        self._loop.remove_reader(self._worker.output)
        if self._timer is not None:
            self._timer.cancel()
        self.close()
        for i, (_, answer) in enumerate(self._sent):
            if i:
                _settle(answer, None)
            elif not answer.done():
                answer.set_exception(InvalidRequest(message, field="messages"))
        self._sent.clear()
        self._buffer.clear()
        self._replies += 1
        self._bytes, self._timer = 0, None


def _settle(answer: _Answer, reply: dict[str, Any] | None) -> None:
    """Nobody may wait any more: the client left, or it went another way."""
    if not answer.done():
        answer.set_result(reply)
