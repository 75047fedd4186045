"""The stage between a generation and its dialect: text deltas become reasoning, content and tool
calls.

The events keep their order and meaning; a parsed delta also carries its parts. Every dialect folds
and encodes these, so that a full answer and its stream cannot differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing

import msgspec
from msgspec.structs import asdict

from headrace.front.client.events import Delta, Ended, Event, Events, Started
from headrace.front.text.parsing.engine import Content, Part, Reasoning, joined
from headrace.front.text.parsing.parser import OutputParser
from headrace.front.text.parsing.reasoning import ReasoningTokens


class ParsedDelta(Delta, frozen=True, kw_only=True):
    """A delta and what it consists of; `text` stays the raw text. `num_reasoning`: reasoning tokens
    so far."""

    parts: list[Part]
    num_reasoning: int


def parts_of(delta: Delta) -> list[Part]:
    """What a delta consists of; text that nobody parses is content."""
    if isinstance(delta, ParsedDelta):
        return delta.parts
    return [Content(delta.text)] if delta.text else []


class ParsedEnded(Ended, frozen=True, kw_only=True):
    """The end of a parsed choice: its reasoning tokens, and whether it made calls none of which is
    cut off."""

    num_reasoning: int
    called: bool


class ParsedAnswer:
    """One choice while it is parsed."""

    over = False
    num_cached = 0
    _num_output = 0
    _num_read = 0
    _num_spans = 0
    _num_earlier = 0
    _num_reasoning = 0

    def __init__(self, parser: OutputParser, pieces: Mapping[int, str | bytes]) -> None:
        self.pieces = pieces
        self._parser = parser
        self._tokens = ReasoningTokens(pieces)
        self._ends = ReasoningTokens(pieces)  # of all tokens, for where each one ends

    def take(self, event: Delta | Ended) -> list[Event]:
        """The parsed events of `event`; none once the choice is over."""
        if self.over:
            return []
        if isinstance(event, Ended):
            return self._end(event)
        if not self._parser.only_one_call:
            return [self._delta(event, self._parser.push(event.text))]
        return self._until_closed(event)

    def _until_closed(self, event: Delta) -> list[Event]:
        """A delta as if each of its tokens had come alone: what follows the one call is none of the
        answer's."""
        parts: list[Part] = []
        begin = number = 0
        for number in range(len(event.token_ids) + 1):
            # the text of earlier tokens comes first, as far as it was held back
            self._ends.add(event.token_ids[number - 1 : number])
            end = min(max(self._ends.at - self._num_read, begin), len(event.text))
            parts += self._parser.push(event.text[begin:end])
            begin = end
            if self._parser.closed:
                break
        else:
            parts += self._parser.push(event.text[begin:])
            begin = len(event.text)
        self._num_read += len(event.text)
        if not self._parser.closed:
            return [self._delta(event, joined(parts))]
        scores = None if event.scores is None else event.scores[:number]
        event = msgspec.structs.replace(
            event, text=event.text[:begin], token_ids=event.token_ids[:number], scores=scores
        )
        last = self._delta(event, joined(parts))
        ended = Ended(
            index=event.index,
            reason="stop",
            num_output=self._num_output,
            num_cached=self.num_cached,
        )
        return [last, *self._end(ended)]

    def _delta(self, event: Delta, parts: list[Part]) -> ParsedDelta:
        self._num_output += len(event.token_ids)
        self._count(event.token_ids)
        return ParsedDelta(**asdict(event), parts=parts, num_reasoning=self._num_reasoning)

    def _count(self, token_ids: Sequence[int]) -> None:
        """Counts the reasoning tokens; those of earlier stretches of reasoning are known
        already."""
        spans = self._parser.reasoning_spans
        end = 0 if not spans or spans[-1][1] is None else spans[-1][1]
        if not self._parser.reasoning_over or self._tokens.at < end:
            self._tokens.add(token_ids)
        while self._num_spans < len(spans) - 1:
            self._num_earlier += self._tokens.count(spans[self._num_spans])
            self._num_spans += 1
        if not spans:
            return
        begin, end_of_last = spans[-1]
        if end_of_last is None and not self.over:
            end_of_last = self._parser.consumed  # what may become the closing tag waits
        self._num_reasoning = self._num_earlier + self._tokens.count((begin, end_of_last))

    def _end(self, event: Ended) -> list[Event]:
        self.over = True
        parts = [] if self._parser.closed else self._parser.finish()
        last = self._delta(Delta(index=event.index, text=""), parts)
        thoughts, called = self._num_reasoning, self._parser.called
        ended = ParsedEnded(**asdict(event), num_reasoning=thoughts, called=called)
        return [last, ended] if parts else [ended]


async def parsed(events: Events, answers: Sequence[ParsedAnswer]) -> Events:
    """The events with parsed deltas and ends; `answers` are indexed as the choices are.

    It ends, and with it what still runs, once every choice is over. Closing it closes `events`.
    """
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta | Ended):
                for parsed_event in answers[event.index].take(event):
                    yield parsed_event
                if all(answer.over for answer in answers):
                    return
            else:
                if isinstance(event, Started):
                    for answer in answers:
                        answer.num_cached = event.num_cached
                yield event


async def without_reasoning(events: Events) -> Events:
    """The events of a client that does not want to see the reasoning; it is counted all the
    same."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, ParsedDelta):
                parts = [part for part in event.parts if not isinstance(part, Reasoning)]
                event = msgspec.structs.replace(event, parts=parts)
            yield event
