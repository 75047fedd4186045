"""The connection to one engine core: a Unix socket that carries msgpack frames (base/wire).

A core says Hello when it is ready. When the connection ends, everything in flight fails with
EngineDead at once, and the connection is tried again with growing pauses until the core is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Protocol, cast

import msgspec

from headrace.base.errors import EngineDead, HeadraceError, Unavailable, from_wire
from headrace.base.telemetry import log as logs
from headrace.base.wire.codec import MAX_FRAME_BYTES, Codec, cut_frames
from headrace.base.wire.control import (
    PING,
    Argument,
    Call,
    Hello,
    Reply,
)
from headrace.base.wire.request import Load, ToCore, ToFront, TokenBatch
from headrace.front.client.limits import Limits

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.25
SEND_BYTES = 4 << 20
"""That the system takes at a time, if it may: the pixels of an image are some megabytes, and with
the usual 208 KiB both processes wake for each of 30 pieces."""
_LOOK_S = 0.002
"""Pause between two looks at how much is unsent, of the one who waits for it at a time."""


class Receiver(Protocol):
    """Who gets what a core sends."""

    def on_tokens(self, batch: TokenBatch) -> None:
        """A step's tokens and ends."""
        ...

    def on_load(self, load: Load) -> None:
        """What waits for the core now."""
        ...

    def on_lost(self) -> None:
        """The core is gone; nothing that was in flight will be answered."""
        ...


class Connection:
    """One core. `hello` is None while it is not connected."""

    def __init__(self, path: str, receiver: Receiver, limits: Limits) -> None:
        self.path = path
        self._receiver = receiver
        self._limits = limits
        self._codec: Codec[ToCore | ToFront] = Codec(ToFront)
        self._frames: _Frames | None = None
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._next_call = 0
        self._heard_s = 0.0
        self._unsent = bytearray()
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.hello: Hello | None = None

    def start(self) -> None:
        """Begins to connect."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends the connection for good."""
        self._flush()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._lost()

    async def wait_ready(self) -> Hello:
        """Waits for the core's Hello."""
        while self.hello is None:
            self._changed.clear()
            await self._changed.wait()
        return self.hello

    @property
    def alive(self) -> bool:
        """Whether the core was heard of lately."""
        silent_s = time.monotonic() - self._heard_s
        return self.hello is not None and silent_s < self._limits.heartbeat_timeout_s

    def send(self, message: ToCore) -> None:
        """Queues a message; Unavailable if the core is away or does not take messages."""
        if self.hello is None or self._frames is None or self._frames.transport is None:
            raise Unavailable("the engine is starting; try again soon", retry_after_s=1.0)
        if self._num_unsent(self._frames.transport) > self._limits.max_unsent_bytes:
            raise Unavailable("the engine does not take requests now", retry_after_s=1.0)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += self._codec.frame(message)

    async def room(self) -> None:
        """Returns once the core has taken most of what waits for it: who sends much comes in turn,
        so that others are not refused for it."""
        async with self._turn:
            while (frames := self._frames) is not None and frames.transport is not None:
                if self._num_unsent(frames.transport) <= self._limits.max_unsent_bytes // 2:
                    return
                await asyncio.sleep(_LOOK_S)

    def _num_unsent(self, transport: asyncio.Transport) -> int:
        return transport.get_write_buffer_size() + len(self._unsent)

    def _flush(self) -> None:
        """Sends what one turn of the loop brought together: a write wakes the core, and costs more
        than a request."""
        unsent, self._unsent = self._unsent, bytearray()
        if unsent and self._frames is not None and self._frames.transport is not None:
            self._frames.transport.write(unsent)

    async def call(self, operation: str, **arguments: object) -> object:
        """A control call; its result, or the error the core answered with."""
        number = self._next_call
        self._next_call += 1
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            known = msgspec.convert(arguments, dict[str, Argument])
            self.send(Call(number=number, operation=operation, arguments=known))
            return await future
        finally:
            self._calls.pop(number, None)

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with contextlib.suppress(OSError):
                pause_s = await self._stay(await self._connected(), pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _connected(self) -> _Frames:
        # Known before the connection is made: the Hello may come before this task goes on.
        self._frames = frames = _Frames(self._take)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: frames, self.path)
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES
        )
        return frames

    async def _stay(self, frames: _Frames, pause_s: float) -> float:
        """Stays until the connection ends; the pause starts anew if the core was ready."""
        heartbeat_task = asyncio.create_task(self._heartbeat())
        try:
            await frames.ended
            return pause_s if self.hello is None else _FIRST_PAUSE_S
        finally:
            heartbeat_task.cancel()
            frames.close()
            self._lost()

    async def _heartbeat(self) -> None:
        """Pings a silent core, so that silence means something: a long step does not delay the
        answer."""
        while True:
            await asyncio.sleep(self._limits.heartbeat_s)
            silent_s = time.monotonic() - self._heard_s
            if self.hello is not None and silent_s >= self._limits.heartbeat_s:
                with contextlib.suppress(HeadraceError):
                    await self.call(PING)

    def _take(self, body: bytes) -> None:
        message = self._codec.decode(body)
        self._heard_s = time.monotonic()
        if isinstance(message, TokenBatch):
            self._receiver.on_tokens(message)
        elif isinstance(message, Load):
            self._receiver.on_load(message)
        elif isinstance(message, Reply):
            self._answer(message)
        elif isinstance(message, Hello):
            self.hello = message
            if message.log_level:
                logs.set_level(message.log_level)
            self._changed.set()

    def _answer(self, reply: Reply) -> None:
        future = self._calls.get(reply.number)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(from_wire(reply.error))
        else:
            future.set_result(msgspec.msgpack.decode(reply.result))

    def _lost(self) -> None:
        self.hello = None
        self._frames = None
        self._unsent.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead("the engine process ended", retry_after_s=1.0))
        self._calls.clear()
        self._receiver.on_lost()


class _Frames(asyncio.Protocol):
    """Cuts the byte stream into frames. A frame that is malformed ends the connection."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._buffer = bytearray()
        self.transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for body in cut_frames(self._buffer, max_bytes=MAX_FRAME_BYTES):
                self._take(body)
        except (ValueError, msgspec.DecodeError, AssertionError):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """Closes the socket."""
        if self.transport is not None:
            self.transport.abort()
