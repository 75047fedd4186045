"""Tool calls as a grammar: the format that the model's family writes in, with the arguments under each tool's schema.

`required` is calls and nothing else, one or more; a named tool is one call of it; with `auto` the text is free until a
call begins. The parser of the same family reads what comes out (front/text/parsing).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.base.wire.grammar import (
    Either,
    Json,
    Literal,
    Node,
    Repeat,
    Tag,
    Triggered,
    Until,
)
from headrace.base.wire.grammar import Sequence as InTurn
from headrace.front.text.parsing.families import BareTags, ToolGrammar
from headrace.front.text.parsing.tagged_json import JsonTags
from headrace.front.text.parsing.xml_parameters import ParameterTags, is_text
from headrace.front.text.structure.schema import checked_schema

MAX_CALLS = 64


def required_calls(
    tools: Sequence[Mapping[str, Any]], grammar: ToolGrammar, *, at_most_one: bool
) -> Node:
    """Calls of these tools and nothing else: one, or one and more."""
    tags = [_tag(tool, grammar, f"tools[{i}]") for i, tool in enumerate(tools)]
    one = Either(tuple(_alone(tag) for tag in tags))
    return Repeat(one, 1 if at_most_one else MAX_CALLS, _separator(grammar))


def strict_calls(tools: Sequence[Mapping[str, Any]], grammar: ToolGrammar) -> Node | None:
    """Free text in which every call obeys its tool's schema; None where calls have no tag that begins them."""
    if isinstance(grammar, BareTags):
        return None
    tags = tuple(
        _tag(tool, grammar, f"tools[{i}]", any_arguments=not _is_strict(tool))
        for i, tool in enumerate(tools)
    )
    return Triggered((grammar.open,), tags)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, Mapping) and function.get("strict") is True


def _alone(tag: Tag) -> Node:
    return InTurn((Literal(tag.begin), tag.content, Literal(tag.end)))


def _separator(grammar: ToolGrammar) -> str:
    return "; " if isinstance(grammar, BareTags) else "\n"


def _tag(
    tool: Mapping[str, Any], grammar: ToolGrammar, field: str, *, any_arguments: bool = False
) -> Tag:
    """One call of one tool; with `any_arguments` its schema is left aside."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field}.function.name: a text is needed", field=field)
    given = function.get("parameters") or {"type": "object", "properties": {}}
    where = f"{field}.function.parameters"
    schema = "{}"
    if not any_arguments:
        schema = checked_schema(given, field=where, close_objects=_is_strict(tool))
    if isinstance(grammar, JsonTags):
        begin = f'{grammar.open}\n{{"{grammar.keys.name[0]}": {_quoted(name)}, '
        begin += f'"{grammar.keys.arguments[0]}": '
        return Tag(begin, _arguments(schema), f"}}\n{grammar.close}" if grammar.close else "}")
    if isinstance(grammar, BareTags):
        key = grammar.keys.arguments[-1]
        begin = f'{{"{grammar.keys.name[0]}": {_quoted(name)}, "{key}": '
        return Tag(begin, _arguments(schema), "}")
    if isinstance(grammar, ParameterTags):
        return _with_parameters(name, None if any_arguments else schema, grammar)
    raise InvalidRequest(
        "tool_choice: calls cannot be forced in this model's format; allowed: 'none' and 'auto'",
        field="tool_choice",
    )


def _arguments(schema: str) -> Json:
    """Arguments are an object, whatever else their schema says."""
    document = json.loads(schema)
    document.setdefault("type", "object")
    return Json(json.dumps(document, ensure_ascii=False))


def _with_parameters(name: str, schema: str | None, tags: ParameterTags) -> Tag:
    """A call with a tag per parameter, in the order of the schema; those that are not required may be left out."""
    line = "\n" if tags.breaks or not tags.name_open else ""
    begin = f"{tags.open}\n{tags.name_open}{name}" if tags.name_open else f"{tags.open}{name}"
    begin += tags.name_end[0] + ("" if tags.name_end[0].endswith("\n") else line)
    end = f"{tags.function_close}\n{tags.close}" if tags.function_close else tags.close
    if schema is None:
        return Tag(begin, Until(end), "")
    document = json.loads(schema)
    definitions = {key: document[key] for key in ("$defs", "definitions") if key in document}
    required = document.get("required", [])
    items: list[Node] = []
    for key, value in document.get("properties", {}).items():
        parameter = _parameter(key, value, definitions, tags)
        items.append(parameter if key in required else Either((parameter, Literal(""))))
    return Tag(begin, InTurn(tuple(items)), end)


def _parameter(key: str, schema: Any, definitions: Mapping[str, Any], tags: ParameterTags) -> Node:
    line = "\n" if tags.breaks else ""
    begin = f"{tags.key_open}{key}{tags.key_end}"
    begin += f"\n{tags.value_open}" if tags.value_open else line
    end = line + tags.value_close
    return InTurn((Literal(begin), *_value(schema, definitions, end), Literal("\n")))


def _value(schema: Any, definitions: Mapping[str, Any], end: str) -> tuple[Node, ...]:
    """A value up to and with its closing tag: texts stand bare, everything else as JSON."""
    if not is_text(schema):
        whole = {**schema, **definitions} if isinstance(schema, dict) else schema
        return Json(json.dumps(whole, ensure_ascii=False), compact=True), Literal(end)
    if isinstance(values := schema.get("enum"), list):
        return Either(tuple(Literal(value) for value in values)), Literal(end)
    if isinstance(constant := schema.get("const"), str):
        return Literal(constant), Literal(end)
    return (Until(end),)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
