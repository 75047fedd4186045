"""Takes in the result of a step: which tokens count, which blocks are full, who has come to an end;
and collects what the core has to say (tokens, ends of requests, replies) until it is asked.

Works on columns. Python touches single rows only where a block has filled up, a prompt chunk ended,
a token may be the last one, or log-probabilities were asked for.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError, WireError, to_wire
from headrace.base.wire.control import Reply
from headrace.base.wire.pooling import Pooled
from headrace.base.wire.request import (
    Captured,
    Finished,
    PromptLogprobs,
    TokenBatch,
    TokenLogprobs,
)
from headrace.base.wire.step import StepResult
from headrace.core.kv.manager import KVManager
from headrace.core.ports import Ends
from headrace.core.repeats import REASON
from headrace.core.request import TOKEN_BYTES, Bool, Int32, Request, RequestState, RowTable
from headrace.core.scheduler.plan_builder import InFlightStep, Speculation
from headrace.core.scheduler.queue import AdmissionHooks
from headrace.core.service_state import Counters


class End(Protocol):
    """Ends a request; see EngineCore.end."""

    def __call__(
        self,
        request: Request,
        reason: str,
        *,
        stop_id: int | None = None,
        error: WireError | None = None,
        forget: bool = False,
    ) -> None: ...


class StepOutputProcessor:
    """Reads results into the row table, the KV manager, the hooks and the output buffer."""

    def __init__(
        self,
        rows: RowTable,
        kv: KVManager,
        hooks: AdmissionHooks,
        output_buffer: OutputBuffer,
        counters: Counters,
        end: End,
        speculation: Speculation,
    ) -> None:
        self._speculation = speculation
        self._rows = rows
        self._kv = kv
        self._hooks = hooks
        self._output_buffer = output_buffer
        self._counters = counters
        self._end = end

    def process(self, in_flight: InFlightStep, result: StepResult, now: float) -> None:
        """Takes in one step."""
        assert result.step == in_flight.step, (result.step, in_flight.step)
        live = self._rows.epoch[in_flight.rows] == in_flight.epochs
        if result.prompt_logprobs or result.pooled or result.captured:
            self._pass_on(in_flight, result, live)
        num_failed = self._end_failed(in_flight, result, live) if result.failed else 0
        self._speculation.settle(in_flight, result, live)
        sampled = live & in_flight.sample  # tails of void ones are flushed
        position = self._speculation.positions(in_flight)
        self._name_full_blocks(in_flight, position, sampled)
        if in_flight.prefills:
            self._advance_prefills(in_flight, live, now)
        num_tokens = self._take_tokens(in_flight, result, position, sampled, 0)
        for place in range(1, result.tokens.shape[1]):
            live = self._rows.epoch[in_flight.rows] == in_flight.epochs  # some have ended
            sampled &= live & (result.tokens[:, place] >= 0)
            position = position + 1
            self._name_full_blocks(in_flight, position, sampled)
            num_tokens += self._take_tokens(in_flight, result, position, sampled, place)
        if result.failed:
            live = self._rows.epoch[in_flight.rows] == in_flight.epochs
            num_failed += self._end_failed(in_flight, result, live, behind_tokens=True)
        self._counters.finished_step(num_tokens, any_failed=num_failed > 0)

    def _pass_on(self, in_flight: InFlightStep, result: StepResult, live: Bool) -> None:
        """What is told of prompts and layers."""
        self._pass_on_prompt_scores(in_flight, result, live)
        for index, pooled in result.pooled:
            if live[index]:
                self._output_buffer.add_pooled(
                    self._rows.owner(int(in_flight.rows[index])).id, pooled
                )
        for index, captured in result.captured:
            if live[index]:
                self._output_buffer.add_captured(
                    self._rows.owner(int(in_flight.rows[index])).id, captured
                )

    def _pass_on_prompt_scores(
        self, in_flight: InFlightStep, result: StepResult, live: Bool
    ) -> None:
        """What was scored before a preemption is not sent again."""
        for index, scores in result.prompt_logprobs:
            if not live[index]:
                continue
            request = self._rows.owner(int(in_flight.rows[index]))
            end = scores.start + len(scores.ids)
            known = max(0, request.prompt_scored - scores.start)
            if end > request.prompt_scored:
                request.prompt_scored = end
                self._output_buffer.add_prompt_logprobs(request.id, _without(scores, known))

    def _end_failed(
        self,
        in_flight: InFlightStep,
        result: StepResult,
        live: Bool,
        *,
        behind_tokens: bool = False,
    ) -> int:
        """A failed row ends alone, and nothing of its KV is found again; how many there were.
        `behind_tokens`: those that failed behind accepted drafts, whose tokens come first."""
        count = 0
        for index, error in result.failed:
            if live[index] and (result.tokens[index, 0] >= 0) == behind_tokens:
                count += 1
                live[index] = False
                request = self._rows.owner(int(in_flight.rows[index]))
                self._end(request, "error", error=error, forget=True)
        return count

    def _name_full_blocks(self, in_flight: InFlightStep, position: Int32, live: Bool) -> None:
        """A row whose tail has become a whole block: flush and name it, before the new token
        overwrites the tail."""
        count = in_flight.num_decodes
        full = (position[:count] % self._kv.block_tokens == 0) & live[:count]
        rows = in_flight.rows[:count][full]
        if not len(rows):
            return
        owners = [self._rows.owner(row) for row in rows.tolist()]
        data, size = self._rows.tail[rows].tobytes(), self._kv.block_tokens * TOKEN_BYTES
        blocks = [data[at : at + size] for at in range(0, len(data), size)]
        self._rows.flush_blocks(owners, blocks)
        self._kv.register_each(owners, blocks)

    def _advance_prefills(self, in_flight: InFlightStep, live: Bool, now: float) -> None:
        for index, request in in_flight.prefills:
            if not live[index]:
                continue
            computed = int(in_flight.position[index])
            self._kv.register(request, computed)
            if in_flight.sample[index]:
                if request.first_token_at is None:
                    request.first_token_at = now
                    self._output_buffer.add_cached(request.id, request.num_cached)
                request.reason = "running: decode"
            elif computed == request.length_limit:
                self._end(request, "length")

    def _take_tokens(
        self,
        in_flight: InFlightStep,
        result: StepResult,
        position: Int32,
        sampled: Bool,
        place: int,
    ) -> int:
        """Takes the token at `place` of each of these rows, which stands at `position`; how
        many."""
        if sampled.all():
            rows, tokens = in_flight.rows, np.array(result.tokens[:, place])
        else:
            rows, position = in_flight.rows[sampled], position[sampled]
            tokens = result.tokens[sampled, place]
        if not len(rows):
            return 0
        table = self._rows
        assert tokens.min() >= 0, "a sampled row has no token"
        table.tail[rows, position % table.block_tokens] = tokens
        table.num_known_tokens[rows] = position + 1
        logprobs = _by_row(result, sampled, place) if result.logprobs else []
        self._output_buffer.add_tokens(table.id[rows], tokens, logprobs)
        ends = (
            self._hooks.accept_tokens(table.id[rows].tolist(), tokens.tolist())
            if self._hooks
            else {}
        )
        if table.repeats:
            ends = {**self._repeating(rows, tokens), **ends}
        self._end_complete(rows, position, tokens, ends)
        return len(rows)

    def _repeating(self, rows: Int32, tokens: Int32) -> Ends:
        """The requests whose answers go round in a circle."""
        table = self._rows
        ends: Ends = {}
        for i in np.isin(rows, list(table.repeats)).nonzero()[0].tolist():
            if table.repeats[int(rows[i])].add(int(tokens[i])):
                ends[int(table.id[rows[i]])] = REASON
        return ends

    def _end_complete(self, rows: Int32, position: Int32, tokens: Int32, ends: Ends) -> None:
        table = self._rows
        stops = (table.stops.take(rows, axis=1) == tokens).any(axis=0)
        stops |= table.always[rows]
        stops &= position >= table.stop_from[rows]
        last = position + 1 >= table.limit[rows]
        ended = stops | last
        if ends:
            ended |= np.isin(table.id[rows], list(ends))
        for i in ended.nonzero()[0].tolist():
            request, token = table.owner(int(rows[i])), int(tokens[i])
            if isinstance(end := ends.get(request.id), HeadraceError):
                self._end(request, "error", error=to_wire(end))
            elif stops[i] and token in request.stop_set:
                self._end(request, "stop", stop_id=token)
            elif end is not None:
                self._end(request, end)
            elif last[i]:
                self._end(request, "length")


def _without(scores: PromptLogprobs, known: int) -> PromptLogprobs:
    if known == 0:
        return scores
    return PromptLogprobs(
        scores.start + known, scores.ids[known:], scores.values[known:], scores.ranks[known:]
    )


def _by_row(result: StepResult, sampled: Bool, place: int) -> list[TokenLogprobs | None]:
    index: npt.NDArray[np.intp] = np.cumsum(sampled) - 1
    by_row: list[TokenLogprobs | None] = [None] * int(sampled.sum())
    for scores in result.logprobs:
        if sampled[scores.index] and scores.place == place:
            by_row[int(index[scores.index])] = TokenLogprobs(
                scores.ids, scores.values, scores.rank, scores.drawn_among
            )
    return by_row


Int64 = npt.NDArray[np.int64]
_NO_IDS = np.zeros(0, np.int64)
_NO_TOKENS = np.zeros(0, np.int32)


class CoreOutput(msgspec.Struct, frozen=True):
    """What one call of `EngineCore.step` hands out; `tokens` is None if there is nothing of the
    kind."""

    tokens: TokenBatch | None
    replies: list[Reply]


class OutputBuffer:
    """Collects between two steps, in the message that will carry it."""

    def __init__(self) -> None:
        self._batch, self._replies = _nothing(), list[Reply]()
        self._new: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._has_tokens or self._replies or self._new)

    @property
    def has_ended(self) -> bool:
        """Whether the end of a request is among it."""
        return bool(self._batch.finished)

    @property
    def _has_tokens(self) -> bool:
        batch = self._batch
        lists = (batch.prompt_logprobs, batch.pooled, batch.captured, batch.cached)
        return len(batch.ids) > 0 or any((*lists, batch.queued, batch.finished))

    def add_tokens(self, ids: Int64, tokens: Int32, logprobs: list[TokenLogprobs | None]) -> None:
        """Tokens, behind those that are there; `logprobs` is empty or parallel to them."""
        batch = self._batch
        if len(batch.ids):
            return self._append_tokens(ids, tokens, logprobs)
        batch.ids, batch.tokens, batch.logprobs = ids, tokens, logprobs

    def _append_tokens(
        self, ids: Int64, tokens: Int32, logprobs: list[TokenLogprobs | None]
    ) -> None:
        batch = self._batch
        if batch.logprobs or logprobs:
            before = batch.logprobs or [None] * len(batch.ids)
            batch.logprobs = [*before, *(logprobs or [None] * len(ids))]
        batch.ids = np.concatenate([batch.ids, ids])
        batch.tokens = np.concatenate([batch.tokens, tokens])

    def add_prompt_logprobs(self, request_id: int, scores: PromptLogprobs) -> None:
        """Log-probabilities of a stretch of a prompt."""
        self._batch.prompt_logprobs.append((request_id, scores))

    def add_pooled(self, request_id: int, pooled: Pooled) -> None:
        """Hidden states of a request after pooling."""
        self._batch.pooled.append((request_id, pooled))

    def add_captured(self, request_id: int, captured: Captured) -> None:
        """Attention weights of a request."""
        self._batch.captured.append((request_id, captured))

    def add_cached(self, request_id: int, count: int) -> None:
        """How many of its prompt's tokens a request found in the cache."""
        self._batch.cached.append((request_id, count))

    def add_new(self, request: Request) -> None:
        """A request has come in; `tell_queued` looks whether it waits. What a hook may still refuse
        is not told of."""
        if not request.wire.hook_payloads:
            self._new.append(request)

    def tell_queued(self) -> None:
        """Tells of the new requests that the plan just made has left waiting."""
        waiting = [r.id for r in self._new if r.state is RequestState.WAITING]
        self._batch.queued += waiting
        self._new.clear()

    def add_finished(self, finished: Finished) -> None:
        """The end of a request."""
        self._batch.finished.append(finished)

    def add_reply(self, reply: Reply) -> None:
        """The answer to a call that took longer than the call itself."""
        self._replies.append(reply)

    def take(self) -> CoreOutput:
        """Everything collected; the buffer is empty afterwards."""
        output = CoreOutput(self._batch if self._has_tokens else None, self._replies)
        self._batch, self._replies = _nothing(), []
        return output


def _nothing() -> TokenBatch:
    return TokenBatch(ids=_NO_IDS, tokens=_NO_TOKENS)


def finished_of(
    request: Request,
    reason: str,
    versions: str,
    *,
    stop_id: int | None,
    error: WireError | None,
    now: float,
) -> Finished:
    """What is told of a request that has just ended; `versions`: of the weights it ran with."""
    began = request.arrived_at
    return Finished(
        id=request.id,
        reason=reason,
        stop_id=stop_id,
        error=error,
        num_cached=request.num_cached,
        num_preemptions=request.num_preemptions,
        preempted_s=tuple(at - began for at in request.preempted_at),
        hook_wait_s=request.hook_wait_s,
        scheduled_s=None if request.scheduled_at is None else request.scheduled_at - began,
        first_token_s=None if request.first_token_at is None else request.first_token_at - began,
        total_s=now - began,
        num_drafted=request.num_drafted,
        num_accepted=request.num_accepted,
        weights_version=versions,
    )
