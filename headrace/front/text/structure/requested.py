"""From `StructuredOutputs` to a node: exactly one kind, every size checked before work."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.base.wire.grammar import (
    Ebnf,
    Either,
    Json,
    Lark,
    Literal,
    Node,
    Regex,
    StructuredOutputs,
)
from headrace.front.text.structure.regex import portable
from headrace.front.text.structure.schema import MAX_SCHEMA_BYTES, check_size, checked_schema
from headrace.front.text.structure.structural_tag import structural_tag

MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 4096
MAX_REGEX_CHARS = 8192
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_FORM_BYTES = 4 * MAX_SCHEMA_BYTES
"""What may be said of an answer's form at all."""
FORM_FIELDS = (
    *("response_format", "structured_outputs", "guided_json", "guided_choice", "guided_regex"),
    *("guided_grammar", "text", "output_config"),
)
"""Where requests of all dialects say what an answer must look like."""
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def check_form_sizes(document: dict[str, Any]) -> None:
    """Refuses a request of any dialect by the size of the form it asks for, before it is a request
    of any."""
    for field in FORM_FIELDS:
        value = document.get(field)
        if isinstance(value, dict | list):
            check_size(value, field=field, most=MAX_FORM_BYTES)


def node_of(asked: StructuredOutputs, *, field: str = "structured_outputs") -> Node:
    """The node; InvalidRequest if not exactly one kind is asked for, or it is malformed or too
    large."""
    kinds = [kind for kind in KINDS if getattr(asked, kind) not in (None, False)]
    if len(kinds) != 1:
        listed = " and ".join(kinds) or "none"
        raise InvalidRequest(
            f"{field}: exactly one of {', '.join(KINDS)} is needed; got {listed}", field=field
        )
    where = f"{field}.{kinds[0]}" if field == "structured_outputs" else field
    if asked.json is not None or asked.json_object:
        return _json(asked, where)
    if asked.regex is not None:
        return Regex(portable(_text(asked.regex, where, MAX_REGEX_CHARS)))
    if asked.choice is not None:
        return _choice(asked.choice, where)
    if asked.grammar is not None:
        return _grammar(_text(asked.grammar, where, MAX_GRAMMAR_CHARS))
    return structural_tag(asked.structural_tag, field=where)


def _json(asked: StructuredOutputs, field: str) -> Json:
    schema = '{"type":"object"}'
    if asked.json is not None:
        close = bool(asked.disable_additional_properties)
        schema = checked_schema(asked.json, field=field, close_objects=close)
    whitespace = asked.whitespace_pattern
    if whitespace is not None:
        where = f"{field.split('.')[0]}.whitespace_pattern"
        _text(whitespace, where, 256)
        if asked.disable_any_whitespace:
            raise InvalidRequest(f"{where}: excludes disable_any_whitespace", field=where)
    return Json(schema, compact=bool(asked.disable_any_whitespace), whitespace=whitespace)


def _choice(choices: Any, field: str) -> Node:
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"{field}: {len(choices)} choices; {MAX_CHOICES} allowed", field=field)
    if not choices:
        raise InvalidRequest(f"{field}: an empty list; at least one choice is needed", field=field)
    check_size(list(choices), field=field, most=MAX_FORM_BYTES)
    return Either(tuple(Literal(_text(choice, field, MAX_CHOICE_CHARS)) for choice in choices))


def _grammar(text: str) -> Node:
    """GBNF defines with `::=`, Lark with `:`."""
    return Ebnf(text) if "::=" in text else Lark(text)


def _text(text: Any, field: str, most: int) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= most:
        raise InvalidRequest(f"{field}: must be a text of 1 to {most} characters", field=field)
    return text
