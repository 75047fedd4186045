"""What lets the streams of a killed API process end with an error event: a process of its own holds
their sockets.

A process that is killed closes its sockets at once, and its clients see connections that break
off. So each stream, as it begins, is shown to a small process (stream_guard_worker.py): a duplicate
of its socket goes there, and the bytes that end it. A table in shared memory says which descriptors
stream now: one byte each, written by this process alone, so that the end of an answer costs no
message. Once this process has ended, however that came, the other one writes the last bytes of the
streams that the table still names. If that process is gone, streams are as they would be without
it, until the next one has started.

A descriptor that is used anew takes the place of the earlier one. Because there is a duplicate,
closing a socket here does not end its connection: protocol.py shuts it down first."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import subprocess
import time

from headrace.base import env
from headrace.base.process_stop import CHECK_S, StopDetector
from headrace.front.server.http.stream_guard_worker import MAX_DESCRIPTORS

BETWEEN_STREAMS = 2
"""In the table: a connection that stays after a stream."""
RESTART_S = 1.0
log = logging.getLogger(__name__)


class StreamGuard:
    """The table and the channel to the process. Without `start` nothing is kept."""

    def __init__(self) -> None:
        self.states = mmap.mmap(-1, MAX_DESCRIPTORS)
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.close()
        self._process: subprocess.Popen[bytes] | None = None
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the process; called in the loop, which starts it again if it dies."""
        memory = os.memfd_create("stream-guard")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            os.ftruncate(memory, MAX_DESCRIPTORS)
            states = mmap.mmap(memory, MAX_DESCRIPTORS)
            module = "headrace.front.server.http.stream_guard_worker"
            self._process = subprocess.Popen(
                [*env.python_command(), "-m", module, str(theirs.fileno()), str(memory)],
                pass_fds=(theirs.fileno(), memory),
                start_new_session=True,
                env=env.child_environment(HEADRACE_API_KEYS="", HEADRACE_ADMIN_KEY=""),
            )
        os.close(memory)
        ours.setblocking(False)
        self.channel.close()
        self.channel, self.states = ours, states
        asyncio.get_running_loop().add_reader(ours, self._ended)
        self._look(self._process, StopDetector(self._process.pid))

    def close(self) -> None:
        """Ends the process, which finds nothing to end any more."""
        if self._next is not None:
            self._next.cancel()
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self.channel)
            self._process.kill()
            self._process.wait()
            self.channel.close()

    def _look(self, process: subprocess.Popen[bytes], stop: StopDetector) -> None:
        """Kills the process once a signal has stopped it."""
        if stop.is_stopped(time.monotonic()):
            process.kill()
        self._next = asyncio.get_running_loop().call_later(CHECK_S, self._look, process, stop)

    def _ended(self) -> None:
        """The process never writes: what can be read is its end."""
        assert self._process is not None and self._next is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.channel)
        status = self._process.wait()
        log.error("the process that guards streams died (exit status %d)", status)
        self._next.cancel()
        self._next = loop.call_later(RESTART_S, self.start)
