"""Tools that a chat offers, what one must be so that a call of it can be written, and calls that it
holds, as templates see them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.front.text.tokenizer import Guard

_BREAKS_CALLS = re.compile(r'["\\\x00-\x1f\x7f]')


def check_tool(tool: dict[str, Any], field: str) -> str:
    """The name of a function, which can be written into a call; other kinds of tool are refused."""
    kind, function = tool.get("type"), tool.get("function")
    if kind != "function":
        raise InvalidRequest(
            f"{field}.type: {kind!r:.80} given; allowed: 'function'", field=f"{field}.type"
        )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"{field}.function.name: a text is needed", field=f"{field}.function.name"
        )
    if _BREAKS_CALLS.search(name):
        raise InvalidRequest(
            f"{field}.function.name: {name!r:.80} given; quotation marks, backslashes and control characters are not "
            "allowed: a call is written with the name as it is",
            field=f"{field}.function.name",
        )
    return name


def template_call(call: Any, field: str, guard: Guard) -> dict[str, Any]:
    """An earlier call as templates see it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        why = f"{field}: must be an object with function.name and function.arguments"
        raise InvalidRequest(why, field=field)
    arguments = _arguments(function.get("arguments"))
    rendered = {
        "type": "function",
        "function": {
            "name": guard.protect_name(function["name"]),
            "arguments": guard.protect_tree(arguments, f"{field}.function.arguments"),
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
