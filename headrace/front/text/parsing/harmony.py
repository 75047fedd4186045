"""Harmony: messages with a header, `<|channel|>NAME to=RECIPIENT<|message|>TEXT<|end|>`, one after
the other.

The channel analysis is reasoning, final and commentary are content, a message to functions.NAME is
a call whose arguments are its text. The tags are control tokens; where they are marked (marks.py),
the same words in a text are text. Only the message that the prompt has begun, if it has, counts
from the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from headrace.front.text.parsing.engine import Content, Engine, Tags, literal, skip_space
from headrace.front.text.parsing.json_calls import MAX_NAME_CHARS
from headrace.front.text.parsing.json_text import JsonValue
from headrace.front.text.parsing.messages import Kind, Messages

MAX_HEADER_CHARS = 1024
_RECIPIENT = re.compile(r"to=([^\s<\ufdd1]+)")
_WORD = re.compile(r"\s*(\w+)")


class HarmonyTags(msgspec.Struct, frozen=True, kw_only=True):
    """The control tokens."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    call: str = "<|call|>"
    ret: str = "<|return|>"

    @property
    def next(self) -> str:
        """What ends a message and begins the header of the next."""
        return f"{self.end}{self.start}assistant"


class Harmony(Messages):
    """The state: `over` once the final message has begun.

    `functions` None: no tools are offered, so what looks like a call is content. `prompt_tail`: how
    the prompt ends.
    """

    def __init__(
        self,
        engine: Engine,
        tags: HarmonyTags,
        *,
        functions: Collection[str] | None,
        reasons: bool = True,
        prompt_tail: str = "",
    ) -> None:
        super().__init__(engine)
        self._tags = tags
        self._functions = functions
        self._reasons = reasons
        self._header_ends = Tags([tags.message, tags.end, tags.call, tags.ret])
        self._ends = Tags([tags.end, tags.call, tags.ret, tags.start])
        self._header: list[str] = []
        self._value = JsonValue()
        self._mode = self._first
        self._begin(prompt_tail)

    def end(self, rest: str) -> None:
        """An answer that ends anywhere; a call whose arguments are complete was ended by a token
        that is not shown."""
        if self._mode == self._body:
            if self._kind is not Kind.CALL or not self._value.done:  # else it began a tag
                self._piece(rest)
            if self._kind is Kind.CALL and self._value.done:
                self._end_call()
        elif self._mode in (self._first, self._read_header):
            header = "".join(self._header) + rest
            if header and self._tags.channel not in header and "to=" not in header:
                self._sink.add(Content(header))

    def _begin(self, prompt_tail: str) -> None:
        """A prompt may end in the middle of a message's header, or behind it."""
        tags = self._tags
        _, started, message = prompt_tail.rpartition(tags.start)
        if not started or tags.end in message:
            return
        header, opened, _ = message.rpartition(tags.message)
        if opened:
            self._open_message(header)
        elif tags.channel in message or "to=" in message:
            self._header = [message]
            self._mode = self._read_header

    def _first(self, text: str, at: int) -> int:
        """A header, or text without one, as a constrained answer may be; no header begins behind a
        page of space."""
        start = skip_space(text, at)
        if start - at > MAX_HEADER_CHARS:
            self._open_message("")
            return at
        if start == len(text):
            return at
        tags = self._tags
        matches = [
            literal(text, start, tag) for tag in (tags.channel, tags.start, "to=", "assistant")
        ]
        if any(matches):
            self._mode = self._read_header
        elif None in matches:
            return at
        else:
            self._open_message("")
        return at

    def _read_header(self, text: str, at: int) -> int:
        chars_left = MAX_HEADER_CHARS - sum(map(len, self._header))
        place, tag = self._header_ends.find(text, at, chars_left)
        fits = min(place, at + chars_left)
        self._header.append(text[at:fits])
        header = "".join(self._header)
        if fits < place:
            self._open_message("")
            self._piece(header)
            return fits
        self._header = [header]
        if not tag:
            return place
        self._header = []
        if tag == self._tags.message:
            self._open_message(header, at=self._engine.consumed + place + len(tag))
        else:
            self._mode = self._between
        return place + len(tag)

    def _open_message(self, header: str, at: int = 0) -> None:
        _, named, rest = header.rpartition(self._tags.channel)
        word = _WORD.match(rest) if named else None
        channel = word[1] if word else "final"
        recipient = _RECIPIENT.search(header)
        address = "" if recipient is None else recipient[1]
        name = address.removeprefix("functions.")
        self._mode = self._body
        if self._is_call(address, name):
            self._begin_message(Kind.CALL, at)
            self._value = JsonValue()
            self._sink.begin(name)
            return
        hidden = channel == "analysis" and self._reasons
        self._begin_message(Kind.REASONING if hidden else Kind.CONTENT, at)
        self.over = self.over or channel == "final"

    def _is_call(self, address: str, name: str) -> bool:
        if self._functions is None or not 0 < len(name) <= MAX_NAME_CHARS:
            return False
        return address != name or name in self._functions

    def _body(self, text: str, at: int) -> int:
        place, tag = self._ends.find(text, at)
        self._piece(text[at:place])
        if not tag:
            return place
        if self._kind is Kind.CALL:
            self._end_call()
        else:
            self._end_message(self._engine.consumed + place)
        self._mode = self._between
        return place + (0 if tag == self._tags.start else len(tag))

    def _piece(self, text: str) -> None:
        if self._kind is Kind.CALL:
            self._arguments(text)
        else:
            self._say(text)

    def _arguments(self, text: str) -> None:
        if self._fresh:
            text = text.lstrip()
        if text:
            self._fresh = False
            self._value.read(text, 0)
            self._sink.arguments(text)

    def _end_call(self) -> None:
        if self._fresh:
            self._sink.arguments("{}")
        self._sink.end()
        self._kind = Kind.CONTENT

    def _between(self, text: str, at: int) -> int:
        start = skip_space(text, at)
        if start == len(text):
            return start
        tags = self._tags
        begins = [literal(text, start, tag) for tag in (tags.start, tags.channel)]
        if any(begins):
            self._header = []
            self._mode = self._read_header
        elif None in begins:
            return start
        else:
            self._open_message("")
        return start
