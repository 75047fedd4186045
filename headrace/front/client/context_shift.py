"""Answers that go on where the context ends, and prompts longer than it (`--context-shift`, as
llama.cpp's server has it): the beginning is kept, of the rest the older half goes.

The engine is sent what is left as a prompt of its own, so that tokens are those of a prompt that
reads so: nothing is approximated, and the beginning is found in the prefix cache. The other half of
the context is computed again, once in so many tokens. An answer has at most as many tokens as the
context, however often it is shifted.

What an answer has behind a shift is not known to the engine as its own: penalties and
`min_tokens` of sampling look at it as a prompt, and noise has another seed, as places come again.
Left alone are answers under a grammar or a limit of reasoning, prompts with media, beams, and what
is told of whole prompts: there the context ends as it does otherwise.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError
from headrace.base.wire.request import Finished, TokenLogprobs
from headrace.front.client.admission_retry import left_of
from headrace.front.client.engine import AsyncLLM, choice_params, choice_seed
from headrace.front.client.events import Event, Generation
from headrace.front.client.limits import RequestBounds
from headrace.front.client.outputs import ChoiceState
from headrace.front.client.stream import GenerationStream

_SEEDS = 1 << 32
"""The seeds of shifted answers lie behind those of all answers."""
_SUMS = ("num_preemptions", "preempted_s", "hook_wait_s", "total_s", "num_drafted", "num_accepted")
_FIRST = ("num_cached", "scheduled_s", "first_token_s")
_replace = msgspec.structs.replace


def shifted(ids: list[int], *, keep: int, room: int) -> list[int]:
    """At most `room` of the ids: the first `keep`, and the newest of those behind them, of which as
    many halves of what is not kept are left out as must go."""
    half = (room - keep) // 2
    assert keep >= 0 and half > 0, (keep, room)
    excess = len(ids) - room
    return ids if excess <= 0 else ids[:keep] + ids[keep + -(-excess // half) * half :]


def most_tokens(context: int, *, shifts: bool) -> int | None:
    """How many tokens a text may stand for at most; None: it is shortened, and not refused."""
    return None if shifts else context


def may_shift(generation: Generation) -> bool:
    """Whether the answers of a generation may go on, and its prompt may be shortened."""
    params, rule = generation.params, generation.reasoning
    is_constrained = generation.grammar is not None or params.structured_outputs is not None
    whole_prompt = params.prompt_logprobs is not None or bool(params.capture_layers)
    is_text = not (generation.media or generation.encoder or generation.decoder_ids)
    has_budget = rule is not None and rule.budget is not None
    alone = params.beam_width is None and generation.pooling is None
    return alone and is_text and not (is_constrained or whole_prompt or has_budget)


@dataclass(eq=False, kw_only=True)
class _Part:
    """What an answer was asked for at `made_at`: `sent`, and the tokens of it that came. `left`:
    how many it may have from there on. `seed`: of the answer; `ends`: of the parts before."""

    sent: Generation
    left: int
    seed: int | None
    made_at: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    ends: tuple[Finished, ...] = ()


@dataclass(eq=False)
class ShiftingStream(GenerationStream):
    """Answers each of which goes on in another request when its context is full.

    `go_on(stream, part, answer)` asks for what is left of an answer. `parts`: by request;
    `refused`: by answer, of which the last part found no room and is sent again."""

    go_on: Callable[[ShiftingStream, _Part, ChoiceState], None] = field(kw_only=True)
    parts: dict[int, _Part] = field(default_factory=dict)
    refused: dict[int, _Part] = field(default_factory=dict)

    def token(self, request_id: int, token_id: int, scored: TokenLogprobs | None) -> None:
        """See GenerationStream."""
        part = self.parts.get(request_id)
        if part is not None:
            part.ids.append(token_id)
        super().token(request_id, token_id, scored)

    def finished(self, end: Finished) -> None:
        """See GenerationStream."""
        part, answer = self.parts.pop(end.id, None), self.running[end.id]
        if part is None:
            super().finished(end)
        elif end.error is not None:
            if part.ends:
                self.refused[answer.index] = part
            super().finished(end)
        elif end.reason == "length" and 0 < len(part.ids) < part.left and not answer.done:
            part.ends = (*part.ends, end)
            self._remove(end.id)
            self.core.admission.ended()
            self._go_on(part, answer)
        else:
            super().finished(joined((*part.ends, end)))

    def _go_on(self, part: _Part, answer: ChoiceState) -> None:
        try:
            self.go_on(self, part, answer)
        except HeadraceError as error:
            answer.error = error
            self.wake(answer)

    def _go_again(self, answer: ChoiceState) -> None:
        part = self.refused.pop(answer.index, None)
        if part is None:
            super()._go_again(answer)
            return
        del self.waiting[answer.index]
        answer.error, answer.done = None, False
        self._go_on(part, answer)

    def _remove(self, request_id: int) -> ChoiceState:
        self.parts.pop(request_id, None)
        return super()._remove(request_id)


def joined(ends: tuple[Finished, ...]) -> Finished:
    """One end of an answer in parts."""
    first, *others = ends
    for end in others:
        sums = {name: getattr(first, name) + getattr(end, name) for name in _SUMS}
        firsts = {name: getattr(first, name) for name in _FIRST}
        first = _replace(end, **sums, **firsts)
    return first


class ShiftingLLM(AsyncLLM):
    """An engine client that keeps the first `keep` tokens of a context and shifts the others."""

    def __init__(self, *arguments: Any, keep: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._keep = keep
        self._new_stream = partial(ShiftingStream, go_on=self._go_on)

    def check(self, generation: Generation) -> None:
        """See AsyncLLM."""
        super().check(self._shortened(generation))

    def run(self, generation: Generation, *, trusted: bool = False) -> AsyncGenerator[Event]:
        """See AsyncLLM."""
        return super().run(self._shortened(generation), trusted=trusted)

    def _shortened(self, generation: Generation) -> Generation:
        """With a prompt that fits."""
        ids, params = generation.prompt_ids, generation.params
        wanted = 0 if params.max_tokens == 0 else max(params.min_tokens, 1)
        room, keep = self.context_tokens - wanted, self._kept(ids)
        if len(ids) <= room or room < keep + 2 or not may_shift(generation):
            return generation
        return _replace(generation, prompt_ids=shifted(ids, keep=keep, room=room))

    def _kept(self, ids: list[int]) -> int:
        """How many tokens stay; that of a text's beginning always does."""
        starts = bool(ids) and ids[0] == self.tokenizer.special_id("bos_token")
        return max(self._keep, int(starts))

    def _launch(
        self,
        stream: GenerationStream,
        generation: Generation,
        bounds: RequestBounds,
        indices: range,
    ) -> None:
        before = set(stream.running)
        super()._launch(stream, generation, bounds, indices)
        assert isinstance(stream, ShiftingStream), stream
        for request_id in stream.running.keys() - before if may_shift(generation) else ():
            params = choice_params(generation.params, stream.running[request_id].index)
            most = bounds.context_tokens if params.max_tokens is None else params.max_tokens
            sent = _replace(generation, params=params)
            stream.parts[request_id] = _Part(sent=sent, left=most, seed=params.seed)

    def _go_on(self, stream: ShiftingStream, part: _Part, answer: ChoiceState) -> None:
        """Asks for what is left of an answer whose context is full."""
        before, came, bounds = part.sent, len(part.ids), self.bounds
        whole, left = [*before.prompt_ids, *part.ids], part.left - came
        room = min(bounds.context_tokens, len(whole)) - 1 if came else bounds.context_tokens
        params = _replace(
            before.params,
            max_tokens=left,
            min_tokens=max(0, before.params.min_tokens - came),
            seed=choice_seed(part.seed, _SEEDS + len(part.ends)),
        )
        ids = shifted(whole, keep=self._kept(whole), room=room)
        sent = _replace(left_of(before, part.made_at), prompt_ids=ids, params=params, hints=None)
        request_id = secrets.randbits(63)
        stream.core.connection.send(self._checker.request(sent, bounds, request_id))
        stream.add(request_id, answer)
        rest = _Part(sent=sent, left=left, seed=part.seed, ends=part.ends)
        stream.parts[request_id] = rest
