"""The socket side of a core process: an IO thread accepts frontends (API processes) and reads
their frames; the step loop writes.

The step loop writes straight into a frontend's socket, without waiting; only what the socket does
not take goes through the IO thread. Every frame is checked against the wire types: a frontend that
sends a malformed one is disconnected and counted before anything it sent has changed state. A
frontend that stops reading is disconnected once `MAX_UNSENT_BYTES` wait for it.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec

from headrace.base.wire.codec import Codec, cut_frames
from headrace.base.wire.control import PING, Call, Hello, Reply
from headrace.base.wire.media import MAX_REQUEST_BYTES
from headrace.base.wire.request import ToCore, ToFront

log = logging.getLogger(__name__)
MAX_INCOMING_BYTES = MAX_REQUEST_BYTES + (64 << 20)
"""Of a frame: a request with media has their pixels."""
MAX_UNSENT_BYTES = 256 << 20
READ_BYTES = 1 << 18
LOOK_S = 0.5
"""Pause between two looks at the socket's place in the file system."""


class FrontendGone(msgspec.Struct, frozen=True):
    """A frontend has closed its connection, or was disconnected."""


Incoming = tuple[int, ToCore | FrontendGone]


def _exit() -> None:
    os._exit(0)


class _Peer:
    """One frontend. `lock` guards the socket's writing side and `unsent`; the IO thread alone
    reads."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock = sock
        self.lock = threading.Lock()
        self.unsent = bytearray()
        self.received = bytearray()
        self.gone = False


class FrontendConnections:
    """All connected frontends of this core. `take` and `send` belong to the step loop's thread.

    When the parent process closes its end of `status`, `orphaned` is called (by default it ends the
    process), then the IO thread closes every socket and ends.
    """

    def __init__(
        self,
        path: str,
        hello: Hello,
        status: socket.socket,
        orphaned: Callable[[], None] = _exit,
    ) -> None:
        self.malformed_frames = 0
        self._orphaned = orphaned
        self._inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._peers: dict[int, _Peer] = {}
        self._incoming: Codec[ToCore] = Codec(ToCore)
        self._outgoing: Codec[ToFront] = Codec(ToFront)
        self._hello = self._outgoing.frame(hello)
        self._next = 0
        self._status = status
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._path = path
        self._listener = _listen(path)
        self._looked_at = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="frontend-io", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits for the IO thread, which ends after the parent; True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def take(self, *, block: bool, at_most_s: float | None) -> list[Incoming]:
        """All messages that have arrived; `block` waits for the first, `at_most_s` (None: no
        limit)."""
        messages: list[Incoming] = []
        try:
            if block:
                messages.append(self._inbox.get(timeout=at_most_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def flush(self, timeout_s: float) -> None:
        """Waits until all that was sent is with the kernel, or the time is over."""
        end = time.monotonic() + timeout_s
        while any(peer.unsent for peer in list(self._peers.values())) and time.monotonic() < end:
            time.sleep(0.005)

    def send(self, frontend: int, message: ToFront) -> None:
        """Sends to one frontend without blocking; if it is gone, nothing happens."""
        peer = self._peers.get(frontend)
        if peer is None:
            return
        frame = self._outgoing.frame(message)
        with peer.lock:
            if not peer.unsent:
                frame = frame[_send_some(peer.sock, frame) :]
            if not frame:
                return
            peer.unsent += frame
            too_slow = len(peer.unsent) > MAX_UNSENT_BYTES
        if too_slow:
            self.drop(frontend, "it does not read")
        self._wake()

    def announce(self, hello: Hello) -> None:
        """Sends a new Hello to all frontends, and to those that connect later."""
        self._hello = self._outgoing.frame(hello)
        self.send_all(hello)

    def send_all(self, message: ToFront) -> None:
        """Sends to all frontends."""
        for frontend in list(self._peers):
            self.send(frontend, message)

    def drop(self, frontend: int, why: str) -> None:
        """Ends a connection; its `FrontGone` follows from the IO thread."""
        peer = self._peers.get(frontend)
        if peer is not None:
            log.warning("frontend %d is disconnected: %s", frontend, why)
            peer.gone = True
            self._wake()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"!")
        except BlockingIOError:
            return  # it is awake already

    def _serve(self) -> None:
        parent_gone = False
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, "accept")
            selector.register(self._wake_out, selectors.EVENT_READ, "wake")
            selector.register(self._status, selectors.EVENT_READ, "parent")
            while not parent_gone:
                for key, events in selector.select(LOOK_S):
                    if isinstance(key.data, _Peer):
                        self._serve_peer(key.data, events)
                    elif key.data == "accept":
                        self._accept(selector)
                    elif key.data == "wake":
                        self._wake_out.recv(4096)
                    else:
                        parent_gone = _ended(self._status)
                self._tidy(selector)
                self._keep_socket(selector)
        self._orphaned()
        for sock in (self._listener, self._wake_in, self._wake_out, self._status):
            sock.close()
        for peer in self._peers.values():
            peer.sock.close()

    def _keep_socket(self, selector: selectors.BaseSelector) -> None:
        """Listens anew where somebody has removed the socket, as those do who clean temporary
        folders: API processes that start later must find it."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        if os.path.exists(self._path):
            return
        try:
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            listener = _listen(self._path)
        except OSError as error:
            log.error("the socket %s is gone and cannot be made again: %s", self._path, error)
            return
        log.warning("the socket %s was removed; it is made again", self._path)
        selector.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        selector.register(listener, selectors.EVENT_READ, "accept")

    def _accept(self, selector: selectors.BaseSelector) -> None:
        sock, _ = self._listener.accept()
        uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid != os.getuid():
            log.warning("a connection of user %d was refused", uid)
            sock.close()
            return
        sock.setblocking(False)
        self._next += 1
        peer = _Peer(self._next, sock)
        peer.unsent += self._hello
        self._peers[peer.number] = peer
        selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _serve_peer(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_READ and not peer.gone:
            self._read(peer)
        if events & selectors.EVENT_WRITE:
            with peer.lock:
                del peer.unsent[: _send_some(peer.sock, peer.unsent)]

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            peer.gone = True
            return
        peer.received += data
        try:
            bodies = cut_frames(peer.received, max_bytes=MAX_INCOMING_BYTES)
            messages = [self._incoming.decode(body) for body in bodies]
        except (msgspec.MsgspecError, ValueError) as error:
            self.malformed_frames += 1
            log.warning("frontend %d sent a malformed frame: %s", peer.number, error)
            peer.gone = True
            return
        for message in messages:  # all were decoded before any is used
            if isinstance(message, Call) and message.operation == PING:
                self.send(peer.number, Reply(number=message.number))
            else:
                self._inbox.put((peer.number, message))

    def _tidy(self, selector: selectors.BaseSelector) -> None:
        """Closes connections that ended; watches for writability exactly where bytes are unsent."""
        for peer in list(self._peers.values()):
            if peer.gone:
                selector.unregister(peer.sock)
                del self._peers[peer.number]
                with peer.lock:
                    peer.sock.close()
                self._inbox.put((peer.number, FrontendGone()))
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            if selector.get_key(peer.sock).events != events:
                selector.modify(peer.sock, events, peer)


def _listen(path: str) -> socket.socket:
    """A listening Unix socket of mode 0600; one that an earlier process left behind is replaced."""
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(mask)
    listener.listen(64)
    return listener


def _ended(status: socket.socket) -> bool:
    """Whether the other end is closed. Closed over unread heartbeats, it is a reset and not an end
    of file."""
    try:
        return not status.recv(4096)
    except OSError:
        return True


def _send_some(sock: socket.socket, data: bytes | bytearray) -> int:
    """Sends what the socket takes now; a broken connection takes all (the reader sees its end)."""
    if not data:
        return 0
    try:
        return sock.send(data)
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)
