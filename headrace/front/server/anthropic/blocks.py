"""Blocks that people and tools wrote: text, documents, images; as text and as parts of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from headrace.base.errors import InvalidRequest

Part: TypeAlias = dict[str, Any]
"""A part of a chat's message that is no text."""


def parts_of(block: Any, at: str) -> list[str | Part]:
    """What a block holds: texts, images, pages."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "image":
        return [{"type": "image", **_source(block, at, ("base64", "url", "file"))}]
    if kind == "document" and not _is_text(block):
        return _document_parts(block, at)
    return [text_of(block, at)]


def content_of(parts: Sequence[str | Part]) -> str | list[Part]:
    """A message's content: one text where all of it is text."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]


def text_of(block: Any, at: str) -> str:
    """The text of a block that people or tools wrote."""
    kind = block.get("type") if isinstance(block, dict) else None
    match kind:
        case "text":
            return string_of(block, "text", at)
        case "tool_reference":
            return string_of(block, "tool_name", at)
        case "document":
            return _document(block, at)
        case "search_result":
            parts = block.get("content")
            if not isinstance(parts, list):
                raise bad(f"{at}.content", "an array of text blocks is needed")
            texts = [text_of(part, f"{at}.content[{k}]") for k, part in enumerate(parts)]
            return "\n".join([string_of(block, "title", at), *texts])
    raise bad(f"{at}.type", f"{kind!r:.80} is not accepted here (only text is)")


def string_of(block: dict[str, Any], name: str, at: str) -> str:
    """A field that must be a text."""
    value = block.get(name)
    if not isinstance(value, str):
        raise bad(f"{at}.{name}", "a text is needed")
    return value


def bad(field: str, what: str) -> InvalidRequest:
    """The error for a field."""
    return InvalidRequest(f"{field}: {what}", field=field)


def _source(block: dict[str, Any], at: str, kinds: tuple[str, ...]) -> dict[str, str]:
    """Where a medium's content is, as parts of chats say it; nothing where the block says
    nothing: whether the model takes such a part at all is told first."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if source == {}:
        return {}
    if not isinstance(source, dict) or kind not in kinds:
        allowed = ", ".join(repr(each) for each in kinds)
        raise bad(f"{at}.source.type", f"{kind!r:.80} given; allowed: {allowed}")
    place = f"{at}.source"
    match kind:
        case "url":
            return {"url": string_of(source, "url", place)}
        case "file":
            return {"file_id": string_of(source, "file_id", place)}
    media_type, data = string_of(source, "media_type", place), string_of(source, "data", place)
    return {"url": f"data:{media_type};base64,{data}"}


def _is_text(block: dict[str, Any]) -> bool:
    source = block.get("source")
    if not isinstance(source, dict):
        return True
    content = source.get("content")
    if source.get("type") == "content" and isinstance(content, list):
        return all(isinstance(b, dict) and b.get("type") == "text" for b in content)
    return source.get("type") not in ("base64", "url", "file", "content")


def _document_parts(block: dict[str, Any], at: str) -> list[str | Part]:
    """A document of pages, or of blocks with images among them."""
    title = block.get("title")
    parts: list[str | Part] = [title] if isinstance(title, str) else []
    source = block["source"]
    if source["type"] == "content":
        if isinstance(source.get("content"), str):
            return [_document(block, at)]
        for k, inner in enumerate(source["content"]):
            parts += parts_of(inner, f"{at}.source.content[{k}]")
        return parts
    place = _source(block, at, ("base64", "url", "file"))
    names = {"url": "file_data" if source["type"] == "base64" else "file_url"}
    file = {names.get(name, name): value for name, value in place.items()}
    return [*parts, {"type": "file", "file": file}]


def _document(block: dict[str, Any], at: str) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        raise bad(f"{at}.source.type", f"{kind!r:.80} given; allowed: 'text', 'content'")
    content = source.get("data") if kind == "text" else source.get("content")
    if isinstance(content, list):
        content = "\n".join(
            text_of(part, f"{at}.source.content[{k}]") for k, part in enumerate(content)
        )
    if not isinstance(content, str):
        raise bad(f"{at}.source", "holds no text")
    title = block.get("title")
    return f"{title}\n{content}" if isinstance(title, str) else content
