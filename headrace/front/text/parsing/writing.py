"""How a family writes calls, as data: what rendering a call, or a grammar that allows nothing but
calls, needs.

`{name}` stands for the function's name, `{n}` for the call's number from 0, `{key}`, `{type}` and
`{value}` for a parameter's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec


class CallWriting(msgspec.Struct, frozen=True, kw_only=True):
    """A row's way of writing calls: begin, calls joined by `between`, end.

    A call is `call_begin`, the arguments, `call_end`. `arguments`: json (one object); tags
    (`parameter` for each, texts as they are, other values in JSON); python (key=value, with
    commas); bare (key:value, texts between two `quote`). With tags, `text_parameter` is how a text
    is written where that differs.
    """

    begin: str = ""
    call_begin: str
    call_end: str
    between: str = ""
    end: str = ""
    arguments: Literal["json", "tags", "python", "bare"] = "json"
    parameter: str = ""
    text_parameter: str = ""
    quote: str = ""


def write_calls(writing: CallWriting, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls (name, arguments) as the family's models write them."""
    written = [
        _filled(writing.call_begin, name=name, n=str(n))
        + _arguments(writing, arguments)
        + _filled(writing.call_end, name=name, n=str(n))
        for n, (name, arguments) in enumerate(calls)
    ]
    return writing.begin + writing.between.join(written) + writing.end


def _filled(pattern: str, **values: str) -> str:
    for name, value in values.items():
        pattern = pattern.replace("{" + name + "}", value)
    return pattern


def _arguments(writing: CallWriting, arguments: Mapping[str, Any]) -> str:
    match writing.arguments:
        case "json":
            return _json(arguments)
        case "tags":
            return "".join(_parameter(writing, k, v) for k, v in arguments.items())
        case "python":
            return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        case "bare":
            return ",".join(f"{k}:{_bare(writing.quote, v)}" for k, v in arguments.items())


def _parameter(writing: CallWriting, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    pattern = writing.text_parameter if is_text and writing.text_parameter else writing.parameter
    pattern = pattern.replace("{type}", json_type(value))
    before, _, after = pattern.replace("{key}", key).partition("{value}")
    return before + (value if is_text else _json(value)) + after


def json_type(value: Any) -> str:
    """What JSON calls the type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "number")


def _bare(quote: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_bare(quote, v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_bare(quote, item) for item in value) + "]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
