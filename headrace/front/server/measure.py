"""Counts one generation's events into the metrics as they pass, and joins the event streams of several prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing

from headrace.base.telemetry.metrics import Metrics
from headrace.front.client.events import Delta, Ended, Event, Started

_QUEUED_EVENTS = 64


async def measured(
    events: AsyncIterator[Event], metrics: Metrics, *, arrival: float
) -> AsyncGenerator[Event, None]:
    """Passes the events on; closing this generator closes `events`, which aborts what still runs."""
    first_at: dict[int, float] = {}
    async with AsyncExitStack() as stack:
        if isinstance(events, AsyncGenerator):
            await stack.enter_async_context(aclosing(events))
        async for event in events:
            match event:
                case Delta():
                    if event.index not in first_at:
                        now = first_at[event.index] = time.monotonic()
                        metrics.observe("headrace_time_to_first_token_seconds", now - arrival)
                case Started():
                    metrics.add("headrace_prompt_tokens_total", event.num_prompt)
                    metrics.observe("headrace_request_prompt_tokens", event.num_prompt)
                case Ended():
                    _count_end(event, metrics, arrival=arrival, first=first_at.get(event.index))
            yield event


def _count_end(event: Ended, metrics: Metrics, *, arrival: float, first: float | None) -> None:
    now = time.monotonic()
    metrics.add("headrace_request_success_total", finished_reason=event.reason)
    metrics.add("headrace_generation_tokens_total", event.num_output)
    metrics.observe("headrace_request_generation_tokens", event.num_output)
    metrics.observe("headrace_e2e_request_latency_seconds", now - arrival)
    if event.index == 0:
        metrics.add("headrace_cached_prompt_tokens_total", event.num_cached)
    if event.queued_s is not None:
        metrics.observe("headrace_request_queue_time_seconds", event.queued_s)
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
