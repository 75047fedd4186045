"""Events of a core's KV cache (core/kv_events.py) for those who read them from a Unix socket.

    frame    number of the bytes that follow (4 bytes, big endian), then
    batch    its number (8 bytes, big endian, from 0 on), then in MessagePack
             [seconds since the epoch, [event, ...], 0]

A reader gets what happens from its connection on; a gap in the numbers does not occur: a reader
that does not keep up is disconnected, and begins anew. Threads of their own send, so that steps
never wait for readers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from pathlib import Path

import msgspec

from headrace.base.config.resolved import KVSpec
from headrace.base.errors import ConfigError
from headrace.core.kv_events import Event
from headrace.launch.topology import RuntimeFolder

log = logging.getLogger(__name__)
MAX_READERS = 16
MAX_EVENTS = 1024  # of a batch
SEND_S = 1.0
"""A reader that takes nothing for so long is disconnected."""


def event_socket(spec: KVSpec, core_socket: str) -> Path | None:
    """Where the core that listens on this socket tells its events; None: it tells none."""
    name = f"{Path(core_socket).stem}.kv"
    return None if spec.events_path is None else Path(spec.events_path) / name


def remove_with(folder: RuntimeFolder, spec: KVSpec, core_socket: str) -> None:
    """The core's event socket goes when the server ends: cores are killed, and cannot do it."""
    path = event_socket(spec, core_socket)
    if path is not None:
        folder.also_remove(path)


class KVEventServer:
    """Sends events to the readers of one socket (0600). `tell` may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._readers: list[socket.socket] = []
        self._number = 0
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(path))
            os.chmod(path, 0o600)
        except OSError as error:
            raise ConfigError(
                f"--kv-events-path: {str(path)!r} cannot be made: {error.strerror}",
                field="kv_events_path",
            ) from None
        self._socket.listen(MAX_READERS)
        for work in (self._accept, self._send):
            threading.Thread(target=work, name="kv-events", daemon=True).start()

    @property
    def num_readers(self) -> int:
        """Connections that are open."""
        return len(self._readers)

    def tell(self, event: Event) -> None:
        """Sends an event soon."""
        self._events.put(event)

    def _accept(self) -> None:
        while True:
            reader, _ = self._socket.accept()
            if len(self._readers) >= MAX_READERS:
                reader.close()
                continue
            reader.settimeout(SEND_S)
            self._readers.append(reader)

    def _send(self) -> None:
        while True:
            events = [self._events.get()]
            with contextlib.suppress(queue.Empty):
                while len(events) < MAX_EVENTS:
                    events.append(self._events.get_nowait())
            batch = self._number.to_bytes(8, "big")
            batch += msgspec.msgpack.encode([time.time(), events, 0])
            self._number += 1
            frame = len(batch).to_bytes(4, "big") + batch
            for reader in tuple(self._readers):
                try:
                    reader.sendall(frame)
                except OSError as error:
                    log.warning("a reader of KV events is disconnected: %s", error)
                    self._readers.remove(reader)
                    reader.close()
