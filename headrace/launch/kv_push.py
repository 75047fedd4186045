"""KV that is pushed to other servers over TCP, where they share no folder (core/kv_transfers.py).

The server that computes a prompt connects to the one that will answer it when the request comes,
and says which files it will send. Until they are there the receiver keeps the marks of files that
are being written; they go when the connection ends, so that whoever waits for the KV of a server
that died knows it. The sender says once a second that it is alive. Then the files follow, into the
receiver's folder.

    receiver   32 random bytes
    sender     HMAC-SHA256 over these and what follows; number of bytes (4, big endian); in
               MessagePack {name, files}
    receiver   "+", or "-" with number of bytes (4) and the reason
    sender     "." now and then; "F" with the number of bytes (8, big endian) and a file, for each
    receiver   "+" once all files are in their places, or "-" as above

Both know a secret, from a file; what is sent is not encrypted: the network should be their own.
What is received is checked as every file in the folder is, before a block of it counts.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from headrace.base.config.kv_options import KVPushSpec
from headrace.base.config.resolved import KVTransferSpec
from headrace.base.errors import ConfigError
from headrace.core.kv_transfers import MAX_FILES, KVTransfers, swept
from headrace.core.reports import EngineView

log = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
SILENCE_S = 5.0
"""An end that says and takes nothing for so long is taken for dead."""
MAX_CONNECTIONS = 32
MAX_SENDERS = 32
PIECE_BYTES = 1 << 20
_NONCE_BYTES = 32
_MAX_TEXT = 4096
_NAME = re.compile(r"[0-9a-f]{40}\.hrkv")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class Announcement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sender will send: the files of a transfer, one of each of its ranks."""

    name: str
    files: int

    def paths(self, folder: Path) -> list[Path]:
        """Where they will lie."""
        path = folder / self.name
        if self.files == 1:
            return [path]
        return [Path(f"{path}.rank{rank}") for rank in range(self.files)]


class PushError(Exception):
    """Why a transfer was not pushed."""


def read_key(path: str) -> bytes:
    """The secret of both ends; ConfigError if there is none, or others may read it."""
    field = "kv_transfer_key_file"
    try:
        file = Path(path).expanduser()
        key, mode = file.read_bytes().strip(), file.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"--kv-transfer-key-file: {path!r}: {error.strerror}", field=field
        ) from None
    if len(key) < 32 or mode & 0o077:
        raise ConfigError(
            f"--kv-transfer-key-file: {path!r} has {len(key)} bytes and mode {mode & 0o777:o}; at least 32 "
            "bytes that the owner alone may read are wanted",
            field=field,
        )
    return key


class Push:
    """One transfer on its way; a `kv_transfers.AnnouncedTransfer`. Its thread ends with it, or when
    the peer is silent for SILENCE_S."""

    def __init__(
        self,
        peer: str,
        announcement: Announcement,
        key: bytes,
        on_end: Callable[[str | None], None],
    ) -> None:
        self._peer, self._announcement, self._key, self._on_end = peer, announcement, key, on_end
        self._files: queue.SimpleQueue[list[Path] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kv-push", daemon=True).start()

    def send(self, files: list[Path]) -> None:
        """Sends the files, which are removed then, whatever becomes of it."""
        self._files.put(files)

    def cancel(self) -> None:
        """Nothing is sent: the receiver need not wait."""
        self._files.put(None)

    def _run(self) -> None:
        files: list[Path] | None = None
        has_come = False
        reason: str | None = f"{self._peer}: the sender failed"
        try:
            with _connected(self._peer) as peer:
                _announce(peer, self._announcement, self._key)
                files, has_come = self._await_files(peer), True
                for file in files or ():
                    _send_file(peer, file)
                if files:
                    _take_verdict(peer)
            reason = None
        except (OSError, PushError) as error:
            reason = f"{self._peer}: {error}"
        finally:
            if not has_come:
                files = self._files.get()
            for file in files or ():
                file.unlink(missing_ok=True)
            self._on_end(reason)

    def _await_files(self, peer: socket.socket) -> list[Path] | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._files.get(timeout=HEARTBEAT_S)
            peer.sendall(b".")


class KVPushes:
    """Sends to the peers that may be named; a `kv_transfers.Pushes`."""

    def __init__(self, spec: KVPushSpec) -> None:
        self._peers, self._key = spec.peers, read_key(spec.key_file)
        self._ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._num_open = 0

    def begin(self, peer: str, name: str, num_files: int) -> Push | None:
        """Announces a transfer; None: too many are on their way. The peer is one of `peers`."""
        if self._num_open >= MAX_SENDERS:
            return None
        self._num_open += 1
        announcement = Announcement(name=name, files=num_files)
        return Push(peer, announcement, self._key, self._ended.put)

    @property
    def peers(self) -> tuple[str, ...]:
        """Those that may be named."""
        return self._peers

    def ended(self) -> list[str | None]:
        """Of the transfers that have ended since the last call the reason why they did not arrive;
        None: they did, or nothing was to be sent."""
        reasons: list[str | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                reasons.append(self._ended.get_nowait())
        self._num_open -= len(reasons)
        return reasons


class KVReceiver:
    """Listens for what is pushed to this server, and puts it into its folder, within the bounds of
    that; what nobody has fetched goes when the next one comes."""

    def __init__(self, spec: KVTransferSpec, listen: str, key: bytes) -> None:
        self._folder, self._lease_s, self._max_bytes = Path(spec.path), spec.lease_s, spec.max_bytes
        self._key = key
        host, _, port = listen.rpartition(":")
        try:
            self._socket = socket.create_server((host.strip("[]"), int(port)), backlog=64)
        except OSError as error:
            raise ConfigError(
                f"--kv-transfer-listen: {listen} cannot be used: {error.strerror}",
                field="kv_transfer_listen",
            ) from None
        self._is_closed = False
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name="kv-receiver", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Takes no more connections."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("no connection was taken for KV: %s", error)
                time.sleep(HEARTBEAT_S)
                continue
            if not self._places.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(
                target=self._serve, args=(peer,), name="kv-received", daemon=True
            ).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer:
                peer.settimeout(SILENCE_S)
                self._receive(peer)
        except (OSError, PushError) as error:
            log.warning("KV of another server did not come: %s", error)
        finally:
            self._places.release()

    def _receive(self, peer: socket.socket) -> None:
        announcement = _announced(peer, self._key)
        paths = announcement.paths(self._folder)
        if any(path.exists() for path in paths):
            raise _refused(peer, f"a transfer of the name {announcement.name} lies there already")
        marks = [Path(f"{path}.part") for path in paths]
        with _marked(marks):
            peer.sendall(b"+")
            for path, mark in zip(paths, marks, strict=True):
                size = _await_file(peer, marks)
                if size is None:
                    return  # nothing is sent
                self._check_room(peer, size)
                _store(peer, size, mark)
                os.replace(mark, path)
        peer.sendall(b"+")

    def _check_room(self, peer: socket.socket, num_bytes: int) -> None:
        total, count = swept(self._folder, self._lease_s)
        if count >= MAX_FILES or total + num_bytes > self._max_bytes:
            raise _refused(
                peer,
                f"{num_bytes} bytes more are too many: {count} files take {total} of the "
                f"{self._max_bytes} of --kv-transfer-bytes",
            )


@contextlib.contextmanager
def _connected(peer: str) -> Iterator[socket.socket]:
    host, _, port = peer.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=SILENCE_S) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield one


def _announce(peer: socket.socket, announcement: Announcement, key: bytes) -> None:
    nonce = _exactly(peer, _NONCE_BYTES)
    text = msgspec.msgpack.encode(announcement)
    peer.sendall(hmac.digest(key, nonce + text, "sha256") + len(text).to_bytes(4, "big") + text)
    _take_verdict(peer)


def _announced(peer: socket.socket, key: bytes) -> Announcement:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    peer.sendall(nonce)
    mac = _exactly(peer, 32)
    text = _exactly(peer, _length(peer))
    if not hmac.compare_digest(mac, hmac.digest(key, nonce + text, "sha256")):
        raise _refused(peer, "another secret (--kv-transfer-key-file)")
    try:
        announcement = msgspec.msgpack.decode(text, type=Announcement)
    except msgspec.DecodeError as error:
        raise _refused(peer, str(error)) from None
    if not _NAME.fullmatch(announcement.name) or not 0 < announcement.files <= 1024:
        raise _refused(peer, "no name of a transfer, or no number of its files")
    return announcement


def _take_verdict(peer: socket.socket) -> None:
    verdict = _exactly(peer, 1)
    if verdict != b"+":
        raise PushError(_exactly(peer, _length(peer)).decode(errors="replace"))


def _refused(peer: socket.socket, reason: str) -> PushError:
    text = reason.encode()[:_MAX_TEXT]
    peer.sendall(b"-" + len(text).to_bytes(4, "big") + text)
    return PushError(reason)


@contextlib.contextmanager
def _marked(marks: list[Path]) -> Iterator[None]:
    """Marks of files that are being written, and of nothing once it is over."""
    for mark in marks:
        os.close(os.open(mark, _NEW, 0o600))
    try:
        yield
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def _await_file(peer: socket.socket, marks: list[Path]) -> int | None:
    """The size of the next file; None: the sender has ended. As long as it says something, its
    marks are new."""
    while True:
        sign = peer.recv(1)
        if not sign:
            return None
        if sign == b"F":
            return int.from_bytes(_exactly(peer, 8), "big")
        if sign != b".":
            raise PushError("what came is no transfer")
        for mark in marks:
            with contextlib.suppress(FileNotFoundError):
                os.utime(mark)


def _store(peer: socket.socket, size: int, mark: Path) -> None:
    buffer = memoryview(bytearray(min(size, PIECE_BYTES) or 1))
    with open(os.open(mark, _NEW, 0o600), "wb") as file:
        while size:
            count = peer.recv_into(buffer[: min(size, len(buffer))])
            if not count:
                raise PushError("the sender ended in a file")
            file.write(buffer[:count])
            size -= count


def _send_file(peer: socket.socket, file: Path) -> None:
    with open(file, "rb") as content:
        size = os.fstat(content.fileno()).st_size
        peer.sendall(b"F" + size.to_bytes(8, "big"))
        if size:
            peer.sendfile(content, count=size)


def _length(peer: socket.socket) -> int:
    length = int.from_bytes(_exactly(peer, 4), "big")
    if length > _MAX_TEXT:
        raise PushError(f"a text of {length} bytes, at most {_MAX_TEXT} are read")
    return length


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise PushError("the other end has gone")
        data += part
    return data


def transfers_of(
    spec: KVTransferSpec, num_ranks: int, engine: Callable[[], EngineView], core_socket: str
) -> KVTransfers:
    """The transfers of a core. The first core of a server listens for all of them, as they share
    the folder; `core_socket`: where this one listens."""
    push = spec.push
    if push is None:
        return KVTransfers(spec, num_ranks, engine)
    transfers = KVTransfers(spec, num_ranks, engine, KVPushes(push))
    if push.listen is not None and Path(core_socket).stem == "core-0":
        KVReceiver(spec, push.listen, read_key(push.key_file))
    return transfers
