"""Jump-forward decoding: tokens about which a hook leaves no choice are appended without being
sampled, and their KV is computed as one chunk.

They are known when the deferred inputs of the oldest step in flight are sent, and follow the tokens
that step knows. The token which it samples for the row would be the first of them, so its sample is
void; the row leaves the decodes, runs the forced tokens in one step like a prefill chunk
(Scheduler.resume), and decodes again behind them: of k steps one is left. The answer is the same as
token by token, because the hook's masks force the same tokens there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.base.errors import to_wire
from headrace.base.wire.request import RowSampling
from headrace.core.output_processor import End, OutputBuffer
from headrace.core.request import Request, RequestState, RowTable
from headrace.core.scheduler.plan_builder import InFlightStep
from headrace.core.scheduler.queue import AdmissionHooks
from headrace.core.scheduler.scheduler import Scheduler

LEAST = 2  # a single forced token comes out of the step in flight anyway


def _is_forgetful(sampling: RowSampling) -> bool:
    """Whether nothing is told or counted of the single tokens, so that some need not be sampled."""
    counts = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    watched = (sampling.logprobs, sampling.prompt_logprobs, sampling.capture_layers)
    return watched == (None, None, ()) and counts == (1.0, 0.0, 0.0)


class JumpForward:
    """Appends the tokens that hooks force."""

    def __init__(
        self,
        rows: RowTable,
        scheduler: Scheduler,
        output_buffer: OutputBuffer,
        *,
        end: End,
        now: Callable[[], float],
    ) -> None:
        self._rows = rows
        self._scheduler = scheduler
        self._output_buffer = output_buffer
        self._end = end
        self._now = now

    def take(
        self, hooks: AdmissionHooks, in_flight: InFlightStep, owner: Callable[[int], Request | None]
    ) -> int:
        """Appends the forced tokens of rows in this step, the oldest in flight; returns how
        many."""
        count = 0
        for request_id, tokens in hooks.forced().items():
            request = owner(request_id)
            if request is None or not self._may_jump(request, in_flight):
                continue
            taken = self._cut(request, tokens)
            if len(taken) >= LEAST:
                self._jump(hooks, request, in_flight, taken)
                count += len(taken)
        return count

    def _may_jump(self, request: Request, in_flight: InFlightStep) -> bool:
        """Whether nothing but the masks looks at its tokens one by one, and its next token is in
        this step and no later one."""
        row = request.row
        if request.state is not RequestState.DECODE or not self._rows.decoding[row]:
            return False
        if not _is_forgetful(request.wire.sampling) or request.repeats is not None:
            return False
        place = in_flight.rows == row
        if (in_flight.position[place] < self._rows.num_planned_tokens[row]).any():
            return False
        return bool((place & (in_flight.epochs == self._rows.epoch[row]) & in_flight.sample).any())

    def _cut(self, request: Request, tokens: list[int]) -> list[int]:
        """Up to the first stop id, and so that one token is left to sample below the length
        limit."""
        room = int(self._rows.limit[request.row] - self._rows.num_known_tokens[request.row]) - 1
        stop = next((i for i, t in enumerate(tokens) if t in request.stop_set), len(tokens))
        return tokens[: max(0, min(room, stop))]

    def _jump(
        self, hooks: AdmissionHooks, request: Request, in_flight: InFlightStep, tokens: list[int]
    ) -> None:
        void = in_flight.rows == request.row
        in_flight.sample = in_flight.sample & ~void  # the plan has the old array
        self._scheduler.speculation.give_up(in_flight, void)
        if request.first_token_at is None:
            request.first_token_at = self._now()
            self._output_buffer.add_cached(request.id, request.num_cached)
        ids = np.full(len(tokens), request.id, np.int64)
        self._rows.append(request, tokens)
        self._scheduler.resume(request)
        self._output_buffer.add_tokens(ids, np.asarray(tokens, np.int32), [])
        ends = hooks.accept_tokens(ids.tolist(), tokens)
        end = ends.get(request.id)
        if isinstance(end, str):
            self._end(request, end)
        elif end is not None:
            self._end(request, "error", error=to_wire(end))
