"""API-24: whatever the schema, an answer that ends is JSON that it allows."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequest
from headrace.base.wire.grammar import Json
from headrace.core.grammar.hook import GrammarHook
from headrace.front.text.structure.formats import PATTERNS
from headrace.front.text.structure.schema import checked_schema
from tests.core.grammar.constrained import (
    BACKENDS,
    GrammarDriver,
    constrained,
    shared_hook,
)

NAMES = st.sampled_from(["a", "b", "ключ", "a b", 'q"uote', "$ref", "title"])
CONSTANTS = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.text(max_size=6), st.just({"x": [1, "y"]})
)
LEAVES = st.one_of(
    st.builds(lambda n, m: {"type": "string", "minLength": n, "maxLength": n + m},
              st.integers(0, 3), st.integers(0, 6)),
    st.just({"type": "string", "pattern": "^[a-z]{2,4}[0-9]?$"}),
    st.sampled_from([{"type": "string", "format": f} for f in ("date", "ipv4", "uuid", "path")]),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
              st.integers(-50, 50), st.integers(0, 500)),
    st.just({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    st.just({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
    st.builds(lambda values: {"enum": values}, st.lists(CONSTANTS, min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, CONSTANTS),
    st.just({"type": ["boolean", "null"]}),
)  # fmt: skip


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def make(properties: dict[str, Any], keep: int, closed: bool, maximum: int) -> dict[str, Any]:
        required = sorted(properties)[:keep]
        made = {"type": "object", "properties": properties, "required": required}
        return {**made, "additionalProperties": False} if closed else made

    return st.builds(
        make, st.dictionaries(NAMES, inner, max_size=4), st.integers(0, 4), st.booleans(),
        st.integers(1, 4),
    )  # fmt: skip


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda item, low, size: {
            "type": "array", "items": item, "minItems": low, "maxItems": low + size,
        },
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module", params=BACKENDS)
def hook(request: pytest.FixtureRequest) -> GrammarHook:
    return shared_hook(request.param)


def check(hook: GrammarHook, schema: dict[str, Any], seed: int, compact: bool) -> str:
    driver = GrammarDriver(hook=hook)
    node = Json(checked_schema(schema, field="json"), compact=compact)
    text, end = driver.run_one(constrained(seed, node, max_tokens=250))
    if end.reason == "stop":
        jsonschema.validate(json.loads(text), schema)
    elif end.reason == "error":
        assert end.error is not None and end.error.kind == "InvalidRequest", end.error
    else:
        assert end.reason == "length"
    return end.reason


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schema=SCHEMAS, seed=st.integers(1, 1 << 20), compact=st.booleans())
def test_every_answer_under_a_schema_validates(
    hook: GrammarHook, schema: dict[str, Any], seed: int, compact: bool
) -> None:
    check(hook, schema, seed, compact)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # four minutes of processor time, in wall time by the load
@settings(
    max_examples=10_000,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schema=SCHEMAS, seed=st.integers(1, 1 << 20), compact=st.booleans())
def test_every_answer_under_ten_thousand_schemas_validates(
    hook: GrammarHook, schema: dict[str, Any], seed: int, compact: bool
) -> None:
    check(hook, schema, seed, compact)


@pytest.mark.parametrize("text", ["\x800x", "\\x80", "\u08000", "a\\", "\U0001f600f"])
def test_a_constant_is_itself_whatever_stands_behind_its_characters(
    hook: GrammarHook, text: str
) -> None:
    assert check(hook, {"const": text}, 7, True) == "stop"


def test_an_optional_group_is_there_as_a_whole_or_not(hook: GrammarHook) -> None:
    """xgrammar took each part of it for optional: "x12"."""
    schema = {"type": "string", "pattern": "^x(?:[.][0-9]{1,3})?Z$"}
    for seed in range(1, 9):
        assert check(hook, schema, seed, True) == "stop"


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_times_exist(hook: GrammarHook, name: str) -> None:
    driver = GrammarDriver(hook=hook)
    node = Json(checked_schema({"type": "string", "format": name}, field="json"), compact=True)
    for text, end in driver.run_all([constrained(seed, node) for seed in range(1, 6)]):
        assert end.reason == "stop" and re.search(PATTERNS[name], json.loads(text)), text


def test_most_answers_come_to_their_end(hook: GrammarHook) -> None:
    """Or else the property would hold of nothing."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    reasons = [check(hook, schema, seed, True) for seed in range(1, 11)]
    assert reasons == ["stop"] * 10


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "enum", "required", "anyOf", "pattern", "$ref",
                 "minLength", "additionalProperties", "const", "format", "allOf", "oneOf", "not",
                 "minimum", "multipleOf", "$defs", "prefixItems", "maxItems"]
            ),
            st.one_of(inner, st.sampled_from(["string", "object", "integer", "array"])),
            max_size=4,
        ),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(document=JSON)
def test_what_is_no_schema_is_refused_and_breaks_nothing(hook: GrammarHook, document: Any) -> None:
    """CVE-2025-48942: a bad schema is its sender's error, in the front or in the compiler."""
    try:
        schema = checked_schema(document, field="json")
    except InvalidRequest as refused:
        assert refused.field == "json" and refused.message.startswith("json")
        return
    driver = GrammarDriver(hook=hook)
    _, end = driver.run_one(constrained(1, Json(schema), max_tokens=12))
    assert end.error is None or end.error.kind == "InvalidRequest", (document, end.error)


def test_a_text_of_one_character_holds_no_control_character(hook: GrammarHook) -> None:
    """The library inlines what stands between the quotation marks, and allows them there."""
    schema = {"type": "array", "minItems": 1, "maxItems": 3,
              "items": {"type": "string", "minLength": 1, "maxLength": 1}}  # fmt: skip
    for seed in (1355, 1, 2, 3):
        check(hook, schema, seed, False)
