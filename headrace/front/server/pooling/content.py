"""Queries and documents as texts: plain, as an object, or as the parts of a message.

Every shape is read and checked for every model. Texts are what all of them take; another medium is
refused by its place in the request where the model takes text only, on both sides alike."""

from __future__ import annotations

from headrace.base.errors import InvalidRequest
from headrace.front.server.pooling.schema import PoolingContent
from headrace.front.text.chat import parts_text


def text_of(content: str | PoolingContent, field: str) -> str:
    """The text of a query or document; its parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    named = [name for name in ("text", "content", "image") if getattr(content, name) is not None]
    if len(named) != 1:
        raise InvalidRequest(
            f"{field}: exactly one of text, content and image is needed", field=field
        )
    if content.image is not None:
        raise InvalidRequest(
            f"{field}.image: images are not accepted by this model (only text is)",
            field=f"{field}.image",
        )
    return parts_text(
        content.text if content.content is None else content.content, f"{field}.{named[0]}"
    )


def texts_of(contents: str | PoolingContent | list[str | PoolingContent], field: str) -> list[str]:
    """The texts of one side."""
    if isinstance(contents, list):
        return [text_of(one, f"{field}[{i}]") for i, one in enumerate(contents)]
    return [text_of(contents, field)]
