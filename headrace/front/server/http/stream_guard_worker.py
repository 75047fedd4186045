"""The process that ends the streams of a dead API process: `python -m
headrace.front.server.http.stream_guard_worker CHANNEL TABLE` (two inherited descriptors).

It sleeps, wakes for each stream that begins, and holds a duplicate of its socket. It imports
nothing of the package, to stay small. See stream_guard.py."""

from __future__ import annotations

import contextlib
import mmap
import resource
import signal
import socket
import struct
import sys
import time

MAX_DESCRIPTORS = 1 << 20
"""As many as a process may have (fs.nr_open, as Linux sets it)."""
DESCRIPTOR = struct.Struct("<I")
"""Stands before a stream's last bytes in a message."""
STREAMING = 1
"""In the table: a descriptor in the middle of a stream."""
MAX_BYTES = 1 << 16
SWEEP_S = 1.0
Kept = dict[int, tuple[socket.socket, bytes]]


def receive(channel: socket.socket, states: mmap.mmap, kept: Kept) -> None:
    """Takes what is shown until the other end is gone; drops what streams no more."""
    sweep_at = 0.0
    while True:
        channel.settimeout(SWEEP_S if kept else None)
        with contextlib.suppress(TimeoutError):
            message, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, 1)
            if not message:
                return
            if descriptors:  # none: this process may open no more
                (number,) = DESCRIPTOR.unpack_from(message)
                drop(kept, number)
                connection = socket.socket(fileno=descriptors[0])
                kept[number] = connection, message[DESCRIPTOR.size :]
        if time.monotonic() >= sweep_at:
            sweep_at = time.monotonic() + SWEEP_S
            for number in [number for number in kept if states[number] != STREAMING]:
                drop(kept, number)


def drop(kept: Kept, number: int) -> None:
    """Closes our duplicate of a socket, if there is one."""
    if number in kept:
        kept.pop(number)[0].close()


def end_all(states: mmap.mmap, kept: Kept) -> None:
    """Writes the last bytes of all streams that were not over. A socket that takes nothing has a
    reader that is behind: what it has not read yet may end within an event."""
    for number, (connection, last_bytes) in kept.items():
        with contextlib.suppress(OSError):
            if states[number] == STREAMING:
                connection.send(last_bytes, socket.MSG_DONTWAIT)
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def main() -> None:
    """Until the API process has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    channel = socket.socket(fileno=int(sys.argv[1]))
    states = mmap.mmap(int(sys.argv[2]), MAX_DESCRIPTORS, prot=mmap.PROT_READ)
    kept: Kept = {}
    receive(channel, states, kept)
    end_all(states, kept)


if __name__ == "__main__":
    main()
