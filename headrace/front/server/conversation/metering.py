"""Counts one generation's events into the metrics as they pass, and joins the event streams of
several prompts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.base.errors import NonFiniteLogits
from headrace.base.telemetry.metrics import Metrics
from headrace.front.client.events import Delta, Ended, Event, Events, Generation, Started
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.http.timing import Timeline, timeline

_QUEUED_EVENTS = 64


_PARTS = ("queue", "prefill", "decode")


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
        times = (self._request_context.arrival, self._handed, first, now)
        line = timeline(event, *times, num_prompt=self._num_prompt)
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
    metrics.observe("headrace_request_generation_tokens", event.num_output)
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
