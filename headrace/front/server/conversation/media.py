"""What a request brings to the preparation of its media: whose it is, and the files it may name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from headrace.base.errors import InvalidRequest, NotFound, Unsupported
from headrace.base.wire.media import MediaInput
from headrace.front.media.parts import MediaPart
from headrace.front.media.preparation import MediaRequest
from headrace.front.server.conversation.context import RequestContext

MAX_FILE_BYTES = 64 << 20


def media_request(
    context: RequestContext, arguments: Mapping[str, Any] | None = None
) -> MediaRequest:
    """See `MediaRequest`."""
    stored = context.services.stores is not None
    return MediaRequest(
        arguments=arguments,
        read_file=partial(_stored_file, context) if stored else None,
        tenant=context.tenant,
        max_tokens=context.services.context_tokens,
    )


async def images_beside(
    context: RequestContext, ids: list[int], files: Sequence[bytes], *, field: str
) -> tuple[list[int], tuple[MediaInput, ...]]:
    """A prompt of ids whose placeholders stand for images that came as files."""
    preparer = context.services.media
    if preparer is None:
        raise Unsupported(f"{field}: not accepted by this model", field=field)
    parts = [
        MediaPart(kind="image", field=f"{field}[{i}]", content=file) for i, file in enumerate(files)
    ]
    media = await preparer.media_of(parts, media_request(context))
    return preparer.expand(ids, [one for each in media for one in each], field=field)


async def _stored_file(context: RequestContext, ident: str, field: str) -> bytes:
    """The bytes of a file of the files API that belongs to the request's key."""
    assert context.services.stores is not None
    files = context.services.stores[0]
    try:
        info = files.get(ident, context.tenant)
    except NotFound as error:
        raise NotFound(f"{field}: {error.message}", field=field) from None
    if info.bytes > MAX_FILE_BYTES:
        raise InvalidRequest(
            f"{field}: a file of {info.bytes} bytes; at most {MAX_FILE_BYTES} are allowed",
            field=field,
        )

    def read() -> bytes:
        with files.open(info) as file:
            return file.read()

    return await asyncio.to_thread(read)
