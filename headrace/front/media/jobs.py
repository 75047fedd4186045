"""Processes that decode media, from the side of those who wait for them.

Each job has a deadline; a process that misses it is killed and replaced, and the request that asked
for it fails alone. Jobs come from threads, so that the event loop goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.base.errors import EngineError, HeadraceError, InvalidRequest, Unavailable
from headrace.base.pipe_process import PipeProcess, ProcessPool
from headrace.front.media.job import LENGTHS, DecodingLimits, JobReply, MediaJob, MediumReply
from headrace.front.media.processing import ProcessedMedia, TowerInput

_SLACK_S = 2.0


class MediaProcesses:
    """At most `size` processes, started when they are first needed. Safe to use from several
    threads."""

    def __init__(self, limits: DecodingLimits, *, size: int = 2) -> None:
        self.limits = limits
        self._pool = ProcessPool(lambda: _MediaProcess(limits), size=size, what="media processes")

    def run(self, job: MediaJob, files: Sequence[bytes]) -> list[ProcessedMedia]:
        """The media of a job; InvalidRequest (without a field) if a file is at fault, Unavailable
        if all processes are busy for long."""
        with self._pool.borrowed(wait_s=self.limits.time_s) as process:
            return process.run(job, files)

    def close(self) -> None:
        """Ends idle processes; they are started again when needed."""
        self._pool.close()


class _MediaProcess:
    """One process: a job at a time."""

    def __init__(self, limits: DecodingLimits) -> None:
        self._limits = limits
        bounds = (str(limits.memory_bytes), str(limits.time_s))
        self._child = PipeProcess("-m", "headrace.front.media.worker", *bounds)
        self._child.widen()
        with contextlib.suppress(EOFError, TimeoutError):
            if self._child.read_first(1) == b"!":
                return
        self.close()
        raise EngineError("the media process does not start")

    @property
    def alive(self) -> bool:
        return self._child.alive

    def run(self, job: MediaJob, files: Sequence[bytes]) -> list[ProcessedMedia]:
        head = msgspec.msgpack.encode(job)
        self._child.write_aside([LENGTHS.pack(len(head), sum(map(len, files))) + head, *files])
        deadline = time.monotonic() + self._limits.time_s + _SLACK_S
        try:
            lengths = LENGTHS.unpack(self._child.read(LENGTHS.size, deadline))
            reply = msgspec.msgpack.decode(self._child.read(lengths[0], deadline), type=JobReply)
            rows = np.frombuffer(self._child.read(lengths[1], deadline), dtype=np.uint8)
        except TimeoutError:
            self.close()
            raise self._late() from None
        except EOFError:
            error = self._why_ended()
            self.close()
            raise error from None
        if reply.error:
            raise InvalidRequest(reply.error)
        return _media(reply.media, rows)

    def _late(self) -> InvalidRequest:
        return InvalidRequest(f"decoding takes longer than {self._limits.time_s:g} s")

    def _why_ended(self) -> HeadraceError:
        """Killed from outside, for want of memory say, it was not the file's doing."""
        number = self._child.exit_signal()
        if number == signal.SIGALRM:
            return self._late()
        if number == signal.SIGKILL:
            return Unavailable("the media process was killed", retry_after_s=1.0)
        return InvalidRequest("decoding ended the process that did it")

    def close(self) -> None:
        self._child.close()


def _media(replies: Sequence[MediumReply], rows: np.ndarray) -> list[ProcessedMedia]:
    media, begin = [], 0
    for reply in replies:
        inputs = []
        for shape in reply.inputs:
            t, h, w = shape.grid
            end = begin + t * h * w * shape.row_bytes
            inputs.append(
                TowerInput(
                    kind=shape.kind,
                    grid=shape.grid,
                    rows=rows[begin:end].reshape(-1, shape.row_bytes),
                    step_s=shape.step_s,
                    num_tokens=shape.num_tokens,
                    cut=shape.cut,
                )
            )
            begin = end
        media.append(
            ProcessedMedia(
                inputs=tuple(inputs),
                layout=reply.layout,
                row_break=reply.row_break,
                row=reply.row,
            )
        )
    assert begin == len(rows), (begin, len(rows))
    return media


def default_size() -> int:
    """As many processes as may be of use here."""
    return max(2, min(8, len(os.sched_getaffinity(0)) // 2))
