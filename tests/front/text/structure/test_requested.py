"""Every bound of what a request may ask of its answer's form: at the bound it is taken, one beyond it is refused by the
field's name, with the limit, before anything is compiled (API-24, P12)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headrace.base.errors import InvalidRequest
from headrace.base.wire.grammar import Either, Json, Lark, Literal, Regex, StructuredOutputs
from headrace.front.text.structure.requested import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_REGEX_CHARS,
    node_of,
)
from headrace.front.text.structure.schema import (
    MAX_DEPTH,
    MAX_NAME_CHARS,
    MAX_PATTERN_CHARS,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMAS,
    MAX_VALUES,
    checked_schema,
)


def asked(**fields: Any) -> StructuredOutputs:
    return msgspec.convert(fields, StructuredOutputs)


def nested(levels: int) -> dict[str, Any]:
    """Objects in objects, `levels` deep in all."""
    schema: dict[str, Any] = {}
    for _ in range((levels - 1) // 2):
        schema = {"items": {"items": schema}}
    return schema if levels % 2 else {"items": schema}


def of_bytes(count: int) -> dict[str, Any]:
    """A schema that counts as so many bytes."""
    return {"description": "x" * (count - len("description") - 4)}


AT_THE_BOUND: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("choice", {"choice": ["a"] * MAX_CHOICES}, {"choice": ["a"] * (MAX_CHOICES + 1)}, "4096"),
    ("choice", {"choice": ["a" * MAX_CHOICE_CHARS]}, {"choice": ["a" * (MAX_CHOICE_CHARS + 1)]}, "4096"),
    ("choice", {"choice": ["a"]}, {"choice": []}, "at least one"),
    ("choice", {"choice": ["a"]}, {"choice": [""]}, "1 to"),
    ("regex", {"regex": "a" * MAX_REGEX_CHARS}, {"regex": "a" * (MAX_REGEX_CHARS + 1)}, "8192"),
    ("regex", {"regex": "a"}, {"regex": ""}, "1 to"),
    ("grammar", {"grammar": "x" * MAX_GRAMMAR_CHARS}, {"grammar": "x" * (MAX_GRAMMAR_CHARS + 1)}, "65536"),
    ("json", {"json": of_bytes(MAX_SCHEMA_BYTES)}, {"json": of_bytes(MAX_SCHEMA_BYTES + 1)}, "131072"),
    ("json", {"json": "{}"}, {"json": "{" + " " * MAX_SCHEMA_BYTES + "}"}, "131072"),
    ("json", {"json": nested(MAX_DEPTH)}, {"json": nested(MAX_DEPTH + 2)}, "64 levels"),
    ("json", {"json": {"anyOf": [{}] * (MAX_SCHEMAS - 1)}}, {"json": {"anyOf": [{}] * MAX_SCHEMAS}}, "4096 schemas"),
    ("json", {"json": {"enum": [1] * MAX_VALUES}}, {"json": {"enum": [1] * (MAX_VALUES + 1)}}, "4096 values"),
    ("json", {"json": {"pattern": "a" * MAX_PATTERN_CHARS}},
     {"json": {"pattern": "a" * (MAX_PATTERN_CHARS + 1)}}, "4096"),
    ("json", {"json": {"properties": {"a" * MAX_NAME_CHARS: {}}}},
     {"json": {"properties": {"a" * (MAX_NAME_CHARS + 1): {}}}}, "256"),
    ("whitespace_pattern", {"json": {}, "whitespace_pattern": "a" * 256},
     {"json": {}, "whitespace_pattern": "a" * 257}, "256"),
    ("whitespace_pattern", {"json": {}, "whitespace_pattern": " ?"},
     {"json": {}, "whitespace_pattern": " ?", "disable_any_whitespace": True}, "excludes disable_any_whitespace"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "right", "wrong", "words"), AT_THE_BOUND)
def test_a_bound_is_held_and_named(
    name: str, right: dict[str, Any], wrong: dict[str, Any], words: str
) -> None:
    node_of(asked(**right))
    with pytest.raises(InvalidRequest) as refused:
        node_of(asked(**wrong))
    error = refused.value
    assert words in error.message and error.field is not None
    assert error.field.startswith(f"structured_outputs.{name}")
    assert error.message.startswith(error.field), error.message
    assert len(error.message) < 400


def test_the_same_bound_is_named_by_the_field_as_sent() -> None:
    with pytest.raises(InvalidRequest) as refused:
        node_of(asked(regex="a" * 9000), field="guided_regex")
    assert refused.value.field == "guided_regex"


@pytest.mark.parametrize("given", [{}, {"regex": "a", "choice": ["b"]}, {"json_object": False}])
def test_exactly_one_kind_is_asked_for(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="exactly one of json, json_object, regex, choice"):
        node_of(asked(**given))


def test_what_shapes_the_white_space_and_the_properties_arrives() -> None:
    closed = {"type": "object", "properties": {"a": {"properties": {"b": {}}}, "c": {}}}
    node = node_of(asked(json=closed, disable_additional_properties=True))
    assert isinstance(node, Json)
    schema = json.loads(node.schema)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["a"]["additionalProperties"] is False
    assert "additionalProperties" not in schema["properties"]["c"], "no properties are named there"
    stated = {"properties": {"a": {}}, "additionalProperties": True}
    kept = node_of(asked(json=stated, disable_additional_properties=True))
    assert isinstance(kept, Json) and json.loads(kept.schema)["additionalProperties"] is True
    assert node_of(asked(json={}, whitespace_pattern=r"\s?")) == Json("{}", whitespace=r"\s?")
    assert node_of(asked(json={}, disable_any_whitespace=True)) == Json("{}", compact=True)


def test_each_kind_becomes_its_node() -> None:
    assert node_of(asked(choice=["a", "b"])) == Either((Literal("a"), Literal("b")))
    assert node_of(asked(regex="a+")) == Regex("a+")
    assert isinstance(node_of(asked(grammar='start: "a"')), Lark)
    assert node_of(asked(json_object=True)) == Json('{"type":"object"}')
    assert node_of(asked(json=True)) == Json("{}")


@pytest.mark.parametrize("keyword", ["not", "if", "contains", "dependentRequired", "$dynamicRef"])
def test_what_the_grammar_cannot_hold_is_refused_where_it_stands(keyword: str) -> None:
    schema = {"properties": {"a/b": {"items": [{keyword: {}}]}}}
    with pytest.raises(InvalidRequest) as refused:
        checked_schema(schema, field="response_format.json_schema.schema")
    assert f":/properties/a~1b/items/0/{keyword}: " in refused.value.message
    assert refused.value.field == "response_format.json_schema.schema"


@pytest.mark.parametrize("reference", ["http://example.com/s", "other.json", "../x#", 3])
def test_no_reference_leads_out_of_the_schema(reference: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"/\$ref: only references into this schema"):
        checked_schema({"$ref": reference}, field="json")


def test_annotations_do_not_reach_the_compiler() -> None:
    given = {"title": "T", "x-guidance": {"lenient": True}, "properties": {"title": {"default": 1}}}
    assert json.loads(checked_schema(given, field="json")) == {"properties": {"title": {}}}
