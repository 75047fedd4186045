"""The process that reads large documents before the server does: `python -m
headrace.front.server.http.body_worker`.

A body of many values holds the interpreter while it is read: the streams of the process that does
it wait, and what it was made of lies scattered in its memory. So it is read here first; what is
refused was never made there. A body stands behind its length, as does the answer: a WireError, or
none.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from headrace.base import heap
from headrace.base.errors import InvalidRequest, WireError, to_wire
from headrace.base.wire.codec import HEADER
from headrace.front.server.http.limits import parse_json
from headrace.front.text.structure.requested import check_form_sizes

BODY_LENGTH = struct.Struct("<Q")
MEMORY_BYTES = 2 << 30
NICENESS = 15
"""Behind all streams: a body of so many values is rarely a user's."""
READY = b"!"


def verdict(body: bytes) -> WireError | None:
    """What is wrong with a body; None: nothing that can be seen without knowing its route."""
    try:
        document = parse_json(body)
        if isinstance(document, dict):
            check_form_sizes(document)
    except MemoryError:
        return to_wire(InvalidRequest("the body needs too much memory to be read"))
    except Exception as error:
        return to_wire(error)
    return None


def serve(source: BinaryIO, sink: BinaryIO, *, limit_s: float) -> None:
    """Answers until the other end closes; a body that takes more than `limit_s` of processor
    time ends the process."""
    sink.write(READY)
    sink.flush()
    while len(head := source.read(BODY_LENGTH.size)) == BODY_LENGTH.size:
        body = source.read(BODY_LENGTH.unpack(head)[0])
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        answer = msgspec.msgpack.encode(verdict(body))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(HEADER.pack(len(answer)) + answer)
        sink.flush()
        del body
        heap.trim()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    heap.keep_compact()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer, limit_s=float(sys.argv[1]))
