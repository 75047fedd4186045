"""Counts one generation's events into the metrics as they pass, and joins the event streams of several prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing

from headrace.base.telemetry.metrics import Metrics
from headrace.front.client.events import Delta, Ended, Event, Started
from headrace.front.server.exchange import Exchange
from headrace.front.server.timing import timeline
from headrace.front.server.tracing import CoreTrace

_QUEUED_EVENTS = 64


async def measured(events: AsyncIterator[Event], exchange: Exchange) -> AsyncGenerator[Event, None]:
    """Passes the events on; closing this generator closes `events`, which aborts what still runs."""
    watch = _Watch(exchange)
    async with AsyncExitStack() as stack:
        if isinstance(events, AsyncGenerator):
            await stack.enter_async_context(aclosing(events))
        try:
            async for event in events:
                match event:
                    case Delta():
                        watch.delta(event)
                    case Started():
                        watch.started(event)
                    case Ended():
                        watch.ended(event)
                yield event
        except Exception:
            watch.lost("error")
            raise
        finally:
            watch.lost("abort")


class _Watch:
    """One generation: its metrics, its timeline and its spans."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._metrics = exchange.services.metrics
        self._handed = time.monotonic()
        self._first: dict[int, float] = {}
        self._num_prompt = 0
        self._span: CoreTrace | None = None
        if exchange.trace is not None:
            self._span = exchange.trace.begin_core()

    def started(self, event: Started) -> None:
        self._num_prompt = event.num_prompt
        self._metrics.add("headrace_prompt_tokens_total", event.num_prompt)
        self._metrics.observe("headrace_request_prompt_tokens", event.num_prompt)

    def delta(self, event: Delta) -> None:
        if event.index not in self._first:
            now = self._first[event.index] = time.monotonic()
            since = now - self._exchange.arrival
            self._metrics.observe("headrace_time_to_first_token_seconds", since)

    def ended(self, event: Ended) -> None:
        now, first = time.monotonic(), self._first.get(event.index)
        _count_end(event, self._metrics, arrival=self._exchange.arrival, first=first, now=now)
        self._exchange.timeline = timeline(
            event,
            arrival=self._exchange.arrival,
            handed=self._handed,
            first=first,
            now=now,
            num_prompt=self._num_prompt,
        )
        if self._span is not None and event.index == 0:
            self._span.finished(event, num_prompt=self._num_prompt)

    def lost(self, reason: str) -> None:
        if self._span is not None:
            self._span.lost(reason)


def _count_end(
    event: Ended, metrics: Metrics, *, arrival: float, first: float | None, now: float
) -> None:
    metrics.add("headrace_request_success_total", finished_reason=event.reason)
    metrics.add("headrace_generation_tokens_total", event.num_output)
    metrics.observe("headrace_request_generation_tokens", event.num_output)
    metrics.observe("headrace_e2e_request_latency_seconds", now - arrival)
    if event.index == 0:
        metrics.add("headrace_cached_prompt_tokens_total", event.num_cached)
    if event.queued_s is not None:
        metrics.observe("headrace_request_queue_time_seconds", event.queued_s)
    if event.queued_s is not None and event.total_s is not None:
        begun = event.total_s if event.first_token_s is None else event.first_token_s
        metrics.observe("headrace_request_prefill_time_seconds", begun - event.queued_s)
        metrics.observe("headrace_request_decode_time_seconds", event.total_s - begun)
        metrics.observe("headrace_request_inference_time_seconds", event.total_s - event.queued_s)
    if first is not None and event.num_output > 1:
        metrics.observe(
            "headrace_inter_token_latency_seconds", (now - first) / (event.num_output - 1)
        )


async def joined(
    streams: list[AsyncGenerator[Event, None]],
) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of several generations as they come, each with its generation's number.

    The first failure ends all; closing this generator closes every stream. The queue is bounded, so that a slow
    consumer slows the producers down.
    """
    queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue(_QUEUED_EVENTS)

    async def pump(number: int, events: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(events):
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
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                remaining -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
