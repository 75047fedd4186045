"""The sockets between the pool of models and the API processes, in the supervisor's loop. Each API
process inherits its end, so that nobody else can speak to the pool."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from headrace.base.wire.codec import Codec, cut_frames
from headrace.base.wire.models import FromPool, ToPool

MAX_FRAME_BYTES = 1 << 20
READ_BYTES = 1 << 16
log = logging.getLogger(__name__)


class SocketWatch(Protocol):
    """What watches sockets: the supervisor."""

    def watch(self, file: socket.socket, events: int, callback: Callable[[], None]) -> None:
        """Calls back when one of these events happens."""
        ...

    def unwatch(self, file: socket.socket) -> None:
        """The end of `watch`."""
        ...


class _Client:
    def __init__(self, ours: socket.socket) -> None:
        self.socket = ours
        self.received = bytearray()
        self.unsent = bytearray()


class PoolClients:
    """All API processes. `take` is called with a client's number and each message of it, `lost`
    with the number of one that is gone. Numbers are never used again."""

    def __init__(self, take: Callable[[int, ToPool], None], lost: Callable[[int], None]) -> None:
        self._take = take
        self._lost = lost
        self._clients: dict[int, _Client] = {}
        self._next = 0
        self._watch: SocketWatch | None = None
        self._codec: Codec[ToPool | FromPool] = Codec(ToPool)

    def begin(self, watch: SocketWatch) -> None:
        """Sockets are watched from now on."""
        self._watch = watch

    def connect(self) -> socket.socket:
        """The other end of a new connection, for a process that is about to be started."""
        assert self._watch is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._next += 1
        self._clients[self._next] = _Client(ours)
        self._watch.watch(ours, selectors.EVENT_READ, partial(self._serve, self._next))
        return theirs

    def send(self, number: int, message: FromPool) -> None:
        """Sends to one process; to one that is gone is no error."""
        client = self._clients.get(number)
        if client is not None:
            client.unsent += self._codec.frame(message)
            self._flush(number, client)

    def send_all(self, message: FromPool) -> None:
        """Sends to every process."""
        for number in list(self._clients):
            self.send(number, message)

    def close(self) -> None:
        """Ends every connection."""
        for client in self._clients.values():
            client.socket.close()
        self._clients.clear()

    def _serve(self, number: int) -> None:
        client = self._clients[number]
        try:
            data = client.socket.recv(READ_BYTES)
        except BlockingIOError:
            self._flush(number, client)
            return
        except OSError:
            data = b""
        if not data:
            self._drop(number)
            return
        client.received += data
        try:
            bodies = cut_frames(client.received, max_bytes=MAX_FRAME_BYTES)
            messages = [self._codec.decode(body) for body in bodies]
        except (msgspec.MsgspecError, ValueError) as error:
            log.error("API process %d sent a malformed frame: %s", number, error)
            self._drop(number)
            return
        for message in messages:
            self._take(number, message)  # type: ignore[arg-type]  # decoded as ToPool

    def _flush(self, number: int, client: _Client) -> None:
        try:
            while client.unsent:
                del client.unsent[: client.socket.send(client.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            client.unsent.clear()  # reading will find its end
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        assert self._watch is not None
        self._watch.watch(client.socket, events, partial(self._serve, number))

    def _drop(self, number: int) -> None:
        client = self._clients.pop(number)
        assert self._watch is not None
        self._watch.unwatch(client.socket)
        client.socket.close()
        self._lost(number)
