"""Calls with the name before the arguments: `<begin>NAME<separator>{...}<end>`, the arguments in
JSON.

Arguments go out as they come. What turns out to be no call is content, its tags included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headrace.front.text.parsing.engine import Sink, Tags, literal, skip_space
from headrace.front.text.parsing.json_calls import MAX_NAME_CHARS, JsonCalls, JsonKeys, Outcome
from headrace.front.text.parsing.json_text import JsonValue
from headrace.front.text.parsing.reader import CallReader


class NamedTags(msgspec.Struct, frozen=True, kw_only=True):
    """A family's tags. `lead` may stand before the name and `fence` after the arguments; `id_open`
    begins an id after the name; `bare`: the arguments' brace ends the name too; `counted`: the name
    is written functions.NAME:NUMBER, which is also the call's id; `keys`: calls may also be JSON
    objects right behind `open`."""

    open: str
    lead: str = ""
    name_end: tuple[str, ...]
    id_open: str = ""
    bare: bool = False
    counted: bool = False
    fence: str = ""
    close: str = ""
    drop: tuple[str, ...] = ()
    keys: JsonKeys | None = None


class NamedJson(CallReader):
    """The state that reads content and named calls."""

    def __init__(self, sink: Sink, tags: NamedTags, drop: Sequence[str] = ()) -> None:
        super().__init__(sink, [tags.open], [*tags.drop, *drop])
        self._tags = tags
        optional = [tag for tag in (tags.id_open, tags.close) if tag]
        self._name_ends = Tags([*tags.name_end, *optional, *(["{"] if tags.bare else [])])
        self._id_ends = Tags([*tags.name_end])
        self._word: list[str] = []
        self._name = self._id = ""
        self._value = JsonValue()
        self._calls = None if tags.keys is None else JsonCalls(sink, tags.keys)

    def end(self, rest: str) -> None:
        """An answer that ends anywhere: an unfinished call keeps the arguments it has."""
        if self._mode == self._objects:
            assert self._calls is not None
            if not self._calls.in_call:
                self._outside.add(self._calls.refused)
        elif self._mode not in (self._content, self._arguments, self._fence, self._close):
            self._outside.add("".join(self._raw))
        super().end(rest if self._mode not in (self._fence, self._close) else "")

    def _open(self, tag: str) -> None:
        self._word.clear()
        self._id = ""
        self._mode = self._begin

    def _begin(self, text: str, at: int) -> int:
        start = skip_space(text, at)
        if start == len(text):
            self._raw.append(text[at:])
            return start
        if self._calls is not None and text[start] in "[{":
            self._calls.start("".join(self._raw) + text[at:start])
            self._mode = self._objects
            return start
        has_lead = literal(text, start, self._tags.lead) if self._tags.lead else False
        if has_lead is None:
            self._raw.append(text[at:start])
            return start
        end = start + len(self._tags.lead) if has_lead else start
        self._raw.append(text[at:end])
        self._mode = self._read_name
        return end

    def _objects(self, text: str, at: int) -> int:
        assert self._calls is not None
        at = self._calls.read_beside(self._outside, text, at)
        if self._calls.outcome is Outcome.REFUSED:
            self._mode = self._content
        elif self._calls.outcome is Outcome.DONE:
            self._mode = self._close
        return at

    def _read_name(self, text: str, at: int) -> int:
        place, tag = self._name_ends.find(text, at, self._room)
        fits = self._take(text, at, place)
        name = "".join(self._word).strip()
        if fits < place or (tag and not name) or (tag and tag == self._tags.close):
            self._refuse()
            return fits
        if not tag:
            return place
        self._name = name
        self._word.clear()
        if tag == "{":
            self._mode = self._arguments_begin
            return place
        self._raw.append(tag)
        self._mode = self._read_id if tag == self._tags.id_open else self._arguments_begin
        return place + len(tag)

    def _read_id(self, text: str, at: int) -> int:
        place, tag = self._id_ends.find(text, at, self._room)
        fits = self._take(text, at, place)
        self._id = "".join(self._word).strip()
        if fits < place:
            self._refuse()
            return fits
        if tag:
            self._raw.append(tag)
            self._mode = self._arguments_begin
            return place + len(tag)
        return place

    @property
    def _room(self) -> int:
        return MAX_NAME_CHARS - sum(map(len, self._word))

    def _take(self, text: str, at: int, place: int) -> int:
        """Adds text up to `place` to the word; the place up to which a word may be that long."""
        fits = min(place, at + self._room)
        self._raw.append(text[at:fits])
        self._word.append(text[at:fits])
        return fits

    def _arguments_begin(self, text: str, at: int) -> int:
        start = skip_space(text, at)
        self._raw.append(text[at:start])
        if start == len(text):
            return start
        if text[start] != "{":
            self._refuse()
            return start
        if self._tags.counted:
            self._id = self._name
            self._name = _without_count(self._name)
        self._outside.call()
        self._sink.begin(self._name, self._id)
        self._value = JsonValue()
        self._mode = self._arguments
        return start

    def _arguments(self, text: str, at: int) -> int:
        end = self._value.read(text, at)
        self._sink.arguments(text[at:end])
        if self._value.done:
            self._sink.end()
            self._mode = self._fence
        return end

    def _fence(self, text: str, at: int) -> int:
        return self._optional(text, at, self._tags.fence, then=self._close)

    def _close(self, text: str, at: int) -> int:
        return self._optional(text, at, self._tags.close, then=self._content)

    def _optional(self, text: str, at: int, tag: str, *, then: Callable[[str, int], int]) -> int:
        start = skip_space(text, at)
        if start == len(text):
            return start
        has_tag = literal(text, start, tag) if tag else False
        if has_tag is None:
            return start
        self._mode = then
        return start + (len(tag) if has_tag else 0)


def _without_count(written: str) -> str:
    """NAME out of functions.NAME:NUMBER."""
    name = written.removeprefix("functions.")
    base, _, count = name.rpartition(":")
    return base if base and count.isdigit() else name
