"""Tokens that a gate leaves no choice about: written down without being sampled, their KV computed as one chunk.

Told when the oldest step in flight is supplied, the tokens follow what that step knows. The token which it samples for
the row is the first of them, so its sample is void; the row leaves the decodes, runs the forced tokens in one step like
a prefill chunk (Scheduler.resume), and decodes again behind them: of k steps one is left. What comes out is the same as
token by token, because the gate's masks force the same tokens there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.base.wire.params import RowSampling
from headrace.core.landing import End
from headrace.core.outbox import Outbox
from headrace.core.request import Request, State
from headrace.core.rows import RowTable
from headrace.core.scheduler.draft import Flight
from headrace.core.scheduler.gates import Gates
from headrace.core.scheduler.scheduler import Scheduler

LEAST = 2  # a single forced token comes out of the step in flight anyway


def _is_forgetful(sampling: RowSampling) -> bool:
    """Whether nothing is told or counted of the single tokens, so that some need not be sampled."""
    counts = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    told = (sampling.logprobs, sampling.prompt_logprobs, sampling.capture_layers)
    return told == (None, None, ()) and counts == (1.0, 0.0, 0.0)


class Jumps:
    """Takes what gates force."""

    def __init__(
        self,
        rows: RowTable,
        scheduler: Scheduler,
        outbox: Outbox,
        *,
        end: End,
        now: Callable[[], float],
    ) -> None:
        self._rows = rows
        self._scheduler = scheduler
        self._outbox = outbox
        self._end = end
        self._now = now

    def take(self, gates: Gates, flight: Flight, owner: Callable[[int], Request | None]) -> int:
        """Appends the forced tokens of rows in this flight, the oldest; returns how many."""
        count = 0
        for request_id, tokens in gates.forced().items():
            request = owner(request_id)
            if request is None or not self._may_jump(request, flight):
                continue
            taken = self._cut(request, tokens)
            if len(taken) >= LEAST:
                self._jump(gates, request, flight, taken)
                count += len(taken)
        return count

    def _may_jump(self, request: Request, flight: Flight) -> bool:
        """Whether nothing but the masks looks at its tokens one by one, and its next token is in this flight."""
        row = request.row
        if request.state is not State.DECODE or not self._rows.decoding[row]:
            return False
        if not _is_forgetful(request.wire.sampling) or request.repeats is not None:
            return False
        place = flight.rows == row
        return bool((place & (flight.epochs == self._rows.epoch[row]) & flight.sample).any())

    def _cut(self, request: Request, tokens: list[int]) -> list[int]:
        """Up to the first stop id, and so that one token is left to sample below the length limit."""
        room = int(self._rows.limit[request.row] - self._rows.known[request.row]) - 1
        stop = next((i for i, t in enumerate(tokens) if t in request.stop_set), len(tokens))
        return tokens[: max(0, min(room, stop))]

    def _jump(self, gates: Gates, request: Request, flight: Flight, tokens: list[int]) -> None:
        void = flight.rows == request.row
        flight.sample = flight.sample & ~void  # the plan has the old array
        if request.first_token_at is None:
            request.first_token_at = self._now()
            self._outbox.add_cached(request.id, request.num_cached)
        ids = np.full(len(tokens), request.id, np.int64)
        self._rows.append(request, tokens)
        self._scheduler.resume(request)
        self._outbox.add_tokens(ids, np.asarray(tokens, np.int32), [])
        ends = gates.landed(ids.tolist(), tokens)
        if (end := ends.get(request.id)) is not None:
            assert isinstance(end, str), "a gate does not follow what it forced"
            self._end(request, end)
