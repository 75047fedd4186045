"""Calls with a tag per parameter:
`<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

A value is text; the tool's schema says what it stands for. Texts go out while they come; any other
value waits until it is complete and goes out as the JSON it is, or, if it is none, as a text.
Nothing is ever evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.front.text.parsing.engine import Sink, Tags, literal, only, skip_space
from headrace.front.text.parsing.json_calls import MAX_NAME_CHARS
from headrace.front.text.parsing.literals import quoted
from headrace.front.text.parsing.reader import CallReader

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters of each tool: name of the function -> name of the parameter -> its JSON schema."""


class ParameterTags(msgspec.Struct, frozen=True, kw_only=True):
    """A family's tags. An empty `name_open` or `value_open` is not written; `name_rest` ends what
    follows a name and says nothing; `breaks`: a line break after the opening and before the closing
    tag of a value belongs to the tags. `key_end_text` and `key_end_json` end a key where the model
    says itself whether the value is a text; between `verbatim` (two tags) a value may hold any
    text; `drop` are tags around calls."""

    open: str
    close: str
    name_open: str
    name_end: tuple[str, ...]
    name_rest: str = ""
    function_close: str
    key_open: str
    key_end: str
    value_open: str = ""
    value_close: str
    breaks: bool = False
    key_end_text: str = ""
    key_end_json: tuple[str, ...] = ()
    verbatim: tuple[str, str] | None = None
    drop: tuple[str, ...] = ()


class XmlParameters(CallReader):
    """The state that reads content and calls with tagged parameters."""

    def __init__(
        self, sink: Sink, tags: ParameterTags, schemas: Schemas, drop: Sequence[str] = ()
    ) -> None:
        super().__init__(sink, [tags.open], [*tags.drop, *drop])
        self._tags = tags
        self._schemas = schemas
        ends = [tags.close, *([tags.function_close] if tags.function_close else [])]
        self._members = Tags([tags.key_open, *ends])
        self._functions = Tags([tags.close, *([tags.name_open] if tags.name_open else [])])
        self._name_ends = Tags(
            [*tags.name_end, *([] if tags.name_open else [tags.key_open, tags.close])]
        )
        stated = [tags.key_end_text] if tags.key_end_text else []
        self._key_ends = Tags([tags.key_end, *stated, *tags.key_end_json])
        closing = [tags.value_close, *(["\n" + tags.value_close] if tags.breaks else [])]
        self._plain_ends = self._value_ends = Tags(closing)
        self._verbatim_ends = Tags([tags.verbatim[1]]) if tags.verbatim else self._plain_ends
        self._word: list[str] = []
        self._count = self._left = 0
        self._parameters: Mapping[str, Any] = {}
        self._as_text = True

    def end(self, rest: str) -> None:
        """An answer that ends anywhere: an unfinished call keeps the arguments it has."""
        if self._mode in (self._name_open, self._name):
            self._outside.add("".join(self._raw))
            self._outside.add(rest)
        elif self._mode == self._value:
            self._value_piece(rest)
            self._sink.arguments("".join(self._word))
        elif self._mode not in (self._key, self._value_open, self._verbatim, self._name_rest):
            self._outside.add(rest)
        self._outside.flush()

    def _open(self, tag: str) -> None:
        self._word.clear()
        self._mode = self._name_open

    def _name_open(self, text: str, at: int) -> int:
        start = skip_space(text, at)
        if start == len(text):
            self._raw.append(text[at:])
            return start
        has_name = literal(text, start, self._tags.name_open) if self._tags.name_open else True
        if has_name is None:
            self._raw.append(text[at:start])
            return start
        if not has_name:
            self._refuse(text[at:start])
            return start
        end = start + len(self._tags.name_open)
        self._raw.append(text[at:end])
        self._mode = self._name
        return end

    def _name(self, text: str, at: int) -> int:
        chars_left = MAX_NAME_CHARS - sum(map(len, self._word))
        place, tag = self._name_ends.find(text, at, chars_left)
        fits = min(place, at + chars_left)
        self._raw.append(text[at:fits])
        self._word.append(text[at:fits])
        if fits < place:
            self._refuse("")
            return fits
        if not tag:
            return place
        name = "".join(self._word).strip()
        if not name:
            self._refuse("")
            return place
        self._begin(name)
        if self._tags.name_rest:
            self._left = MAX_NAME_CHARS
            self._mode = self._name_rest
        return place + (len(tag) if tag in self._tags.name_end else 0)

    def _begin(self, name: str) -> None:
        self._outside.call()
        self._sink.begin(name)
        self._parameters = self._schemas.get(name, {})
        self._count = 0
        self._mode = self._member

    def _name_rest(self, text: str, at: int) -> int:
        """Skips to what ends a call's opening tag, but no further than a name may be long."""
        place, tag = only(self._tags.name_rest).find(text, at, self._left)
        fits = min(place, at + self._left)
        self._left -= fits - at
        if fits < place or tag:
            self._mode = self._member
        return fits + (len(tag) if fits == place else 0)

    def _member(self, text: str, at: int) -> int:
        place, tag = self._members.find(text, at)
        self._outside.add(text[at:place])
        if not tag:
            return place
        self._outside.call()
        if tag == self._tags.key_open:
            self._word.clear()
            self._mode = self._key
        else:
            self._sink.arguments("}" if self._count else "{}")
            self._sink.end()
            self._mode = self._content if tag == self._tags.close else self._after_function
        return place + len(tag)

    def _after_function(self, text: str, at: int) -> int:
        place, tag = self._functions.find(text, at)
        self._outside.add(text[at:place])
        if not tag:
            return place
        self._outside.call()
        if tag == self._tags.close:
            self._mode = self._content
        else:
            self._raw = [tag]
            self._word.clear()
            self._mode = self._name
        return place + len(tag)

    def _key(self, text: str, at: int) -> int:
        place, tag = self._key_ends.find(text, at)
        self._word.append(text[at:place])
        if not tag:
            return place
        key = "".join(self._word).strip()
        self._word.clear()
        self._sink.arguments(("{" if not self._count else ", ") + quoted(key) + ": ")
        self._count += 1
        self._as_text = is_text(self._parameters.get(key, {"type": "string"}))
        if tag == self._tags.key_end_text or tag in self._tags.key_end_json:
            self._as_text = tag == self._tags.key_end_text
        self._mode = self._value_open
        return place + len(tag)

    def _value_open(self, text: str, at: int) -> int:
        wanted = self._tags.value_open
        if wanted:
            start = skip_space(text, at)
            if start == len(text):
                return start
            has_tag = literal(text, start, wanted)
            if has_tag is None:
                return start
            at = start + (len(wanted) if has_tag else 0)
        elif (
            self._tags.breaks
            and text[at] == "\n"
            and not text.startswith("\n" + self._tags.value_close, at)
        ):
            if literal(text, at, "\n" + self._tags.value_close) is None:
                return at
            at += 1
        self._value_ends = self._plain_ends
        self._mode = self._value if self._tags.verbatim is None else self._verbatim
        if self._as_text:
            self._sink.arguments('"')
        return at

    def _verbatim(self, text: str, at: int) -> int:
        """A value may begin with a tag behind which only another tag ends it."""
        assert self._tags.verbatim is not None
        opening = self._tags.verbatim[0]
        has_opening = literal(text, at, opening)
        if has_opening is None:
            return at
        if has_opening:
            self._value_ends = self._verbatim_ends
        self._mode = self._value
        return at + (len(opening) if has_opening else 0)

    def _value(self, text: str, at: int) -> int:
        place, tag = self._value_ends.find(text, at)
        self._value_piece(text[at:place])
        if not tag:
            return place
        if self._value_ends is not self._plain_ends:
            self._value_ends = self._plain_ends  # up to the tag itself, nothing should stand
            return place + len(tag)
        if self._as_text:
            self._sink.arguments('"')
        else:
            self._sink.arguments(as_json("".join(self._word)))
            self._word.clear()
        self._mode = self._member
        return place + len(tag)

    def _value_piece(self, text: str) -> None:
        if self._as_text:
            self._sink.arguments(quoted(text)[1:-1])
        else:
            self._word.append(text)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters of tools in OpenAI's shape; what is malformed counts as a tool without
    parameters."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return schemas


def is_text(schema: Any) -> bool:
    """Whether a parameter with this schema can only be a text."""
    if not isinstance(schema, Mapping):
        return False
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    values = schema.get("enum")
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def as_json(text: str) -> str:
    """The value as JSON: as it stands if it is JSON, Python's words for true, false and null, else
    a text."""
    stripped = text.strip()
    stripped = _PYTHON_WORDS.get(stripped, stripped)
    try:
        msgspec.json.decode(stripped, type=msgspec.Raw)
        msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return quoted(text)
    return stripped
