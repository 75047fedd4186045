"""`AsyncLLM`: the engine as clients see it, over the sockets of one or several engine cores.

A generation becomes one engine request per answer, all on the core with the least to do; they are
admitted as a whole: one that finds the queue full is sent again as long as another one found room.
What cores send is turned into text as it arrives (so that a stop string ends an answer whether or
not anybody reads), merged per answer until the reader takes it. Plain path per token: a look-up, a
detokenizer step, and per step one wake-up of the reader."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from headrace.base import splitmix
from headrace.base.config.resolved import TextSpec
from headrace.base.errors import HeadraceError, NotFound, Unavailable
from headrace.base.wire.control import Hello
from headrace.base.wire.request import SamplingParams
from headrace.base.wire.retention import without_transfer
from headrace.front.client.admission_retry import left_of
from headrace.front.client.beam import beam_search
from headrace.front.client.events import (
    Event,
    Events,
    Generation,
    Started,
)
from headrace.front.client.inputs import InputChecker
from headrace.front.client.known_media import with_media
from headrace.front.client.limits import Limits, RequestBounds
from headrace.front.client.outputs import ChoiceState
from headrace.front.client.ranked import best_of
from headrace.front.client.replicas import Replicas
from headrace.front.client.stream import CoreHandle, GenerationStream
from headrace.front.client.weights import push_weights
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.tokenizer_files import load_tokenizer

# From this length on, further answers wait for the first one's prompt, to find its cached blocks.
_SHARED_PROMPT_TOKENS = 64


class AsyncLLM:
    """Implements `events.EngineClient`. Belongs to the event loop in which `start` ran. So many
    `replicas` of the cores are always there, None: all; the others may come and go.
    `share_experts`: see Replicas."""

    def __init__(
        self,
        text: TextSpec,
        socket_paths: Sequence[str],
        *,
        limits: Limits | None = None,
        tokenizer: Tokenizer | None = None,
        replicas: int | None = None,
        share_experts: bool = False,
    ) -> None:
        self.text = text
        self.limits = limits or Limits()
        self.tokenizer = tokenizer or load_tokenizer(
            text.tokenizer_path, chat_template=text.chat_template
        )
        self._checker = InputChecker(self.tokenizer, self.limits)
        self._cores = [CoreHandle(path, self.limits) for path in socket_paths]
        self.replicas = Replicas(
            self._cores,
            replicas,
            start_s=self.limits.hello_timeout_s,
            share_experts=share_experts,
        )
        self._labels: dict[str, list[GenerationStream]] = {}
        self._new_stream: Callable[..., GenerationStream] = GenerationStream

    async def start(self) -> None:
        """Connects to every core and waits for its Hello."""
        for core in self._cores:
            core.connection.start()
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Waits for the Hello of every core; Unavailable if one does not come in time."""
        try:
            async with asyncio.timeout(self.limits.hello_timeout_s):
                for core in self.replicas.expected:
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
        """See `events.EngineClient.trouble`."""
        reasons = (hello.trouble or hello.failing for hello in self._hellos)
        return next((reason for reason in reasons if reason), "")

    @property
    def _hellos(self) -> list[Hello]:
        return [c.connection.hello for c in self._cores if c.connection.hello is not None]

    @property
    def window(self) -> int:
        """See `events.EngineClient.window`: what the cores run in two steps."""
        return max(1, 2 * sum(hello.max_running for hello in self._hellos))

    @property
    def window_tokens(self) -> int:
        """See `events.EngineClient.window_tokens`: what the cores compute in two steps."""
        return max(1, 2 * sum(hello.step_tokens for hello in self._hellos))

    @property
    def cached_block_tokens(self) -> int:
        """See `events.EngineClient.cached_block_tokens`."""
        return max((hello.cached_block_tokens for hello in self._hellos), default=0)

    @property
    def alive(self) -> bool:
        """See `events.EngineClient.alive`: one of several replicas is enough."""
        return any(core.serves for core in self._cores)

    @property
    def degraded(self) -> bool:
        """See `events.EngineClient.degraded`."""
        return not all(core.serves for core in self.replicas.expected)

    @property
    def stalled(self) -> bool:
        """See `events.EngineClient.stalled`."""
        return any(hello.stalled for hello in self._hellos)

    @property
    def held(self) -> str:
        """See `events.EngineClient.held`."""
        reasons = [hello.held for hello in self._hellos]
        return reasons[0] if reasons and all(reasons) else ""

    @property
    def connected(self) -> tuple[int, int]:
        """See `events.EngineClient.connected`."""
        return len(self._hellos), len(self.replicas.expected)

    @property
    def adapters(self) -> Sequence[str]:
        """See `events.EngineClient.adapters`: those that every core has."""
        each = [hello.adapters for hello in self._hellos]
        return [name for name in each[0] if all(name in one for one in each)] if each else []

    @property
    def weights_version(self) -> str:
        """See `events.EngineClient.weights_version`."""
        return ",".join(dict.fromkeys(hello.weights_version for hello in self._hellos))

    async def update_weights(
        self, source: str | Mapping[str, Any], *, version: str = "", mode: str = "wait"
    ) -> str:
        """New weights in place of the present ones, as `LLM.update_weights`; their version."""
        return await push_weights(self, source, version=version, mode=mode)

    @property
    def context_tokens(self) -> int:
        """See `events.EngineClient.context_tokens`."""
        return self.bounds.context_tokens

    @property
    def num_in_flight(self) -> int:
        """Engine requests that run or wait."""
        return sum(len(core.running) for core in self._cores)

    @property
    def bounds(self) -> RequestBounds:
        """What bounds a request, by the model and by every core that is connected."""
        text, hellos = self.text, self._hellos
        lengths = [min(hello.max_model_len, hello.capacity_tokens) for hello in hellos]
        return RequestBounds(
            logits_width=min([text.logits_width, *(hello.logits_width for hello in hellos)]),
            context_tokens=min([text.max_model_len, *lengths]),
            eos_ids=text.eos_ids,
            encoder_tokens=text.encoder_tokens,
            encoder_vocabulary=text.encoder_vocabulary,
            decoder_start=text.decoder_start,
            sees_alone=text.media is not None and text.media.alone,
        )

    def check(self, generation: Generation) -> None:
        """Refuses a generation that `generate` would refuse for what the caller did wrong."""
        self._checker.check(generation, self.bounds)

    def check_queue(self, deadline_s: float | None = None) -> None:
        """See `events.EngineClient.check_queue`: by the core that would get the next request."""
        core = self._least_loaded()
        core.admission.check(core.connection.hello, len(core.running))
        if deadline_s is not None:
            core.admission.check_deadline(deadline_s)

    def generate(self, generation: Generation) -> Events:
        """See `events.EngineClient.generate`."""
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
        """`n` answers, without ranking. `trusted`: made by the engine's own code, beyond the limits
        for callers."""
        bounds = self.bounds
        if not trusted:
            self._checker.check(generation, bounds)
        num_prompt = len(generation.prompt_ids)
        again = partial(self._relaunch, generation, bounds, time.monotonic())
        core = self._least_loaded()
        if generation.media:
            generation = await core.with_room(generation)
        if not trusted:
            _check_deadline(core, generation, bounds)
        stream = self._new_stream(
            core,
            num_prompt,
            self.limits.max_pending_bytes,
            again,
            on_queued=generation.on_queued,
        )
        self._labels.setdefault(generation.label, []).append(stream)
        try:
            at_once = generation.params.n if num_prompt < _SHARED_PROMPT_TOKENS else 1
            self._launch(stream, generation, bounds, range(at_once))
            events = await stream.next_events()
            self._launch(stream, generation, bounds, range(at_once, generation.params.n))
            started = Started(num_prompt, stream.num_cached)
            yield with_media(started, generation.media) if generation.media else started
            while events:
                for event in events:
                    yield event
                events = await stream.next_events()
        finally:
            stream.abort()
            self._forget(generation.label, stream)

    async def explain(self, label: str, *, tenant: str | None = None) -> dict[str, object]:
        """See `events.EngineClient.explain`: what the cores, which know the requests of every API
        process, say about each answer, under "requests"."""
        replies = await self.call_each("explain", labels=[label], tenant=tenant)
        requests: list[object] = []
        for reply in replies:
            if not isinstance(reply, BaseException):
                requests += msgspec.convert(reply, dict[str, object]).values()
        if not requests:
            raise NotFound(f"request {label!r:.100} is not in flight", field="id")
        return {"id": label, "requests": requests}

    async def call(self, operation: str, **arguments: object) -> list[object]:
        """See `events.EngineClient.call`."""
        calls = [core.connection.call(operation, **arguments) for core in self.replicas.expected]
        return list(await asyncio.gather(*calls))

    async def call_each(self, operation: str, **arguments: object) -> list[object]:
        """See `events.EngineClient.call_each`."""
        calls = [core.connection.call(operation, **arguments) for core in self.replicas.expected]
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, HeadraceError):
                raise reply
        return list(replies)

    def _least_loaded(self) -> CoreHandle:
        ready = [c for c in self._cores if (h := c.connection.hello) and not h.trouble]
        if not ready:
            why = self.trouble or "the engine is starting; try again soon"
            raise Unavailable(why, retry_after_s=1.0)
        # A core that is stuck gets nothing while another one answers.
        return min(ready, key=lambda core: (not core.serves, len(core.running)))

    def _launch(
        self,
        stream: GenerationStream,
        generation: Generation,
        bounds: RequestBounds,
        indices: range,
    ) -> None:
        for index in indices:
            one = choice_of(generation, index)
            request_id = secrets.randbits(63)
            request = self._checker.request(one, bounds, request_id)
            answer = ChoiceState(
                index=index,
                tokenizer=self.tokenizer,
                params=one.params,
                stop=request.stop,
                pieces=generation.pieces,
            )
            if (hello := stream.core.connection.hello) is not None:
                answer.weights_version = hello.weights_version
            stream.core.connection.send(request)
            stream.add(request_id, answer)

    def _relaunch(
        self,
        generation: Generation,
        bounds: RequestBounds,
        made_at: float,
        stream: GenerationStream,
        index: int,
    ) -> None:
        """Sends one answer again that found no room."""
        self._launch(stream, left_of(generation, made_at), bounds, range(index, index + 1))

    def _forget(self, label: str, stream: GenerationStream) -> None:
        streams = self._labels[label]
        streams.remove(stream)
        if not streams:
            del self._labels[label]


def _check_deadline(core: CoreHandle, generation: Generation, bounds: RequestBounds) -> None:
    """Refuses what would miss its deadline by the load that the core published last."""
    load = core.admission.load
    if generation.deadline_s is None or not load.dues:
        return
    params = generation.params
    most = bounds.context_tokens if params.max_tokens is None else params.max_tokens
    output = load.output_of(min_tokens=params.min_tokens, max_tokens=most)
    num_prompt = len(generation.prompt_ids)
    service_s = load.service_s(num_prompt=num_prompt, output_tokens=output)
    core.admission.check_deadline(generation.deadline_s, service_s=service_s)


_replace = msgspec.structs.replace


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of answer `index`: SplitMix64 of seed and index; 63 bits."""
    if seed is None or index == 0:
        return seed
    return splitmix.mix(seed + index * splitmix.GAMMA) >> 1


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer `index`; only answer 0 scores the prompt and tells its attention."""
    if index == 0:
        return params
    seed = choice_seed(params.seed, index)
    return _replace(params, seed=seed, prompt_logprobs=None, capture_layers=())


def choice_of(generation: Generation, index: int) -> Generation:
    """What answer `index` asks for; the prompt's KV passes between servers with answer 0 alone."""
    if index == 0:
        return generation
    params = choice_params(generation.params, index)
    return _replace(generation, params=params, hints=without_transfer(generation.hints))
