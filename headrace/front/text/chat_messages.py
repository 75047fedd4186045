"""Chat messages as clients send them, checked and brought into the one shape that templates expect.

Every text that a client wrote goes through `Guard.protect`, so that no template can turn it into a
control token. What the client wrote as reasoning comes in as `reasoning` or `reasoning_content` and
goes on as both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.front.text.files import file_text
from headrace.front.text.guard import Guard, neutral

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
MAX_MESSAGES = 10_000
MAX_DEPTH = 64
_REASONING = ("reasoning_content", "reasoning")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_messages(
    messages: Sequence[dict[str, Any]], guard: Guard, *, developer_role: bool
) -> list[dict[str, Any]]:
    """The messages a template sees. Without `developer_role` the template knows no developer: it
    reads as system."""
    if not messages:
        raise InvalidRequest(
            "messages: an empty list; at least one message is needed", field="messages"
        )
    if len(messages) > MAX_MESSAGES:
        raise _bad("messages", f"{len(messages)} messages are more than {MAX_MESSAGES}")
    rendered = [_message(message, f"messages[{i}]", guard) for i, message in enumerate(messages)]
    for message in rendered:
        if message["role"] == "developer" and not developer_role:
            message["role"] = "system"
    return rendered


def protect_tree(value: Any, protect: Callable[[str], str], field: str, depth: int = 0) -> Any:
    """`value` (JSON) with every text in it protected, keys included."""
    if depth > MAX_DEPTH:
        raise _bad(field, f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, str):
        return protect(value)
    if isinstance(value, dict):
        return {
            protect(str(k)): protect_tree(v, protect, field, depth + 1) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [protect_tree(item, protect, field, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise _bad(field, f"{type(value).__name__} is not a JSON value")


def text_size(value: Any) -> int:
    """The number of characters in all texts of a JSON value, without recursion."""
    size, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return size


def _message(message: dict[str, Any], field: str, guard: Guard) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _bad(field, f"{type(message).__name__} is not a message (an object)")
    role = message.get("role")
    if role not in ROLES:
        raise _bad(f"{field}.role", f"{role!r:.80} is none of {', '.join(ROLES)}")
    rendered: dict[str, Any] = {
        "role": role,
        "content": _content(message, f"{field}.content", guard),
    }
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            rendered[name] = guard.protect_name(_text(message[name], f"{field}.{name}"))
    if role == "assistant":
        _assistant(message, rendered, field, guard)
    return rendered


def _assistant(message: dict[str, Any], rendered: dict[str, Any], field: str, guard: Guard) -> None:
    for name in _REASONING:
        if message.get(name):
            text = guard.protect(_text(message[name], f"{field}.{name}"))
            rendered["reasoning_content"] = rendered["reasoning"] = text
            break
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise _bad(f"{field}.tool_calls", f"{type(calls).__name__} is not a list")
        rendered["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{i}]", guard) for i, call in enumerate(calls)
        ]
    elif all(message.get(name) is None for name in ("content", "refusal", *_REASONING)):
        raise _bad(f"{field}.content", "null, and there are no tool_calls")


def _tool_call(call: Any, field: str, guard: Guard) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad(field, "must be an object with function.name and function.arguments")
    arguments = _arguments(function.get("arguments"))
    rendered = {
        "type": "function",
        "function": {
            "name": guard.protect_name(function["name"]),
            "arguments": protect_tree(arguments, guard.protect, f"{field}.function.arguments"),
        },
    }
    if isinstance(call.get("id"), str):
        rendered["id"] = guard.protect_name(call["id"])
    return rendered


def _arguments(arguments: Any) -> Any:
    """Arguments come as JSON text; templates want the object. What is no object stays as it was
    given."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _content(message: dict[str, Any], field: str, guard: Guard) -> str:
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return guard.protect(_text(message.get("refusal") or "", field))
    return _own_words(parts_text(content, field), message["role"], guard)


def parts_text(content: Any, field: str) -> str:
    """The text of a message's content, given as a text or as parts, which are joined by line
    breaks."""
    return _text(_joined(content, field) if isinstance(content, list) else content, field)


def _joined(parts: list[Any], field: str) -> str:
    return "\n".join(_part(part, f"{field}[{i}]") for i, part in enumerate(parts))


def _own_words(text: str, role: str, guard: Guard) -> str:
    """An assistant's earlier words may hold markup (<think>), which templates look for; never
    special tokens."""
    return guard.protect_special(text) if role == "assistant" else guard.protect(text)


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_file":
        return _text(file_text(part, field), field)
    if kind == "file":
        file = part.get("file")
        if not isinstance(file, dict):
            raise _bad(f"{field}.file", "an object with file_data and filename is needed")
        return _text(file_text(file, f"{field}.file"), f"{field}.file")
    if kind not in _TEXT_PARTS:
        shown = repr(kind if isinstance(part, dict) else type(part).__name__)[:80]
        raise _bad(f"{field}.type", f"{shown} is not accepted by this model (only text is)")
    return _text(part.get(_TEXT_PARTS[kind]), f"{field}.{_TEXT_PARTS[kind]}")


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _bad(field, f"{type(value).__name__} is not a text")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise _bad(field, "holds half of a surrogate pair")
    return neutral(value)


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
