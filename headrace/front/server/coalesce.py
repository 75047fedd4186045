"""Fewer, larger deltas: `stream_interval` tokens or `stream_interval_ms` milliseconds to a chunk, whichever is reached
first (API-17). The first delta of a choice and its last go out at once; joined, the text is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from headrace.front.client.events import Delta, Ended, Events


class Pace(msgspec.Struct, frozen=True):
    """How much a delta must hold to go out; None: that bound is never reached."""

    tokens: int | None
    seconds: float | None


def pace_of(tokens: int | None, milliseconds: float | None) -> Pace | None:
    """The pace of these options; None where neither is given."""
    if tokens is None and milliseconds is None:
        return None
    return Pace(tokens, None if milliseconds is None else milliseconds / 1000)


class _Choice:
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
        )

    def due(self, pace: Pace, now: float) -> bool:
        assert self.waiting is not None
        if self.since is None:
            return True
        enough = pace.tokens is not None and len(self.waiting.token_ids) >= pace.tokens
        return enough or (pace.seconds is not None and now - self.since >= pace.seconds)

    def take(self, now: float) -> list[Delta]:
        found = [] if self.waiting is None else [self.waiting]
        self.waiting, self.since = None, now
        return found


async def paced(
    events: Events, pace: Pace, *, clock: Callable[[], float] = time.monotonic
) -> Events:
    """The events with deltas joined. Closing it closes `events`."""
    choices: dict[int, _Choice] = {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                choice = choices.setdefault(event.index, _Choice())
                choice.add(event)
                if choice.due(pace, now := clock()):
                    for delta in choice.take(now):
                        yield delta
                continue
            if isinstance(event, Ended) and event.index in choices:
                for delta in choices[event.index].take(clock()):
                    yield delta
            yield event
