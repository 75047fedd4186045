"""Control calls from the parent to an engine core: a short connection to its socket, in a thread
that waits for the answer."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.base.errors import EngineDead, from_wire
from headrace.base.wire.codec import MAX_FRAME_BYTES, Codec, read_frame
from headrace.base.wire.control import Call, Reply
from headrace.base.wire.request import ToCore, ToFront

TIMEOUT_S = 600.0
Calls = Sequence[tuple[str, dict[str, Any]]]


def call_core(path: str, calls: Calls) -> list[Any]:
    """Makes these calls (operation and arguments), one after the other; their results.
    HeadraceError as the core answers, EngineDead if it ends meanwhile."""
    codec: Codec[ToCore | ToFront] = Codec(ToFront)
    results = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as core:
            core.settimeout(TIMEOUT_S)
            core.connect(path)
            with core.makefile("rb") as reader:
                for number, (operation, arguments) in enumerate(calls):
                    call = Call(number=number, operation=operation, arguments=arguments)
                    core.sendall(codec.frame(call))
                    results.append(_reply(codec, reader, number))
    except OSError as error:
        raise EngineDead(f"the engine core does not answer: {error}") from None
    return results


def _reply(codec: Codec[ToCore | ToFront], reader: Any, number: int) -> Any:
    def read(size: int) -> bytes | None:
        data = reader.read(size)
        return data if len(data) == size else None

    while True:
        body = read_frame(read, max_bytes=MAX_FRAME_BYTES)
        if body is None:
            raise EngineDead("the engine core ended")
        message = codec.decode(body)
        if isinstance(message, Reply) and message.number == number:
            if message.error is not None:
                raise from_wire(message.error)
            return msgspec.msgpack.decode(message.result)
