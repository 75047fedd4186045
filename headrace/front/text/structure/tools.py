"""Tool calls as a grammar: written as the model's family writes them, with the arguments under each
tool's schema.

`required` is calls and nothing else, one or more; a named tool is one call of it; with `auto` the
text is free until a call begins. The parser of the same family reads what comes out
(front/text/parsing): where it takes tokens alone as structure, they are marked in the family's
texts, and the grammar allows nothing but the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.base.wire.grammar import (
    Either,
    Json,
    Literal,
    Node,
    Regex,
    Repeat,
    Tag,
    Token,
    Triggered,
    Until,
)
from headrace.base.wire.grammar import Sequence as InTurn
from headrace.front.text.parsing.engine import unmarked
from headrace.front.text.parsing.writing import CallWriting, json_type
from headrace.front.text.parsing.xml_parameters import is_text
from headrace.front.text.structure.schema import checked_schema
from headrace.front.text.tokenizer import CLOSE, OPEN

MAX_CALLS = 64
_BEHIND_TRIGGER = re.compile(r'\n|\[?\{"|\{name\}')
_NOTHING = Literal("")
_MARKED = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


def required_calls(
    tools: Sequence[Mapping[str, Any]], writing: CallWriting, *, at_most_one: bool
) -> Node:
    """Calls of these tools and nothing else: one, or one and more."""
    calls = [_call(tool, writing, f"tools[{i}]") for i, tool in enumerate(tools)]
    repeated = _repeated(calls, 1 if at_most_one else MAX_CALLS, writing.between)
    return InTurn((*_said(writing.begin), repeated, *_said(writing.end)))


def strict_calls(tools: Sequence[Mapping[str, Any]], writing: CallWriting) -> Node | None:
    """Free text in which every call of a strict tool obeys its schema; None where no text tells
    that a call begins."""
    whole = unmarked(writing.begin + writing.call_begin)
    trigger = _BEHIND_TRIGGER.split(whole, maxsplit=1)[0]
    if not any(character.isalpha() for character in trigger):
        return None
    calls = tuple(
        _call(tool, writing, f"tools[{i}]", any_arguments=not _is_strict(tool))
        for i, tool in enumerate(tools)
    )
    if writing.begin:
        inside = _repeated(calls, MAX_CALLS, writing.between)
        calls = (InTurn((*_said(writing.begin), inside, *_said(writing.end))),)
        trigger = trigger[: len(unmarked(writing.begin))]
    return Triggered((trigger,), tuple(_as_tag(call, trigger) for call in calls))


def _as_tag(call: InTurn, trigger: str) -> Tag:
    """A call as a tag: it begins with the trigger, and with the text that follows it there."""
    items, left = list(call.items), trigger
    while left:
        first = items.pop(0)
        assert isinstance(first, Literal | Token), first
        over = first.text.removeprefix(left)
        if over == first.text:
            assert left.startswith(first.text), (left, first)
            left = left.removeprefix(first.text)
        else:
            left = ""
            items[:0] = [Literal(over)] if over else []
    behind = items[0] if items else _NOTHING
    if isinstance(behind, Literal):
        return Tag(trigger + behind.text, InTurn(tuple(items[1:])), "")
    return Tag(trigger, InTurn(tuple(items)), "")


def _repeated(calls: Sequence[Node], most: int, between: str) -> Node:
    """One call and more, at most `most`."""
    call = Either(tuple(calls))
    if between == unmarked(between):
        return Repeat(call, most, between)
    further = Repeat(InTurn((*_said(between), call)), max(1, most - 1))
    return call if most == 1 else InTurn((call, Either((further, _NOTHING))))


def _said(template: str, **values: str) -> tuple[Literal | Token, ...]:
    """A text of the family's with the values in it; of its control tokens, the tokens."""
    literals: list[Literal | Token] = []
    for index, part in enumerate(_MARKED.split(template)):
        if index % 2:
            literals.append(Token(part))
            continue
        for name, value in values.items():
            part = part.replace("{" + name + "}", value)
        literals += [Literal(part)] if part else []
    return tuple(literals) or (_NOTHING,)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, Mapping) and function.get("strict") is True


def _call(
    tool: Mapping[str, Any], writing: CallWriting, field: str, *, any_arguments: bool = False
) -> InTurn:
    """One call of one tool; with `any_arguments` its schema is left aside."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field}.function.name: a text is needed", field=field)
    begin, end = _filled(writing.call_begin, name), _filled(writing.call_end, name)
    if any_arguments:
        if writing.arguments != "json":
            last = end[-1].text if isinstance(end[-1], Literal | Token) else ""
            return InTurn((*begin, Until(last)))
        return InTurn((*begin, Json('{"type": "object"}'), *end))
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    where = f"{field}.function.parameters"
    schema = checked_schema(parameters, field=where, close_objects=_is_strict(tool))
    document = json.loads(schema)
    document.setdefault("type", "object")
    if writing.arguments == "json":
        return InTurn((*begin, Json(json.dumps(document, ensure_ascii=False)), *end))
    return InTurn((*begin, *_Parameters(writing, document).nodes(), *end))


def _filled(template: str, name: str) -> tuple[Node, ...]:
    """A template with the name in it; a call's number is any."""
    first, *others = template.split("{n}")
    nodes: list[Node] = [*_said(first, name=name)]
    for part in others:
        nodes += [Regex("[0-9]{1,3}"), *_said(part, name=name)]
    return tuple(nodes)


_TYPES = ("string", "number", "boolean", "null", "object", "array")


def _by_type(schema: Any) -> dict[str, Any]:
    """What a schema allows, by what JSON calls its types."""
    if not isinstance(schema, Mapping):
        return {kind: {"type": kind} for kind in _TYPES}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        kinds = dict.fromkeys(json_type(value) for value in values)
        return {kind: {"enum": [v for v in values if json_type(v) == kind]} for kind in kinds}
    stated = schema.get("type", list(_TYPES))
    stated = [stated] if isinstance(stated, str) else stated
    kinds = {("number" if kind == "integer" else kind): kind for kind in stated}
    return {name: {**schema, "type": kind} for name, kind in kinds.items()}


class _Parameters:
    """Arguments written one by one, in the order of the schema; those that are not required may be
    left out."""

    def __init__(self, writing: CallWriting, schema: Mapping[str, Any]) -> None:
        self._writing = writing
        self._required = schema.get("required", [])
        self._properties: Mapping[str, Any] = schema.get("properties", {})
        self._definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    def nodes(self) -> tuple[Node, ...]:
        """The arguments in turn."""
        if self._writing.arguments == "tags":
            return tuple(
                self._maybe(key, self._tagged(key, schema))
                for key, schema in self._properties.items()
            )
        return self._with_commas()

    def _maybe(self, key: str, node: Node) -> Node:
        return node if key in self._required else Either((node, _NOTHING))

    def _tagged(self, key: str, schema: Any) -> Node:
        text = is_text(schema)
        template = self._writing.parameter
        if text:
            template = (self._writing.text_parameter or template).replace("{type}", "string")
        begin, _, end = template.partition("{value}")
        if text:
            return InTurn((*_said(begin, key=key), *self._text(schema, end, key)))
        if "{type}" not in begin:
            return InTurn((*_said(begin, key=key), self._json(schema), *_said(end, key=key)))
        typed = tuple(
            InTurn((*_said(begin, key=key, type=kind), *self._stated(kind, one, end, key)))
            for kind, one in _by_type(schema).items()
        )
        return Either(typed) if len(typed) > 1 else typed[0]

    def _stated(self, kind: str, schema: Mapping[str, Any], end: str, key: str) -> tuple[Node, ...]:
        """A value behind its type: a text as it is, anything else in JSON."""
        if kind == "string":
            return self._text(schema, end, key)
        return self._json(schema), *_said(end, key=key)

    def _text(self, schema: Mapping[str, Any], end: str, key: str) -> tuple[Node, ...]:
        """A text as it is, up to and with what ends it."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if values and all(isinstance(value, str) for value in values):
            return Either(tuple(Literal(value) for value in values)), *_said(end, key=key)
        return (Until(unmarked(end).replace("{key}", key)),)

    def _with_commas(self) -> tuple[Node, ...]:
        """Required ones first, then the others; a comma between any two."""
        keys = sorted(self._properties, key=lambda key: key not in self._required)
        assigned = [self._assigned(key, self._properties[key]) for key in keys]
        count = sum(key in self._required for key in keys)
        comma = Literal("," if self._writing.arguments == "bare" else ", ")
        tail: Node = _NOTHING
        for node in reversed(assigned[max(count, 1) :]):
            tail = InTurn((Either((InTurn((comma, node)), _NOTHING)), tail))
        if not assigned:
            return ()
        first: list[Node] = [assigned[0]]
        for node in assigned[1:count]:
            first += [comma, node]
        whole = InTurn((*first, tail))
        return (whole,) if count else (Either((whole, _NOTHING)),)

    def _assigned(self, key: str, schema: Any) -> Node:
        quote = self._writing.quote
        if self._writing.arguments == "bare":
            begin = Literal(f"{key}:")
            if is_text(schema):
                return InTurn((begin, *_said(quote), *self._text(schema, quote, "")))
            return InTurn((begin, self._json(schema)))
        begin = Literal(f"{key}=")
        if isinstance(schema, Mapping) and schema.get("type") == "boolean":
            return InTurn((begin, Either((Literal("True"), Literal("False")))))
        return InTurn((begin, self._json(schema)))

    def _json(self, schema: Any) -> Json:
        whole = {**schema, **self._definitions} if isinstance(schema, dict) else {}
        return Json(json.dumps(whole, ensure_ascii=False), compact=True)
