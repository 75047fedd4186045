"""The stages between a generation's events and its dialect: deltas joined to a client's interval,
text parsed into reasoning, content and tool calls, events counted into the metrics, and the streams
of several prompts as one.

The events keep their order and meaning; a parsed delta also carries its parts. Every dialect folds
and encodes these, so that a full answer and its stream cannot differ. Closing a stage closes the
one before it, which aborts what still runs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec
from msgspec.structs import asdict

from headrace.base.errors import NonFiniteLogits
from headrace.base.telemetry.metrics import Metrics
from headrace.front.client.events import Delta, Ended, Event, Events, Generation, Started
from headrace.front.server.conversation.context import (
    RequestContext,
    StreamInterval,
    Timeline,
    timeline,
)
from headrace.front.text.parsing.engine import Content, Part, Reasoning
from headrace.front.text.parsing.engine import joined as joined_parts
from headrace.front.text.parsing.parser import OutputParser, ReasoningTokens

_QUEUED_EVENTS = 64
_PARTS = ("queue", "prefill", "decode")


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


class WaitingSpace:
    """White space between the parts of an answer, which opens none: it waits for text to stand in
    front of, and is dropped where another part begins first."""

    def __init__(self) -> None:
        self._space = ""

    def before(self, text: str) -> str:
        """`text` behind what waited; "" where all of it is white space, which waits on."""
        text = self._space + text
        self._space = "" if text.strip() else text
        return "" if self._space else text

    def drop(self) -> None:
        """Another part begins."""
        self._space = ""


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
            return [self._delta(event, joined_parts(parts))]
        scores = None if event.scores is None else event.scores[:number]
        event = msgspec.structs.replace(
            event,
            text=event.text[:begin],
            token_ids=event.token_ids[:number],
            scores=scores,
            last=True,
        )
        last = self._delta(event, joined_parts(parts))
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
        last = self._delta(Delta(index=event.index, text="", last=True), parts)
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


class _WaitingDelta:
    """What waits of one choice. `since`: when its last delta went out; None: none has."""

    def __init__(self) -> None:
        self.waiting: Delta | None = None
        self.since: float | None = None

    def add(self, delta: Delta) -> None:
        held = self.waiting
        if held is None:
            self.waiting = delta
            return
        scores = [*(held.scores or []), *(delta.scores or [])]
        self.waiting = Delta(
            index=delta.index,
            text=held.text + delta.text,
            token_ids=[*held.token_ids, *delta.token_ids],
            scores=scores or None,
            last=delta.last,
        )

    def due(self, interval: StreamInterval, now: float) -> bool:
        assert self.waiting is not None
        if self.since is None:
            return True
        enough = interval.tokens is not None and len(self.waiting.token_ids) >= interval.tokens
        return enough or (interval.seconds is not None and now - self.since >= interval.seconds)

    def take(self, now: float) -> list[Delta]:
        deltas = [] if self.waiting is None else [self.waiting]
        self.waiting, self.since = None, now
        return deltas


async def coalesced(
    events: Events, interval: StreamInterval, *, clock: Callable[[], float] = time.monotonic
) -> Events:
    """The events with deltas joined. Closing it closes `events`."""
    choices: dict[int, _WaitingDelta] = {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                choice = choices.setdefault(event.index, _WaitingDelta())
                choice.add(event)
                if choice.due(interval, now := clock()):
                    for delta in choice.take(now):
                        yield delta
                continue
            if isinstance(event, Ended) and event.index in choices:
                for delta in choices[event.index].take(clock()):
                    yield delta
            yield event


async def measured(events: Events, context: RequestContext, generation: Generation) -> Events:
    """Passes the events on; closing this generator closes `events`, which aborts what still
    runs."""
    watch = _Watch(context, generation)
    async with aclosing(events):
        try:
            async for event in events:
                watch.take(event)
                yield event
        except Exception as error:
            watch.failed(error)
            raise
        finally:
            watch.lost("abort")


class _Watch:
    """One generation: its metrics, its timeline and its spans."""

    _num_prompt = 0

    def __init__(self, context: RequestContext, generation: Generation) -> None:
        self._request_context = context
        self._metrics = context.services.metrics
        self._params = generation.params
        self._handed = time.monotonic()
        self._first: dict[int, float] = {}
        self._running = Counter[int]()  # choice -> tokens told
        self._span = None if context.trace is None else context.trace.begin_core(generation)

    def take(self, event: Event) -> None:
        match event:
            case Delta():
                self._running[event.index] += len(event.token_ids)
                if event.index not in self._first:
                    now = self._first[event.index] = time.monotonic()
                    since = now - self._request_context.arrival
                    self._metrics.observe("headrace_time_to_first_token_seconds", since)
            case Started():
                self._running = Counter(dict.fromkeys(range(self._params.n), 0))
                self._num_prompt = event.num_prompt
                self._metrics.add("headrace_prompt_tokens_total", event.num_prompt)
                self._metrics.observe("headrace_request_prompt_tokens", event.num_prompt)
                self._metrics.observe("headrace_request_n", self._params.n)
                if (most := self._params.max_tokens) is not None:
                    self._metrics.observe("headrace_request_max_tokens", most)
            case Ended():
                self._end(event)

    def _end(self, event: Ended) -> None:
        now, first = time.monotonic(), self._first.get(event.index)
        self._running.pop(event.index, None)
        line = timeline(
            event,
            self._request_context.arrival,
            self._handed,
            first,
            now,
            num_prompt=self._num_prompt,
        )
        self._request_context.timeline = line
        _count_end(event, line, self._metrics)
        if first is not None and event.num_output > 1:
            gap_s = (now - first) / (event.num_output - 1)
            self._metrics.observe("headrace_inter_token_latency_seconds", gap_s)
        if self._span is not None and event.index == 0:
            self._span.finished(event, line, num_prompt=self._num_prompt)

    def failed(self, error: Exception) -> None:
        if isinstance(error, NonFiniteLogits):
            self._metrics.add("headrace_nonfinite_requests_total")
        self.lost("error")

    def lost(self, reason: str) -> None:
        for count in self._running.values():
            self._metrics.add("headrace_request_success_total", finished_reason=reason)
            self._metrics.add("headrace_generation_tokens_total", count)
        self._running.clear()
        if self._span is not None:
            self._span.lost(reason)


def _count_end(event: Ended, line: Timeline, metrics: Metrics) -> None:
    metrics.add("headrace_request_success_total", finished_reason=event.reason)
    metrics.add("headrace_generation_tokens_total", event.num_output)
    metrics.add("headrace_reasoning_tokens_total", getattr(event, "num_reasoning", 0))
    metrics.observe("headrace_request_generation_tokens", event.num_output)
    metrics.observe("headrace_request_preemptions", event.num_preemptions)
    metrics.observe("headrace_e2e_request_latency_seconds", line.total_s)
    if event.index == 0:
        metrics.add("headrace_cached_prompt_tokens_total", event.num_cached)
    if event.scheduled_s is not None:
        for part in _PARTS:
            metrics.observe(f"headrace_request_{part}_time_seconds", getattr(line, f"{part}_s"))
        inference_s = line.prefill_s + line.decode_s
        metrics.observe("headrace_request_inference_time_seconds", inference_s)


async def joined(
    streams: list[Events], *, window: int | None = None
) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of several generations as they come, each with its generation's number.

    At most `window` of them run at once, so that a request of many prompts does not fill the
    engine's queue by itself. The first failure ends all; closing this generator closes every
    stream. The queue is bounded, so that a slow consumer slows the producers down. One generation
    has nothing to be joined with: no task and no queue stand between it and its reader."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue(_QUEUED_EVENTS)
    places = asyncio.Semaphore(window or len(streams) or 1)

    async def pump(number: int, events: Events) -> None:
        try:
            async with places, aclosing(events):
                async for event in events:
                    await queue.put((number, event))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(pump(*numbered)) for numbered in enumerate(streams)]
    try:
        remaining = len(tasks)
        while remaining:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                remaining -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
