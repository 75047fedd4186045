"""Queries and documents as texts: plain, as an object, or as the parts of a message (MUL-08).

Every shape is read and checked for every model. Texts are what all of them take; another medium is refused by its place
in the request where the model takes text only, on both sides alike (REG-093).
"""

from __future__ import annotations

from headrace.base.errors import InvalidRequest
from headrace.front.server.pooling.schema import Content
from headrace.front.text.chat_messages import parts_text


def text_of(given: str | Content, field: str) -> str:
    """The text of a query or document; its parts are joined by line breaks."""
    if isinstance(given, str):
        return given
    named = [name for name in ("text", "content", "image") if getattr(given, name) is not None]
    if len(named) != 1:
        raise InvalidRequest(
            f"{field}: exactly one of text, content and image is needed", field=field
        )
    if given.image is not None:
        raise InvalidRequest(
            f"{field}.image: images are not accepted by this model (only text is)",
            field=f"{field}.image",
        )
    return parts_text(given.text if given.content is None else given.content, f"{field}.{named[0]}")


def texts_of(given: str | Content | list[str | Content], field: str) -> list[str]:
    """The texts of one side."""
    if isinstance(given, list):
        return [text_of(one, f"{field}[{i}]") for i, one in enumerate(given)]
    return [text_of(given, field)]
