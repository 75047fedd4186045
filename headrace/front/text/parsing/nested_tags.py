"""Calls whose parameters are tags of their own name, with tags in them:
`<city>Rome</city><days><item>1</item></days>`.

Every tag begins with a mark that nothing else has, so a value is text up to the next mark. A text
goes out while it comes; any other value is put together when it is complete: tags within it are an
object, tags called item or tags of one name a list, and what is none of these the JSON or the text
it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.front.text.parsing.engine import Sink, Tags, literal, only, unmarked
from headrace.front.text.parsing.json_calls import MAX_NAME_CHARS
from headrace.front.text.parsing.literals import quoted
from headrace.front.text.parsing.reader import CallReader
from headrace.front.text.parsing.xml_parameters import Schemas, as_json, is_text

MAX_DEPTH = 32
_TEXT = "$text"


class NestedTags(msgspec.Struct, frozen=True, kw_only=True):
    """A family's tags. `mark` begins every tag; `call_open` is behind the mark of a call's tag, up
    to the name."""

    mark: str
    section_open: str
    section_close: str
    call_open: str
    section: str = "tool_call"
    call: str = "invoke"
    item: str = "item"


@dataclass
class _Value:
    """One value that is being read: its text, and what stands in tags within it."""

    key: str
    schema: Any
    text: list[str] = field(default_factory=list)
    inner: list[tuple[str, str]] = field(default_factory=list)


class NestedCalls(CallReader):
    """The state that reads content and such calls."""

    def __init__(
        self, sink: Sink, tags: NestedTags, schemas: Schemas, drop: Sequence[str] = ()
    ) -> None:
        super().__init__(sink, [tags.section_open], drop)
        self._tags = tags
        self._schemas = schemas
        self._calls = Tags([tags.call_open, tags.section_close])
        self._mark = only(tags.mark)
        self._word: list[str] = []
        self._count = 0
        self._text_close = ""
        self._parameters: Mapping[str, Any] = {}
        self._open_values: list[_Value] = []

    def end(self, rest: str) -> None:
        """An answer that ends anywhere: a call keeps the arguments that were whole, and a text as
        far as it came."""
        if self._mode == self._text:
            self._sink.arguments(quoted(rest)[1:-1])
        elif self._mode == self._name:
            self._outside.add("".join(self._raw) + rest)
        elif self._mode not in (self._member, self._tag, self._value):
            self._outside.add(rest)
        self._outside.flush()

    def _open(self, tag: str) -> None:
        self._mode = self._between

    def _between(self, text: str, at: int) -> int:
        """In the section, beside calls."""
        place, tag = self._calls.find(text, at)
        self._outside.add(text[at:place])
        if tag:
            self._word.clear()
            self._raw = [tag]
            self._mode = self._name if tag == self._tags.call_open else self._content
        return place + len(tag)

    def _name(self, text: str, at: int) -> int:
        chars_left = MAX_NAME_CHARS - sum(map(len, self._word))
        place, tag = only('">').find(text, at, chars_left)
        fits = min(place, at + chars_left)
        self._raw.append(text[at:fits])
        self._word.append(text[at:fits])
        name = "".join(self._word).strip()
        if fits < place or (tag and not name):
            self._refuse()
            return fits
        if tag:
            self._outside.call()
            self._sink.begin(name)
            self._parameters = self._schemas.get(name, {})
            self._count = 0
            self._mode = self._member
        return place + len(tag)

    def _member(self, text: str, at: int) -> int:
        """In a call, beside parameters."""
        place, mark = self._mark.find(text, at)
        self._outside.add(text[at:place])
        if mark:
            self._begin_tag()
        return place + len(mark)

    def _begin_tag(self) -> None:
        self._word.clear()
        self._mode = self._tag

    def _tag(self, text: str, at: int) -> int:
        """A tag, behind its mark; one that never ends is not one."""
        chars_left = MAX_NAME_CHARS - sum(map(len, self._word))
        place, end = only(">").find(text, at, chars_left)
        fits = min(place, at + chars_left)
        self._word.append(text[at:fits])
        if fits < place:
            self._no_tag()
            return fits
        if end:
            self._read_tag(unmarked("".join(self._word)))
        return place + len(end)

    def _read_tag(self, written: str) -> None:
        name = written.lstrip("</")
        closes = written.startswith("</")
        if closes and name in (self._tags.call, self._tags.section):
            self._end_call(name)
        elif closes and self._open_values:
            self._close_value()
        elif written.startswith("<") and not closes and len(self._open_values) < MAX_DEPTH:
            self._open_value(name.strip())
        else:
            self._word.append(">")
            self._no_tag()

    def _no_tag(self) -> None:
        written = "".join(self._word)
        if self._open_values:
            self._open_values[-1].text.append(written)
            self._mode = self._value
        else:
            self._outside.add(written)
            self._mode = self._member

    def _end_call(self, name: str) -> None:
        while self._open_values:
            self._close_value()
        self._sink.arguments("}" if self._count else "{}")
        self._sink.end()
        self._outside.call()
        self._mode = self._between if name == self._tags.call else self._content

    # values

    def _open_value(self, key: str) -> None:
        if self._open_values:
            self._open_values.append(_Value(key, self._schema_within(key)))
            self._mode = self._value
            return
        schema = self._parameters.get(key, {})
        self._outside.call()
        self._sink.arguments(("{" if not self._count else ", ") + quoted(key) + ": ")
        self._count += 1
        self._mode = self._value
        if is_text(schema):
            self._sink.arguments('"')
            self._text_close = f"</{key}>"
            self._mode = self._text
        else:
            self._open_values.append(_Value(key, schema))

    def _schema_within(self, key: str) -> Any:
        outer = self._open_values[-1].schema
        if not isinstance(outer, Mapping):
            return {}
        if key == self._tags.item and isinstance(outer.get("items"), Mapping):
            return outer["items"]
        within = outer.get("properties")
        return within.get(key, {}) if isinstance(within, Mapping) else {}

    def _text(self, text: str, at: int) -> int:
        place, mark = self._mark.find(text, at)
        self._sink.arguments(quoted(text[at:place])[1:-1])
        end = place + len(mark)
        has_close = literal(text, end, self._text_close) if mark else False
        if has_close is None:
            return place
        if has_close:
            self._sink.arguments('"')
            self._mode = self._member
        return end + (len(self._text_close) if has_close else 0)

    def _value(self, text: str, at: int) -> int:
        place, mark = self._mark.find(text, at)
        self._open_values[-1].text.append(text[at:place])
        if mark:
            self._begin_tag()
        return place + len(mark)

    def _close_value(self) -> None:
        value = self._open_values.pop()
        json_value = self._json_of(value)
        if self._open_values:
            self._open_values[-1].inner.append((value.key, json_value))
            self._mode = self._value
        else:
            self._sink.arguments(json_value)
            self._mode = self._member

    def _json_of(self, value: _Value) -> str:
        text = "".join(value.text)
        if not value.inner:
            return _leaf(text, value.schema)
        if all(key == self._tags.item for key, _ in value.inner):
            return "[" + ", ".join(json_value for _, json_value in value.inner) + "]"
        values: dict[str, list[str]] = {}
        for key, json_value in value.inner:
            values.setdefault(key, []).append(json_value)
        if text.strip():
            values[_TEXT] = [quoted(text.strip())]
        members = (
            f"{quoted(key)}: {_one_or_list(json_values)}" for key, json_values in values.items()
        )
        return "{" + ", ".join(members) + "}"


def _one_or_list(json_values: Sequence[str]) -> str:
    return json_values[0] if len(json_values) == 1 else "[" + ", ".join(json_values) + "]"


def _leaf(text: str, schema: Any) -> str:
    """A value without tags in it; nothing at all is an empty list or object where one is wanted."""
    if is_text(schema):
        return quoted(text)
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if not text.strip() and kind in ("array", "object"):
        return "[]" if kind == "array" else "{}"
    return as_json(text)
