"""Takes in the result of a step: which tokens count, which blocks are full, who has come to an end.

Works on columns. Python touches single rows only where a block has filled up, a prompt chunk ended, a token may be the
last one, or log-probabilities were asked for.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError, WireError, to_wire
from headrace.base.wire.request import PromptLogprobs, TokenLogprobs
from headrace.base.wire.step import StepResult
from headrace.core.kv.manager import KVManager
from headrace.core.outbox import Outbox
from headrace.core.ports import Ends
from headrace.core.repeats import REASON
from headrace.core.request import TOKEN_BYTES, Request
from headrace.core.rows import Bool, Int32, RowTable
from headrace.core.scheduler.draft import Flight
from headrace.core.scheduler.gates import Gates


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


class Landing:
    """Reads results into the row table, the KV manager, the gates and the outbox."""

    def __init__(
        self, rows: RowTable, kv: KVManager, gates: Gates, outbox: Outbox, end: End
    ) -> None:
        self._rows = rows
        self._kv = kv
        self._gates = gates
        self._outbox = outbox
        self._end = end

    def land(self, flight: Flight, result: StepResult, now: float) -> int:
        """Takes in one step; returns the number of tokens that came out."""
        assert result.step == flight.step, (result.step, flight.step)
        live = self._rows.epoch[flight.rows] == flight.epochs
        if result.prompt_logprobs or result.pooled or result.captured:
            self._pass_on(flight, result, live)
        if result.failed:
            self._end_failed(flight, result, live)
        self._name_full_blocks(flight, live & flight.sample)  # tails of void ones are flushed
        if flight.prefills:
            self._advance_prefills(flight, live, now)
        return self._take_tokens(flight, result, live & flight.sample)

    def _pass_on(self, flight: Flight, result: StepResult, live: Bool) -> None:
        """What is told of prompts and layers."""
        self._pass_on_prompt_scores(flight, result, live)
        for index, pooled in result.pooled:
            if live[index]:
                self._outbox.add_pooled(self._rows.owner(int(flight.rows[index])).id, pooled)
        for index, captured in result.captured:
            if live[index]:
                self._outbox.add_captured(self._rows.owner(int(flight.rows[index])).id, captured)

    def _pass_on_prompt_scores(self, flight: Flight, result: StepResult, live: Bool) -> None:
        """What was scored before a preemption is not sent again."""
        for index, scores in result.prompt_logprobs:
            if not live[index]:
                continue
            request = self._rows.owner(int(flight.rows[index]))
            end = scores.start + len(scores.ids)
            known = max(0, request.prompt_scored - scores.start)
            if end > request.prompt_scored:
                request.prompt_scored = end
                self._outbox.add_prompt_logprobs(request.id, _without(scores, known))

    def _end_failed(self, flight: Flight, result: StepResult, live: Bool) -> None:
        """A failed row ends alone, and nothing of its KV is found again."""
        for index, error in result.failed:
            if live[index]:
                live[index] = False
                request = self._rows.owner(int(flight.rows[index]))
                self._end(request, "error", error=error, forget=True)

    def _name_full_blocks(self, flight: Flight, live: Bool) -> None:
        """A row whose tail has become a whole block: flush and name it, before the new token overwrites the tail."""
        count = flight.num_decodes
        full = (flight.position[:count] % self._kv.block_tokens == 0) & live[:count]
        rows = flight.rows[:count][full]
        if not len(rows):
            return
        owners = [self._rows.owner(row) for row in rows.tolist()]
        data, size = self._rows.tail[rows].tobytes(), self._kv.block_tokens * TOKEN_BYTES
        blocks = [data[at : at + size] for at in range(0, len(data), size)]
        self._rows.flush_blocks(owners, blocks)
        self._kv.register_each(owners, blocks)

    def _advance_prefills(self, flight: Flight, live: Bool, now: float) -> None:
        for index, request in flight.prefills:
            if not live[index]:
                continue
            computed = int(flight.position[index])
            self._kv.register(request, computed)
            if flight.sample[index]:
                if request.first_token_at is None:
                    request.first_token_at = now
                    self._outbox.add_cached(request.id, request.num_cached)
                request.reason = "running: decode"
            elif computed == request.length_limit:
                self._end(request, "length")

    def _take_tokens(self, flight: Flight, result: StepResult, sampled: Bool) -> int:
        if sampled.all():
            rows, position, tokens = flight.rows, flight.position, np.array(result.tokens)
        else:
            rows, position = flight.rows[sampled], flight.position[sampled]
            tokens = result.tokens[sampled]
        if not len(rows):
            return 0
        table = self._rows
        assert tokens.min() >= 0, "a sampled row has no token"
        table.tail[rows, position % table.block_tokens] = tokens
        table.known[rows] = position + 1
        logprobs = _by_row(result, sampled) if result.logprobs else []
        self._outbox.add_tokens(table.id[rows], tokens, logprobs)
        ends = self._gates.landed(table.id[rows].tolist(), tokens.tolist()) if self._gates else {}
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
        stops = (table.stops[:, rows] == tokens).any(axis=0)
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


def _by_row(result: StepResult, sampled: Bool) -> list[TokenLogprobs | None]:
    place: npt.NDArray[np.intp] = np.cumsum(sampled) - 1
    found: list[TokenLogprobs | None] = [None] * int(sampled.sum())
    for scores in result.logprobs:
        if sampled[scores.index]:
            found[int(place[scores.index])] = TokenLogprobs(scores.ids, scores.values, scores.rank)
    return found
