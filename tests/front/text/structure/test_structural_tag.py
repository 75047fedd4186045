"""Both spellings of a structural tag become nodes; what is wrong is named by its path (API-24)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.base.errors import InvalidRequest
from headrace.base.wire.grammar import (
    Ebnf,
    Either,
    Json,
    Lark,
    Literal,
    Node,
    Regex,
    Repeat,
    Sequence,
    Tag,
    Triggered,
)
from headrace.front.text.structure.structural_tag import ANY_TEXT, MAX_TAGS, structural_tag

CALL = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"}
TAG = Tag("<f>", Json("{}"), "</f>")
ALONE = Sequence((Literal("<f>"), Json("{}"), Literal("</f>")))
FORMATS: list[tuple[dict[str, Any], Node]] = [
    ({"type": "const_string", "value": "x"}, Literal("x")),
    ({"type": "json_schema", "json_schema": {"type": "null"}}, Json('{"type": "null"}')),
    ({"type": "regex", "pattern": "a+"}, Regex("a+")),
    ({"type": "grammar", "grammar": 'root ::= "a"'}, Ebnf('root ::= "a"')),
    ({"type": "grammar", "grammar": 'start: "a"'}, Lark('start: "a"')),
    ({"type": "any_text"}, Regex(ANY_TEXT)),
    ({"type": "sequence", "elements": [{"type": "const_string", "value": "x"}]}, Sequence((Literal("x"),))),
    ({"type": "or", "elements": [{"type": "regex", "pattern": "a"}, {"type": "regex", "pattern": "b"}]},
     Either((Regex("a"), Regex("b")))),
    ({"type": "tag", **CALL}, ALONE),
    ({"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL], "at_least_one": True},
     Triggered(("<f",), (TAG,), at_least_one=True)),
    ({"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL], "stop_after_first": True},
     Triggered(("<f",), (TAG,), stop_after_first=True)),
    ({"type": "tags_with_separator", "tags": [CALL], "separator": ",", "at_least_one": True},
     Repeat(Either((ALONE,)), None, ",")),
    ({"type": "tags_with_separator", "tags": [CALL], "separator": "", "stop_after_first": True},
     Either((Repeat(Either((ALONE,)), 1, ""), Literal("")))),
]  # fmt: skip


@pytest.mark.parametrize(("given", "node"), FORMATS, ids=lambda value: str(value)[:40])
def test_every_format_becomes_its_node(given: dict[str, Any], node: Node) -> None:
    whole = {"type": "structural_tag", "format": given}
    assert structural_tag(whole, field="f") == node
    assert structural_tag(json.dumps(whole), field="f") == node


def test_the_older_spelling_says_the_same() -> None:
    given = {
        "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    assert structural_tag(given, field="f") == Triggered(("<f",), (TAG,))


WRONG: list[tuple[Any, str]] = [
    ("{", "f: the text is not JSON"),
    ([], "f: must be an object"),
    ({}, "structures: must be a list"),
    ({"structures": [], "triggers": []}, "triggers: must be a list"),
    ({"structures": [], "triggers": ["<"]}, "triggers: there is no tag"),
    ({"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["["]}, "none begins the tag '<f>'"),
    ({"structures": [{"begin": "<f>", "schema": 1, "end": ""}], "triggers": ["<"]}, "structures[0].schema"),
    ({"format": {"type": "magic"}}, "f.format.type: 'magic' is none of const_string"),
    ({"format": {"type": ["regex"]}}, "f.format.type"),
    ({"format": {"type": "regex"}}, "f.format.pattern: must be a text"),
    ({"format": {"type": "or", "elements": []}}, "f.format.elements: must be a list"),
    ({"format": {"type": "sequence", "elements": [{"type": "tag", "begin": "<"}]}}, "f.format.elements[0].content"),
    ({"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [CALL] * (MAX_TAGS + 1)}}, "1024"),
    ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "f.format.json_schema:/not"),
    ({"format": {"type": "const_string", "value": "x" * (600 * 1024)}}, "more than 524288 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named_by_its_path(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        structural_tag(given, field="f")
    assert words in refused.value.message


def test_deep_nesting_is_refused_without_recursion() -> None:
    format: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(5000):
        format = {"type": "sequence", "elements": [format]}
    with pytest.raises(InvalidRequest, match="64 levels"):
        structural_tag({"format": format}, field="f")
