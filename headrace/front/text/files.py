"""Files that stand in a message: their text, where they are text.

The data come inline, as a data URL or as base64 beside a name that tells the type. Other kinds of
file would need a reader of their own, and a file that is only named or linked is not looked up.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from typing import Any
from urllib.parse import unquote_to_bytes

from headrace.base.errors import InvalidRequest

TEXT_TYPES = frozenset(
    {
        *("application/json", "application/x-ndjson", "application/jsonl", "application/xml"),
        *("application/yaml", "application/x-yaml", "application/toml", "application/sql"),
        *("application/javascript", "application/x-sh"),
    }
)
_BY_ENDING = {".md": "text/markdown", ".jsonl": "application/jsonl", ".yaml": "application/yaml"}


def file_text(part: dict[str, Any], field: str) -> str:
    """The name and the text of a file given by `file_data` and `filename`."""
    for elsewhere in ("file_id", "file_url"):
        if part.get(elsewhere) is not None:
            raise _bad(f"{field}.{elsewhere}", "files are taken inline only; send file_data")
    file_data, name = part.get("file_data"), part.get("filename")
    if not isinstance(file_data, str):
        raise _bad(f"{field}.file_data", "a data URL, or base64 beside a filename, is needed")
    if name is not None and not isinstance(name, str):
        raise _bad(f"{field}.filename", "a text is needed")
    kind, data = _decoded(file_data, name or "", f"{field}.file_data")
    if not (kind.startswith("text/") or kind in TEXT_TYPES or kind.endswith(("+json", "+xml"))):
        raise _bad(
            f"{field}.file_data",
            f"{kind or 'an unknown type':.80} given; allowed: files of text "
            "(text/plain, text/markdown, application/json and the like)",
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _bad(f"{field}.file_data", "is not text in UTF-8") from None
    return f"{name}\n{text}" if name else text


def _decoded(file_data: str, name: str, field: str) -> tuple[str, bytes]:
    """The media type and the bytes."""
    if not file_data.startswith("data:"):
        ending = name[name.rfind(".") :].lower() if "." in name else ""
        guessed = _BY_ENDING.get(ending) or mimetypes.guess_type(name)[0]
        return guessed or "", _from_base64(file_data, field)
    head, comma, body = file_data.removeprefix("data:").partition(",")
    if not comma:
        raise _bad(field, "the data URL has no comma")
    words = [word.strip().lower() for word in head.split(";")]
    kind = words[0] or "text/plain"
    return kind, _from_base64(body, field) if "base64" in words[1:] else unquote_to_bytes(body)


def _from_base64(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad(field, "is not base64") from None


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
