"""`AsyncLLM`: the engine as clients see it, over the sockets of one or several engine cores.

A generation becomes one engine request per answer, all on the core with the least to do; they are admitted as a whole:
one that finds the queue full is sent again as long as another one found room. What cores send is turned into
text as it arrives (so that a stop string ends an answer whether or not anybody reads), merged per answer until the
reader takes it. Plain path per token: a look-up, a detokenizer step, and per step one wake-up of the reader.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial

import msgspec

from headrace.base.config.resolved import TextSpec
from headrace.base.errors import (
    EngineDead,
    EngineError,
    NotFound,
    Unavailable,
)
from headrace.base.wire.request import AbortRequests, Hello, TokenBatch
from headrace.front.client.beam import beam_search
from headrace.front.client.connection import Connection
from headrace.front.client.events import Event, Events, Generation, Started
from headrace.front.client.fanout import best_of, choice_params
from headrace.front.client.inputs import InputChecker, Widths
from headrace.front.client.limits import Limits
from headrace.front.client.outputs import Answer
from headrace.front.client.room import Room
from headrace.front.client.stream import Stream
from headrace.front.client.together import left_of
from headrace.front.text.tokenizer import Tokenizer, load_tokenizer

# From this length on, further answers wait for the first one's prompt, to find its blocks in the prefix cache.
_SHARED_PROMPT_TOKENS = 64


class AsyncLLM:
    """Implements `events.Engine`. Belongs to the event loop in which `start` ran."""

    def __init__(
        self,
        text: TextSpec,
        socket_paths: Sequence[str],
        *,
        limits: Limits | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.text = text
        self.limits = limits or Limits()
        self.tokenizer = tokenizer or load_tokenizer(
            text.tokenizer_path, chat_template=text.chat_template
        )
        self._checker = InputChecker(self.tokenizer, self.limits)
        self._cores = [_Core(path, self.limits) for path in socket_paths]
        self._labels: dict[str, list[Stream]] = {}

    async def start(self) -> None:
        """Connects to every core and waits for its Hello."""
        for core in self._cores:
            core.connection.start()
        try:
            async with asyncio.timeout(self.limits.hello_timeout_s):
                for core in self._cores:
                    await core.connection.wait_ready()
        except TimeoutError:
            waited = f"{self.limits.hello_timeout_s:g} s"
            raise Unavailable(f"the engine is not ready after {waited}", retry_after_s=5) from None

    async def close(self) -> None:
        """Aborts what runs and closes the connections."""
        for core in self._cores:
            core.abort(list(core.running))
            await core.connection.close()

    @property
    def ready(self) -> bool:
        """Whether at least one core can take requests."""
        return any(not hello.trouble for hello in self._hellos)

    @property
    def trouble(self) -> str:
        """See `events.Engine.trouble`."""
        return next((hello.trouble for hello in self._hellos if hello.trouble), "")

    @property
    def _hellos(self) -> list[Hello]:
        return [c.connection.hello for c in self._cores if c.connection.hello is not None]

    @property
    def window(self) -> int:
        """See `events.Engine.window`: what the cores run in two steps."""
        return max(1, 2 * sum(hello.max_running for hello in self._hellos))

    @property
    def alive(self) -> bool:
        """Whether every core answers its heartbeat."""
        return all(core.connection.alive for core in self._cores)

    @property
    def num_in_flight(self) -> int:
        """Engine requests that run or wait."""
        return sum(len(core.running) for core in self._cores)

    @property
    def widths(self) -> Widths:
        """What bounds a request, by the model and by every core that is connected."""
        hellos = [c.connection.hello for c in self._cores if c.connection.hello is not None]
        lengths = [min(hello.max_model_len, hello.capacity_tokens) for hello in hellos]
        width = min([self.text.logits_width, *(hello.logits_width for hello in hellos)])
        context = min([self.text.max_model_len, *lengths])
        return Widths(logits_width=width, context_tokens=context, eos_ids=self.text.eos_ids)

    def check(self, generation: Generation) -> None:
        """Refuses a generation that `generate` would refuse for what the caller did wrong."""
        self._checker.check(generation, self.widths)

    def check_room(self) -> None:
        """See `events.Engine.check_room`: by the core that would get the next request."""
        core = self._least_loaded()
        core.room.check(core.connection.hello, len(core.running))

    def generate(self, generation: Generation) -> Events:
        """See `events.Engine.generate`."""
        params = generation.params
        if params.beam_width is not None:
            return beam_search(self, generation)
        if params.best_of is not None and params.best_of != params.n:
            return self._ranked(generation)
        return self.run(generation)

    async def _ranked(self, generation: Generation) -> Events:
        """`n` answers out of `best_of`."""
        self.check(generation)
        params = generation.params
        assert params.best_of is not None
        scored = params if params.logprobs is not None else _replace(params, logprobs=0)
        whole = _replace(generation, params=_replace(scored, n=params.best_of, best_of=None))
        async with aclosing(self.run(whole)) as events:
            keep = params.logprobs is not None
            ranked = best_of(events, n=params.n, candidates=params.best_of, keep_scores=keep)
            async for event in ranked:
                yield event

    async def run(self, generation: Generation, *, trusted: bool = False) -> AsyncGenerator[Event]:
        """`n` answers, without ranking. `trusted`: made by the engine's own code, beyond the limits for callers."""
        widths = self.widths
        if not trusted:
            self._checker.check(generation, widths)
        num_prompt, most_bytes = len(generation.prompt_ids), self.limits.max_pending_bytes
        again = partial(self._relaunch, generation, widths, time.monotonic())
        stream = Stream(self._least_loaded(), num_prompt, most_bytes, again)
        self._labels.setdefault(generation.label, []).append(stream)
        try:
            at_once = generation.params.n if num_prompt < _SHARED_PROMPT_TOKENS else 1
            self._launch(stream, generation, widths, range(at_once))
            events = await stream.next_events()
            self._launch(stream, generation, widths, range(at_once, generation.params.n))
            yield Started(num_prompt, stream.num_cached)
            while events:
                for event in events:
                    yield event
                events = await stream.next_events()
        finally:
            stream.abort()
            self._forget(generation.label, stream)

    async def explain(self, label: str) -> dict[str, object]:
        """See `events.Engine.explain`: what the core says about each answer, under "requests"."""
        requests: list[object] = []
        for stream in self._labels.get(label, []):
            if ids := list(stream.running):
                told = await stream.core.connection.call("explain", ids=ids)
                requests += msgspec.convert(told, dict[str, object]).values()
        if not requests:
            raise NotFound(f"request {label!r:.100} is not in flight", field="id")
        return {"id": label, "requests": requests}

    async def call(self, operation: str, **arguments: object) -> list[object]:
        """See `events.Engine.call`."""
        calls = [core.connection.call(operation, **arguments) for core in self._cores]
        return list(await asyncio.gather(*calls))

    def _least_loaded(self) -> _Core:
        ready = [c for c in self._cores if (h := c.connection.hello) and not h.trouble]
        if not ready:
            why = self.trouble or "the engine is starting; try again soon"
            raise Unavailable(why, retry_after_s=1.0)
        return min(ready, key=lambda core: len(core.running))

    def _launch(
        self, stream: Stream, generation: Generation, widths: Widths, indices: range
    ) -> None:
        for index in indices:
            params = choice_params(generation.params, index)
            request_id = secrets.randbits(63)
            one = generation if index == 0 else _replace(generation, params=params)
            request = self._checker.request(one, widths, request_id)
            answer = Answer(
                index=index,
                tokenizer=self.tokenizer,
                params=params,
                stop=request.stop,
                pieces=generation.pieces,
            )
            stream.core.connection.send(request)
            stream.add(request_id, answer)

    def _relaunch(
        self, generation: Generation, widths: Widths, made_at: float, stream: Stream, index: int
    ) -> None:
        """Sends one answer again that found no room."""
        self._launch(stream, left_of(generation, made_at), widths, range(index, index + 1))

    def _forget(self, label: str, stream: Stream) -> None:
        streams = self._labels[label]
        streams.remove(stream)
        if not streams:
            del self._labels[label]


class _Core:
    """One core: its connection, and who waits for which of its requests."""

    def __init__(self, path: str, limits: Limits) -> None:
        self.connection = Connection(path, self, limits)
        self.running: dict[int, Stream] = {}
        self.room = Room(time.monotonic)

    def abort(self, ids: list[int]) -> None:
        """Tells the core to end requests; one that is away has none."""
        if ids:
            with suppress(Unavailable):
                self.connection.send(AbortRequests(tuple(ids)))

    def on_tokens(self, batch: TokenBatch) -> None:
        """Hands a step's tokens and ends to their answers. Ids that are unknown have just been aborted."""
        running, scores = self.running, batch.logprobs
        for request_id, count in batch.cached:
            if (stream := running.get(request_id)) is not None:
                stream.running[request_id].num_cached = stream.num_cached = count
        if batch.prompt_logprobs or batch.pooled or batch.captured:
            self._take_states(batch)
        tokens: list[int] = batch.tokens.tolist()
        for i, request_id in enumerate(batch.ids.tolist()):
            stream = running.get(request_id)
            if stream is None:
                continue
            try:  # not `_own_failure`: once per token
                stream.token(request_id, tokens[i], scores[i] if scores else None)
            except Exception as error:
                self._failed(stream, request_id, error)
        for end in batch.finished:
            if (stream := running.get(end.id)) is not None:
                with self._own_failure(stream, end.id):
                    stream.finished(end)

    def _take_states(self, batch: TokenBatch) -> None:
        """What is told of prompts and layers."""
        running = self.running
        for request_id, prompt_scores in batch.prompt_logprobs:
            if (stream := running.get(request_id)) is not None:
                with self._own_failure(stream, request_id):
                    stream.running[request_id].add_prompt_scores(prompt_scores)
        for request_id, pooled in batch.pooled:
            if (stream := running.get(request_id)) is not None:
                stream.running[request_id].add_pooled(pooled)
        for request_id, captured in batch.captured:
            if (stream := running.get(request_id)) is not None:
                stream.running[request_id].add_captured(captured)

    def on_lost(self) -> None:
        """The core is gone: everything in flight fails at once."""
        for request_id, stream in list(self.running.items()):
            stream.fail(
                request_id,
                EngineDead("the engine process ended while it ran the request", retry_after_s=1.0),
            )

    @contextmanager
    def _own_failure(self, stream: Stream, request_id: int) -> Iterator[None]:
        """Whatever goes wrong with one answer is not the others' (P7)."""
        try:
            yield
        except Exception as error:
            self._failed(stream, request_id, error)

    def _failed(self, stream: Stream, request_id: int, error: Exception) -> None:
        self.abort([request_id])
        if request_id in stream.running:
            stream.fail(request_id, EngineError(f"internal error ({type(error).__name__})"))


_replace = msgspec.structs.replace
