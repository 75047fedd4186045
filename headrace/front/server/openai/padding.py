"""`include_obfuscation`: chunks of a stream padded, so that they come in few sizes whatever text they hold."""

from __future__ import annotations

import secrets
from contextlib import aclosing

from headrace.front.server.sse import DONE, Chunks

STEP_BYTES = 64
_END = b"}\n\n"


def padding(size: int) -> str:
    """Characters without meaning that fill `size` bytes up to a multiple of the step, and a step more."""
    return secrets.token_hex(STEP_BYTES)[: 2 * STEP_BYTES - size % STEP_BYTES]


async def padded(chunks: Chunks) -> Chunks:
    """The chunks with `obfuscation`; the end mark stays as it is."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk != DONE:
                head = chunk.removesuffix(_END)
                chunk = head + b',"obfuscation":"' + padding(len(chunk)).encode() + b'"' + _END
            yield chunk
