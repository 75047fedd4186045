"""`LLM`: the engine for scripts. Starts a core on this machine, runs `AsyncLLM` in a thread,
answers with objects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

import msgspec

from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.base.wire.media import MediaInput
from headrace.base.wire.pooling import RowPooling
from headrace.base.wire.request import SamplingParams
from headrace.front.client.admission_retry import all_of
from headrace.front.client.chat_output import ChatOutputParser, ToolCallOutput
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.events import (
    AttentionWeights,
    Delta,
    Ended,
    Event,
    Generation,
    PromptScored,
    ScoredToken,
)
from headrace.front.client.limits import Limits
from headrace.front.client.offline_media import OfflineMedia, PromptWithMedia
from headrace.front.client.pooling import (
    Float32,
    PooledAnswer,
    behind_lead,
    finish_embedding,
    fold_pooled,
    pooling_generation,
    probabilities,
)
from headrace.front.client.progress import progress_bar
from headrace.front.text.chat import ChatTemplate

T = TypeVar("T")
Prompt = str | list[int] | PromptWithMedia
Message = dict[str, Any]
_MOST_IN_FLIGHT = 512
_LIMITS = Limits(
    max_n=1024,
    max_logprobs=1 << 20,
    max_prompt_logprobs=1 << 20,
    max_named_logprobs=1 << 20,
    max_pending_bytes=1 << 40,
)


class Completion(msgspec.Struct, kw_only=True):
    """One answer. `finish_reason`: stop, length or abort; `stop` is the stop string or stop id that
    matched. In a chat `text` is what the model says; what it thinks is `reasoning`, what it asks
    for `tool_calls`."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallOutput] = []
    token_ids: list[int] = []
    logprobs: list[ScoredToken] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str = ""
    stop: str | int | None = None


class Output(msgspec.Struct, kw_only=True):
    """A prompt (None if it was given as ids) and its answers. `weights_version`: of the last one's
    weights, with commas between several; `kv_transfer_params`: where its hidden states are."""

    prompt: str | None
    prompt_ids: list[int]
    prompt_logprobs: list[ScoredToken | None] | None = None
    outputs: list[Completion] = []
    num_cached: int = 0
    weights_version: str = ""
    kv_transfer_params: dict[str, str | None] | None = None

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text


class LLM:
    """A model on this machine. Use it as a context manager, or call `close`.

    `options` are the fields of the configuration tree by name: `LLM("folder", max_running=8,
    kv_memory="2GiB")`."""

    def __init__(self, model: str = "", **options: object) -> None:
        from headrace.launch.local import start_local  # the only heavy import, and only here

        self._local = start_local(options_from(model=model, **options))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            text = self._local.resolved.text
            self.engine = AsyncLLM(text, self._local.socket_paths, limits=_LIMITS)
            self.tokenizer = self.engine.tokenizer
            source = self.tokenizer.facts.chat_template
            self.chat_template = ChatTemplate(source, self.tokenizer, max_tokens=text.max_model_len)
            self._listener = ChatOutputParser(text, self.tokenizer)
            self._media = OfflineMedia(text, self.tokenizer, self.chat_template)
            self._defaults = text.generation_defaults
            self._pooling = text.pooling
            self._wait(self.engine.start())
        except BaseException:
            self._stop()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str = "",
        progress: bool = True,
    ) -> list[Output]:
        """Continues each prompt (text, token ids, or either with media), by `adapter` if named; one
        output per prompt, in order."""
        wanted = prompt_list(prompts)
        each = params_list(params, len(wanted), self._defaults)
        generations = [
            Generation(prompt_ids=ids, params=one, media=media, adapter=adapter)
            for (ids, media), one in zip(self._encoded(wanted), each, strict=True)
        ]
        outputs = self._wait(run_all(self.engine, generations, run_one, show=progress))
        for output, prompt in zip(outputs, wanted, strict=True):
            text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
            output.prompt = text if isinstance(text, str) else None
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[Output]:
        """Answers one conversation, or several; one output per conversation, in order. Reasoning
        and calls of `tools` are told apart from what is said."""
        single = bool(messages) and isinstance(messages[0], dict)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        encoded = [
            self._media.rendered(
                conversation,
                self._wait,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=template_arguments,
            )
            for conversation in conversations
        ]
        each = params_list(params, len(encoded), self._defaults)
        listener = self._listener
        generations = [
            msgspec.structs.replace(listener.generation(ids, one), media=media)
            for (ids, media), one in zip(encoded, each, strict=True)
        ]
        outputs = self._wait(run_all(self.engine, generations, run_one, show=progress))
        for output, conversation in zip(outputs, conversations, strict=True):
            unfinished = str(conversation[-1]["content"]) if continue_final_message else None
            for answer in output.outputs:
                parser = listener.parser(output.prompt_ids, tools=tools, unfinished=unfinished)
                chat_output = listener.whole(parser, answer.text)
                answer.text, answer.reasoning = chat_output.content, chat_output.reasoning
                answer.tool_calls = chat_output.tool_calls
        return outputs

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        progress: bool = True,
    ) -> list[Float32]:
        """The embedding of each prompt, float32 [width]; pooled and normalized as the checkpoint
        says."""
        spec = self._pooling
        answers = self.pool(prompts, how=spec.how, progress=progress)
        wanted = spec.normalize if normalize is None else normalize
        return [
            finish_embedding(answer.values[0], dimensions=dimensions, normalize=wanted)
            for answer in answers
        ]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, progress: bool = True
    ) -> list[Float32]:
        """The score of each label (`labels`) for each prompt, float32 [labels]."""
        spec = self._pooling
        if not spec.labels:
            raise ConfigError("the model has no classification head")
        answers = self.pool(prompts, how=spec.how, head=True, progress=progress)
        return [probabilities(answer.values[0], spec.activation) for answer in answers]

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of what `classify` scores; empty without a classification head."""
        return self._pooling.labels

    def pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        how: str,
        head: bool = False,
        progress: bool = True,
    ) -> list[PooledAnswer]:
        """Hidden states as they come: `how` is cls, last, mean or tokens; `head` puts them through
        the classifier."""
        generations = []
        for ids, media in self._encoded(prompt_list(prompts)):
            first = behind_lead(ids, self._pooling, self.tokenizer)
            pooling = RowPooling(how=how, head=head, first=first)
            one = pooling_generation(ids, pooling)
            generations.append(msgspec.structs.replace(one, media=media))
        return self._wait(run_all(self.engine, generations, pool_one, show=progress))

    def update_weights(
        self, source: str | Mapping[str, Any], *, version: str = "", mode: str = "wait"
    ) -> str:
        """Puts new weights in place of the present ones, between steps; returns their version
        (without one given: 1, 2, ...), which outputs name from then on.

        `source`: a folder of safetensors, or tensors (torch, NumPy) by their checkpoint names; all
        of a model's or some. `mode`: what becomes of what runs: abort, wait or keep."""
        return self._wait(self.engine.update_weights(source, version=version, mode=mode))

    @property
    def weights_version(self) -> str:
        """That of the weights now; "" before the first update."""
        return self.engine.weights_version

    def close(self) -> None:
        """Ends the engine and frees what it holds; idempotent."""
        if self._thread.is_alive():
            self._wait(self.engine.close())
        self.chat_template.close()
        self._media.close()
        self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encoded(self, prompts: list[Prompt]) -> list[tuple[list[int], tuple[MediaInput, ...]]]:
        bounds = self.engine.bounds
        most = bounds.encoder_tokens or bounds.context_tokens
        return [self._media.encoded(prompt, self._wait, most) for prompt in prompts]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._local.close()


async def run_all(
    engine: AsyncLLM,
    generations: list[Generation],
    run: Callable[[AsyncLLM, Generation], Awaitable[T]],
    *,
    show: bool,
) -> list[T]:
    """Runs all generations, a bounded number at a time; all are checked before the first one
    starts.

    The first that fails ends the others, and its error is raised.
    """
    for generation in generations:
        engine.check(generation)
    room = asyncio.Semaphore(_MOST_IN_FLIGHT)
    with progress_bar(len(generations), show=show) as advance:

        async def one(generation: Generation) -> T:
            async with room:
                answer = await run(engine, generation)
            advance(num_output(answer))
            return answer

        return await all_of(one(generation) for generation in generations)


def num_output(answer: object) -> int:
    """Tokens generated for one prompt; a pooled answer has none."""
    return sum(len(one.token_ids) for one in answer.outputs) if isinstance(answer, Output) else 0


async def pool_one(engine: AsyncLLM, generation: Generation) -> PooledAnswer:
    """The fold of one pooled generation's events."""
    return await fold_pooled(engine.generate(generation), num_prompt=len(generation.prompt_ids))


async def run_one(engine: AsyncLLM, generation: Generation) -> Output:
    """The fold of one generation's events."""
    output = Output(prompt=None, prompt_ids=generation.prompt_ids)
    async with aclosing(cast("Any", engine.generate(generation))) as events:
        async for event in events:
            fold(output, event)
    output.outputs.sort(key=lambda answer: answer.index)
    return output


def fold(output: Output, event: Event) -> None:
    """Adds one event to an output."""
    if isinstance(event, PromptScored):
        output.prompt_logprobs = event.scores
    elif isinstance(event, Delta):
        answer = _answer(output, event.index)
        answer.text += event.text
        answer.token_ids += event.token_ids
        if event.scores is not None:
            answer.logprobs = [*(answer.logprobs or []), *event.scores]
    elif isinstance(event, AttentionWeights) and event.states_path is not None:
        output.kv_transfer_params = {"hidden_states_path": event.states_path or None}
    elif isinstance(event, Ended):
        answer = _answer(output, event.index)
        answer.finish_reason, answer.stop = event.reason, event.stop
        answer.cumulative_logprob = event.cumulative_logprob
        output.num_cached = max(output.num_cached, event.num_cached)
        output.weights_version = event.weights_version


def _answer(output: Output, index: int) -> Completion:
    for answer in output.outputs:
        if answer.index == index:
            return answer
    output.outputs.append(Completion(index=index))
    return output.outputs[-1]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str | dict):
        return [prompts]
    several = cast("Sequence[Any]", prompts)
    if several and isinstance(several[0], int):
        return [cast("Prompt", prompts)]
    return list(several)


def params_list(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    defaults: Mapping[str, float | int],
) -> list[SamplingParams]:
    """Parameters for each of `count` prompts; without any, the model's own defaults."""
    if params is None:
        params = msgspec.convert(dict(defaults), SamplingParams)
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ConfigError(f"params: {len(params)} for {count} prompts; give one, or one for each")
    return list(params)


def options_from(**params: object) -> Options:
    """The configuration tree from its fields by name, whatever section they stand in."""
    sections = {field.name: field.type for field in msgspec.structs.fields(Options)}
    homes = {
        field.name: section
        for section, kind in sections.items()
        for field in msgspec.structs.fields(kind)
    }
    tree: dict[str, dict[str, object]] = {section: {} for section in sections}
    for name, value in params.items():
        if name not in homes:
            raise ConfigError(f"{name}: no such option (known: {', '.join(sorted(homes))})")
        tree[homes[name]][name] = value
    try:
        return msgspec.convert(tree, Options)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
