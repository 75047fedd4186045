"""Which parts of a message are media, whatever dialect wrote them, and where their content comes
from.

    image_url     {"url", "detail"} or a text      OpenAI chat
    input_image   image_url or file_id, detail      OpenAI Responses
    image         a text, {"url"}, or a source      templates' own form, Ollama, Cohere
    video_url     {"url"} or a text
    video         as image
    audio_url     {"url"} or a text               vLLM's clients
    input_audio   {"data", "format"}, base64      OpenAI chat and Responses
    audio         as image
    image_embeds, audio_embeds   vectors (front/media/embeds.py), base64 or {"data", "grid"}
    file, input_file   a PDF, inline, by URL or by id; other files are text (front/text/files.py)

Parts of offline use may hold bytes or a Pillow image in place of an address.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.front.text.media_parts import MEDIA_PARTS, VECTORS_PART

_DETAILS = ("auto", "low", "high", "original")
_ROLES = ("user", "tool", "function")
_KEYS = {
    "image_url": ("image", ("image_url",)),
    "input_image": ("image", ("image_url", "file_id")),
    "image": ("image", ("image", "url", "image_url", "file_id", "path")),
    "image_pil": ("image", ("image_pil",)),
    "video_url": ("video", ("video_url",)),
    "input_video": ("video", ("video_url", "file_id")),
    "video": ("video", ("video", "url", "video_url", "file_id", "path")),
    "audio_url": ("audio", ("audio_url",)),
    "input_audio": ("audio", ("input_audio", "audio_url", "file_id")),
    "audio": ("audio", ("audio", "url", "audio_url", "file_id", "path")),
}
EMBEDS = {"image_embeds": "image", "audio_embeds": "audio"}
MAX_UUID_CHARS = 128
MAX_LISTED_FRAMES = 1024
"""Of a video whose frames a client has sampled: samplers take 768 at most, and each is decoded."""


class MediaPart(msgspec.Struct, frozen=True, kw_only=True):
    """One medium of a message. `kind`: image, video, audio or pages (a document). One of `address`
    (http, https, data or file), `file_id` and `content` (bytes, or a Pillow image) says where it
    is; with a `uuid` that is known none is needed. `low`: little detail is enough. `embeds`:
    `content` is the part itself, whose vectors stand for the medium."""

    kind: str
    field: str
    address: str = ""
    file_id: str = ""
    content: Any = None
    uuid: str | None = None
    low: bool = False
    embeds: bool = False


class ContentFile(msgspec.Struct, frozen=True):
    """The bytes of a medium: one file, or with `frames` those of a sampled video."""

    files: tuple[bytes, ...]
    frames: bool = False


def part_of(part: Any, field: str) -> MediaPart | None:
    """The medium a part stands for; None for text and for files that are text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("file", "input_file"):
        return _document(part, field)
    if kind not in MEDIA_PARTS or kind == VECTORS_PART:
        return None
    if kind in EMBEDS:
        return MediaPart(
            kind=EMBEDS[kind], field=f"{field}.{kind}", content=part.get(kind), embeds=True
        )
    if kind not in _KEYS:
        raise _bad(f"{field}.type", f"{kind!r:.80} is not accepted by this model")
    medium, keys = _KEYS[kind]
    uuid = part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID_CHARS):
        raise _bad(f"{field}.uuid", f"a text of 1 to {MAX_UUID_CHARS} characters is needed")
    key = next((key for key in keys if part.get(key) is not None), None)
    if key is None:
        if uuid is None:
            raise _bad(f"{field}.{keys[0]}", "it is missing")
        return MediaPart(kind=medium, field=field, uuid=uuid)
    value, place = part[key], f"{field}.{key}"
    detail = part.get("detail")
    if key == "input_audio":
        return MediaPart(
            kind=medium, field=f"{place}.data", content=_inline(value, place), uuid=uuid
        )
    if isinstance(value, dict):
        detail = value.get("detail", detail)
        value, place = value.get("url"), f"{place}.url"
    if detail is not None and detail not in _DETAILS:
        raise _bad(f"{field}.detail", f"{detail!r:.80} given; allowed: {', '.join(_DETAILS)}")
    return _sourced(medium, key, value, place, uuid=uuid, low=detail == "low")


def _sourced(
    medium: str, key: str, value: Any, place: str, *, uuid: str | None, low: bool
) -> MediaPart:
    if key == "file_id":
        if not isinstance(value, str) or not value:
            raise _bad(place, "the id of a file is needed")
        return MediaPart(kind=medium, field=place, file_id=value, uuid=uuid, low=low)
    if isinstance(value, str):
        if not value:
            raise _bad(place, "an address is needed")
        return MediaPart(kind=medium, field=place, address=value, uuid=uuid, low=low)
    if value is None or isinstance(value, int | float | bool | list | dict):
        raise _bad(place, f"{type(value).__name__} is no address")
    return MediaPart(kind=medium, field=place, content=value, uuid=uuid, low=low)


def _inline(value: Any, place: str) -> bytes:
    """The bytes of a sound within a message; what format they have, they say themselves."""
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, str) or not data:
        raise _bad(f"{place}.data", "base64 is needed")
    if data[:5].lower() == "data:":
        return from_data_url(data, f"{place}.data").files[0]
    return _from_base64(data, f"{place}.data")


def _document(part: dict[str, Any], field: str) -> MediaPart | None:
    """A file that is a PDF or an image; what is text stays a part of text."""
    file: Any = part
    if part["type"] == "file":
        file, field = part.get("file"), f"{field}.file"
    if not isinstance(file, dict):
        return None
    for key in ("file_url", "file_id"):
        if isinstance(file.get(key), str):
            source = {"address": file[key]} if key == "file_url" else {"file_id": file[key]}
            return MediaPart(kind="pages", field=f"{field}.{key}", **source)
    data, name = file.get("file_data"), file.get("filename")
    if not isinstance(data, str):
        return None
    place = f"{field}.file_data"
    if data.startswith("data:"):
        head = data[5:64].split(",", 1)[0].split(";", 1)[0].strip().lower()
        if head.startswith("image/"):
            return MediaPart(kind="image", field=place, address=data)
        return MediaPart(kind="pages", field=place, address=data) if _is_pdf(head) else None
    if isinstance(name, str) and name.lower().endswith(".pdf"):
        return MediaPart(kind="pages", field=place, content=_from_base64(data, place))
    return None


def _is_pdf(media_type: str) -> bool:
    return media_type in ("application/pdf", "application/x-pdf")


def check_role(message: Any, field: str) -> None:
    """System and developer messages, and the model's own, are text."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise _bad(field, f"a message of role {role!r:.80} is text only")


def from_data_url(url: str, field: str) -> ContentFile:
    """The content of a data URL; `video/jpeg` holds frames, separated by commas."""
    head, comma, body = url.removeprefix("data:").partition(",")
    if not comma:
        raise _bad(field, "the data URL has no comma")
    words = [word.strip().lower() for word in head.split(";")]
    if "base64" not in words[1:]:
        return ContentFile((unquote_to_bytes(body),))
    if words[0] in ("video/jpeg", "video/png", "video/webp"):
        if (count := body.count(",") + 1) > MAX_LISTED_FRAMES:
            raise _bad(field, f"{count} frames given; at most {MAX_LISTED_FRAMES} are allowed")
        return ContentFile(tuple(_from_base64(each, field) for each in body.split(",")), True)
    return ContentFile((_from_base64(body, field),))


def _from_base64(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad(field, "is not base64") from None


def from_bare_base64(text: str) -> bytes | None:
    """Base64 without a data URL around it, as some dialects send it; None: it is none."""
    try:
        return base64.b64decode(text, validate=True) if len(text) >= 32 else None
    except (binascii.Error, ValueError):
        return None


def with_images(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with what stands beside their content (`images`, base64 or addresses) as parts
    before it."""
    return [_with_images(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _with_images(message: dict[str, Any], field: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("images") is None:
        return message
    images, content = message["images"], message.get("content") or ""
    if not isinstance(images, list):
        raise _bad(f"{field}.images", f"{type(images).__name__} is not a list")
    rest = content if isinstance(content, list) else [{"type": "text", "text": content}]
    parts = [{"type": "image", "image": image} for image in images]
    fields = {name: value for name, value in message.items() if name != "images"}
    return {**fields, "content": [*parts, *rest]}


def each_part(
    messages: Sequence[dict[str, Any]],
) -> list[tuple[int, int, MediaPart]]:
    """Every medium with its place: (message, part)."""
    parts = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        for j, part in enumerate(content):
            field = f"messages[{i}].content[{j}]"
            medium = part_of(part, field)
            if medium is not None:
                check_role(message, field)
                parts.append((i, j, medium))
    return parts


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
