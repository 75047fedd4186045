"""Parts of messages that are no text: their types, and what stands for them in templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.front.text.tokenizer import MARK

VECTORS_PART = "prompt_embeds"
MEDIA_PARTS = frozenset(
    (
        *("image", "image_url", "input_image", "image_pil", "image_embeds"),
        *("video", "video_url", "input_video"),
        *("input_audio", "audio_url", "audio", "audio_embeds"),
        VECTORS_PART,
    )
)
"""Types of parts that are no text, whatever a model takes."""
_FILE_PARTS = frozenset(("file", "input_file"))


NO_TOKEN = -1
"""Stands in a chat's ids where its text has tokenizer.VECTORS, for what comes as vectors."""


class MediaMark(msgspec.Struct, frozen=True):
    """Stands in a message's parts where a medium was: `kind` as of MediaInput. Clients cannot write
    one: theirs are JSON. `written`: what stands for it in a text; "": templates take parts."""

    kind: str
    written: str = ""


def has_media(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether a part of a message may be a medium."""
    for message in messages:
        if not isinstance(message, dict):
            continue
        if message.get("images"):
            return True
        content = message.get("content")
        if isinstance(content, list):
            kinds = {part.get("type") for part in content if isinstance(part, dict)}
            if kinds & MEDIA_PARTS or kinds & _FILE_PARTS:
                return True
    return False


def with_marks(parts: Sequence[MediaMark | str]) -> str | list[dict[str, str]]:
    """A message's content of texts and marks: a text where each mark is written as one."""
    if all(part.written for part in parts if isinstance(part, MediaMark)):
        return "\n".join(part.written if isinstance(part, MediaMark) else part for part in parts)
    return [
        {"type": part.kind}
        if isinstance(part, MediaMark) and not part.written
        else {"type": "text", "text": part.written if isinstance(part, MediaMark) else part}
        for part in parts
    ]


def with_mark(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    """A message's content with the mark of its end behind its text."""
    if isinstance(content, str):
        return content + MARK
    if not content or content[-1]["type"] != "text":
        raise InvalidRequest(
            "continue_final_message: the last message ends with a medium; text can be continued",
            field="continue_final_message",
        )
    return [*content[:-1], {"type": "text", "text": content[-1]["text"] + MARK}]
