"""What the core and its worker processes say to each other, and the socket they say it over.

An anonymous pair of Unix stream sockets per worker: it has no name in the file system, so nobody
else can connect. Frames as in base/wire/codec.py; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import msgspec

from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import WireError
from headrace.base.wire.codec import MAX_FRAME_BYTES, Codec, read_frame
from headrace.base.wire.slots import KVOrder, KVReply
from headrace.base.wire.step import (
    AdapterOrder,
    AdapterReply,
    DeferredInputs,
    RecordedGraphs,
    StepPlan,
    StepResult,
    WorkerFacts,
)
from headrace.base.wire.weights import WeightOrder, WeightReply


class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """The first message to a worker. `rendezvous`: a fresh file through which the ranks find each
    other.

    `loader`: see resident.build_resident.
    """

    rank: int
    world_size: int
    spec: EngineSpec
    rendezvous: str
    loader: str


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The worker has loaded its share."""

    facts: WorkerFacts


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker ends: it could not start (`step` None), or a step failed. The traceback is in its
    log."""

    step: int | None
    error: WireError


class ProfileSteps(msgspec.Struct, frozen=True, tag="profile"):
    """Starts a trace of the steps into a folder; None stops it. In order with the plans."""

    folder: str | None


class ProfileReply(msgspec.Struct, frozen=True, tag="profiled"):
    """What became of it: the folder or the file, or why not."""

    place: str = ""
    error: WireError | None = None


class ParkWeights(msgspec.Struct, frozen=True, tag="park"):
    """The weights leave the device, or come `back`. In order with the plans."""

    back: bool


class ParkReply(msgspec.Struct, frozen=True, tag="parked"):
    """What became of it: what the worker states once they are back, or why not."""

    facts: WorkerFacts | None = None
    error: WireError | None = None


class ShareExperts(msgspec.Struct, frozen=True, tag="share_experts"):
    """The first so many engine cores have the experts from now on; they meet in a folder that is
    new. In order with the plans, of which none is under way."""

    cores: int
    folder: str


class SharedReply(msgspec.Struct, frozen=True, tag="shared"):
    """They have them; or why not."""

    error: WireError | None = None


class RecordGraph(msgspec.Struct, frozen=True, tag="record"):
    """At most one graph of a step is recorded. In order with the plans."""


class GraphReply(msgspec.Struct, frozen=True, tag="recorded"):
    """What is recorded then, or why the worker cannot say."""

    graphs: RecordedGraphs = RecordedGraphs()
    error: WireError | None = None


class SetLogLevel(msgspec.Struct, frozen=True, tag="log_level"):
    """What the worker logs from now on."""

    level: str


ToWorker = (
    StartWorker
    | StepPlan
    | DeferredInputs
    | ProfileSteps
    | ParkWeights
    | RecordGraph
    | ShareExperts
    | SetLogLevel
    | AdapterOrder
    | WeightOrder
    | KVOrder
)
ToCore = (
    WorkerReady
    | StepResult
    | WorkerFailed
    | ProfileReply
    | ParkReply
    | GraphReply
    | SharedReply
    | AdapterReply
    | WeightReply
    | KVReply
)
TO_WORKER: Codec[ToWorker] = Codec(ToWorker)
TO_CORE: Codec[ToCore] = Codec(ToCore)


class Channel:
    """One end of a stream of frames. Sending is safe from any thread, receiving from one."""

    def __init__(self, end: socket.socket, *, send_timeout_s: float) -> None:
        seconds = int(send_timeout_s)
        micros = int((send_timeout_s - seconds) * 1e6)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, micros))
        self._socket = end
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Sends a whole frame; OSError if the peer is gone or does not read in time."""
        with self._lock:
            self._socket.sendall(frame)

    def receive(self) -> bytes | None:
        """The body of the next frame, None once the peer is gone or this end is closed."""
        return read_frame(self._read, max_bytes=MAX_FRAME_BYTES)

    def _read(self, size: int) -> bytes | None:
        data, have = bytearray(size), 0
        while have < size:
            try:
                count = self._socket.recv_into(memoryview(data)[have:])
            except OSError:
                return None
            if not count:
                return None
            have += count
        return bytes(data)

    def close(self) -> None:
        """Ends the stream in both directions: a receiver on either end gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
