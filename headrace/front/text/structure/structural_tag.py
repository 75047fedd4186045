"""Structural tags: free text in which certain texts must be followed by something of a certain
form.

Two spellings are understood: `{"type": "structural_tag", "structures": [{begin, schema, end}],
"triggers": [...]}` and the newer `{"type": "structural_tag", "format": {...}}` with formats that
nest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
    Repeat,
    Sequence,
    Tag,
    Triggered,
)
from headrace.front.text.structure.regex import portable
from headrace.front.text.structure.schema import MAX_SCHEMA_BYTES, check_size, checked_schema

MAX_TAGS = 1024
ANY_TEXT = r"(.|\n)*"


def structural_tag(tag_source: Any, *, field: str) -> Node:
    """The node of a structural tag, given as an object or as its JSON text."""
    if isinstance(tag_source, str):
        try:
            tag_source = json.loads(tag_source)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{field}: the text is not JSON", field=field) from None
    if not isinstance(tag_source, dict):
        raise InvalidRequest(f"{field}: must be an object", field=field)
    check_size(tag_source, field=field, most=4 * MAX_SCHEMA_BYTES)
    reader = _Reader(field)
    if "format" in tag_source:
        return reader.format(tag_source["format"], f"{field}.format")
    return reader.legacy(tag_source)


class _Reader:
    """Reads one structural tag; messages name the place by its path."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._formats: Mapping[str, Callable[[dict[str, Any], str], Node]] = {
            "const_string": lambda source, at: Literal(self._text(source, "value", at)),
            "json_schema": lambda source, at: self._json(source, "json_schema", at),
            "regex": lambda source, at: Regex(portable(self._text(source, "pattern", at))),
            "grammar": self._grammar,
            "any_text": lambda source, at: Regex(ANY_TEXT),
            "sequence": lambda source, at: Sequence(self._elements(source, at)),
            "or": lambda source, at: Either(self._elements(source, at)),
            "tag": self._tag_alone,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def legacy(self, source: dict[str, Any]) -> Node:
        """`structures` and `triggers`."""
        structures, triggers = source.get("structures"), source.get("triggers")
        self._need(isinstance(structures, list), "structures", "must be a list")
        self._need(isinstance(triggers, list) and bool(triggers), "triggers", "must be a list")
        tags = [
            Tag(
                self._text(one, "begin", f"structures[{i}]"),
                self._json(one, "schema", f"structures[{i}]"),
                self._text(one, "end", f"structures[{i}]", empty=True),
            )
            for i, one in enumerate(self._objects(structures, "structures"))
        ]
        return self._with_triggers(tags, triggers, "triggers")

    def format(self, source: Any, at: str) -> Node:
        """One format."""
        self._need(isinstance(source, dict), at, "must be an object")
        kind = source.get("type")
        reader = self._formats.get(kind) if isinstance(kind, str) else None
        if reader is None:
            known = ", ".join(self._formats)
            raise self._wrong(f"{at}.type", f"{str(kind)[:40]!r} is none of {known}")
        return reader(source, at)

    def _tag(self, source: Any, at: str) -> Tag:
        self._need(isinstance(source, dict), at, "must be an object")
        content = self.format(source.get("content"), f"{at}.content")
        end = self._text(source, "end", at, empty=True)
        return Tag(self._text(source, "begin", at), content, end)

    def _tag_alone(self, source: dict[str, Any], at: str) -> Node:
        tag = self._tag(source, at)
        return Sequence((Literal(tag.begin), tag.content, Literal(tag.end)))

    def _tags(self, source: dict[str, Any], at: str) -> list[Tag]:
        tags = self._objects(source.get("tags"), f"{at}.tags")
        return [self._tag(tag, f"{at}.tags[{i}]") for i, tag in enumerate(tags)]

    def _triggered(self, source: dict[str, Any], at: str) -> Node:
        node = self._with_triggers(self._tags(source, at), source.get("triggers"), f"{at}.triggers")
        return Triggered(
            node.triggers,
            node.tags,
            at_least_one=bool(source.get("at_least_one")),
            stop_after_first=bool(source.get("stop_after_first")),
        )

    def _separated(self, source: dict[str, Any], at: str) -> Node:
        tags = self._tags(source, at)
        items = [Sequence((Literal(t.begin), t.content, Literal(t.end))) for t in tags]
        separator = self._text(source, "separator", at, empty=True)
        most = 1 if source.get("stop_after_first") else None
        repeated = Repeat(Either(tuple(items)), most, separator)
        return repeated if source.get("at_least_one") else Either((repeated, Literal("")))

    def _with_triggers(self, tags: list[Tag], triggers: Any, at: str) -> Triggered:
        texts = isinstance(triggers, list) and all(isinstance(t, str) and t for t in triggers)
        self._need(texts and bool(triggers), at, "must be a list of texts")
        for tag in tags:
            if not any(tag.begin.startswith(trigger) for trigger in triggers):
                raise self._wrong(at, f"none begins the tag {tag.begin[:80]!r}")
        self._need(bool(tags), at, "there is no tag")
        return Triggered(tuple(triggers), tuple(tags))

    def _elements(self, source: dict[str, Any], at: str) -> tuple[Node, ...]:
        elements = source.get("elements")
        self._need(
            isinstance(elements, list) and bool(elements), f"{at}.elements", "must be a list"
        )
        return tuple(
            self.format(one, f"{at}.elements[{i}]") for i, one in enumerate(elements or [])
        )

    def _json(self, source: dict[str, Any], name: str, at: str) -> Json:
        return Json(checked_schema(source.get(name), field=f"{at}.{name}"))

    def _grammar(self, source: dict[str, Any], at: str) -> Node:
        text = self._text(source, "grammar", at)
        return Ebnf(text) if "::=" in text else Lark(text)

    def _objects(self, source: Any, at: str) -> list[dict[str, Any]]:
        right = isinstance(source, list) and all(isinstance(one, dict) for one in source)
        self._need(right and len(source) <= MAX_TAGS, at, f"a list of 1 to {MAX_TAGS} objects")
        objects: list[dict[str, Any]] = source
        return objects

    def _text(self, source: dict[str, Any], name: str, at: str, *, empty: bool = False) -> str:
        text = source.get(name)
        if not isinstance(text, str) or not (text or empty):
            raise self._wrong(f"{at}.{name}", "must be a text")
        return text

    def _need(self, right: bool, at: str, what: str) -> None:
        if not right:
            raise self._wrong(at, what)

    def _wrong(self, at: str, what: str) -> InvalidRequest:
        return InvalidRequest(f"{at}: {what}", field=self._field)
