"""Modelfiles: the text that says what a name stands for, read and written.

An instruction and its argument are a line; an argument in three (or one) quotation marks may have
several. FROM, PARAMETER, SYSTEM, TEMPLATE, LICENSE and MESSAGE are known. ADAPTER, which would make
other weights, and any other word are refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from headrace.base.errors import InvalidRequest, Unsupported

MAX_CHARS = 1 << 20
LISTS = frozenset({"stop"})
"""Parameters that may stand there several times."""
ROLES = ("system", "user", "assistant")
_QUOTES = '"""'
_LINE = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+")
_Json = dict[str, Any]


def read_modelfile(text: str) -> _Json:
    """The fields of POST /api/create that the text stands for; InvalidRequest names the line."""
    if len(text) > MAX_CHARS:
        raise _bad(f"{len(text)} characters; {MAX_CHARS} are allowed")
    fields: _Json = {}
    for number, word, argument in _instructions(text):
        where = f"line {number}: {word}"
        match word:
            case "FROM":
                fields["from"] = argument
            case "SYSTEM" | "TEMPLATE":
                fields[word.lower()] = argument
            case "LICENSE":
                fields.setdefault("license", []).append(argument)
            case "PARAMETER":
                _add_parameter(fields.setdefault("parameters", {}), argument, where)
            case "MESSAGE":
                role, _, content = argument.partition(" ")
                if role not in ROLES or not content.strip():
                    raise _bad(f"{where}: a role ({', '.join(ROLES)}) and a text are needed")
                message = {"role": role, "content": _unquoted(content.strip())}
                fields.setdefault("messages", []).append(message)
            case "ADAPTER":
                raise Unsupported(
                    f"modelfile: {where}: adapters are loaded by the server (--lora-modules) and "
                    "asked for by their names",
                    field="modelfile",
                )
            case _:
                raise _bad(
                    f"{where} is none of FROM, PARAMETER, SYSTEM, TEMPLATE, LICENSE, MESSAGE"
                )
    if "from" not in fields:
        raise _bad("FROM is missing: name a served model")
    return fields


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, word, argument) of each instruction."""
    at, number = 0, 1
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[at:end]
        if not line.strip() or line.lstrip().startswith("#"):
            at, number = end + 1, number + 1
            continue
        match = _LINE.match(line)
        if match is None:
            raise _bad(f"line {number}: a word and an argument are needed")
        word, begin = match[1].upper(), at + match.end()
        end = _argument_end(text, begin, end, number)
        argument = text[begin:end].strip()
        yield number, word, argument if word == "MESSAGE" else _unquoted(argument)
        number += text.count("\n", at, end) + 1
        at = end + 1


def _argument_end(text: str, begin: int, line_end: int, number: int) -> int:
    """Where the argument ends that begins there: with its line, or with its quotation marks."""
    opening = text.find(_QUOTES, begin, line_end)
    if opening < 0:
        return line_end
    closing = text.find(_QUOTES, opening + len(_QUOTES))
    if closing < 0:
        raise _bad(f'line {number}: the text that """ begins has no end')
    end = text.find("\n", closing)
    return len(text) if end < 0 else end


def _unquoted(argument: str) -> str:
    for quotes in (_QUOTES, '"'):
        whole = len(argument) >= 2 * len(quotes)
        if whole and argument.startswith(quotes) and argument.endswith(quotes):
            return argument[len(quotes) : -len(quotes)]
    return argument


def _add_parameter(parameters: _Json, argument: str, where: str) -> None:
    name, _, text = argument.partition(" ")
    text = _unquoted(text.strip())
    if not text:
        raise _bad(f"{where}: a name and a value are needed")
    if name in LISTS:
        parameters.setdefault(name, []).append(text)
    else:
        parameters[name] = _value(text)


def _value(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    for read in (int, float):
        try:
            return read(text) if len(text) < 32 else text
        except ValueError:
            continue
    return text


def write_modelfile(
    base: str,
    *,
    system: str = "",
    template: str = "",
    license: tuple[str, ...] = (),
    parameters: _Json | None = None,
    messages: tuple[_Json, ...] = (),
) -> str:
    """The text for these fields: what `read_modelfile` reads, if none of them has three quotation
    marks in a row."""
    lines = [f"FROM {base}"]
    lines += [f"PARAMETER {line}" for line in parameter_lines(parameters or {})]
    lines += [f"{word} {_quoted(text)}" for word, text in (("TEMPLATE", template),) if text]
    lines += [f"SYSTEM {_quoted(system)}"] if system else []
    lines += [f"MESSAGE {one['role']} {_quoted(one['content'])}" for one in messages]
    lines += [f"LICENSE {_quoted(text)}" for text in license]
    return "\n".join(lines) + "\n"


def parameter_lines(parameters: _Json) -> list[str]:
    """A line for each value."""
    lines = []
    for name, value in parameters.items():
        for one in value if isinstance(value, list) else [value]:
            shown = str(one).lower() if isinstance(one, bool) else str(one)
            lines.append(f"{name} {_quoted(shown) if isinstance(one, str) else shown}")
    return lines


def _quoted(text: str) -> str:
    return f"{_QUOTES}{text}{_QUOTES}"


def _bad(what: str) -> InvalidRequest:
    return InvalidRequest(f"modelfile: {what}", field="modelfile")
