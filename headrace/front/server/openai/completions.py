"""POST /v1/completions: prompts to generations, events to chunks, events to the full answer.

A request may hold several prompts; the choice index is prompt * n + sample. `echo` puts the prompt
in front of each text; with `logprobs` it carries the prompt's scores too, the first null: scoring
clients depend on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson
from starlette.responses import Response

from headrace.base.config.server_options import ServerSettings
from headrace.base.errors import InvalidRequest
from headrace.front.client.admission_retry import RetryingEngine
from headrace.front.client.events import Delta, Ended, Event, PromptScored, ScoredToken, Started
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.fold import (
    Fold,
    Spans,
    Tally,
    TextOffsets,
    captured_documents,
    completion_logprobs,
    finish_reason,
    request_metrics,
    scores_by_id,
    stop_reason,
    usage,
)
from headrace.front.server.conversation.pipeline import generate, streamed
from headrace.front.server.conversation.prompts import Prompt, prompt_of, prompts_of, spans
from headrace.front.server.conversation.request import CompletionRequest, completion_params, parse
from headrace.front.server.conversation.resolved import AnswerFields, answer_fields, run_options
from headrace.front.server.conversation.stages import joined
from headrace.front.server.conversation.structured import plain_structure
from headrace.front.server.http.auth import completion_id
from headrace.front.server.http.sse import DONE, Chunks
from headrace.front.text.languages import languages_of
from headrace.front.text.threads import TEXT_THREADS

_PLAIN_END = b',"logprobs":null,"finish_reason":null}]'
"""Behind the text of a delta without scores; the end of its choice."""


@dataclass(frozen=True, kw_only=True)
class CompletionReply:
    """What all chunks of one answer share."""

    id: str
    model: str
    created: int
    request: CompletionRequest
    prompts: list[Prompt]
    fields: AnswerFields
    spans: Spans | None = None

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.request.n or 1


async def post_completions(context: RequestContext, document: Any) -> Response:
    """POST /v1/completions."""
    request = parse(document, CompletionRequest)
    services = context.services
    model = services.model_name(request.model)
    params = completion_params(
        request,
        defaults=services.text.generation_defaults,
        max_n=services.server.max_n,
        max_logprobs=services.server.max_logprobs,
    )
    sent_prompts = prompts_of(request)
    if len(sent_prompts) > 1:
        if request.kv_transfer_params is not None:
            raise InvalidRequest(
                f"kv_transfer_params: goes with one prompt, {len(sent_prompts)} are given",
                field="kv_transfer_params",
            )
        context.retrying_engine = RetryingEngine(services.engine)
    structure = plain_structure(request)
    run = run_options(request, "" if model in services.text.model_names else model)
    context.hold_place()
    prompts = [await prompt_of(context, request, prompt) for prompt in sent_prompts]
    context.body_is_read()
    if request.target_language is not None:
        start = languages_of(services.tokenizer).start(
            services.text.decoder_start, request.target_language
        )
        run = replace(run, decoder_ids=start)
    label = completion_id("cmpl")
    events = joined(
        [
            generate(
                context,
                p.ids,
                params,
                run,
                label=f"{label}-{i}" if i else label,
                structure=structure,
                media=p.media,
            )
            for i, p in enumerate(prompts)
        ],
        window=max(1, services.engine.window // params.n),
    )
    reply = CompletionReply(
        id=label,
        model=model,
        created=int(time.time()),
        request=request,
        prompts=prompts,
        fields=completion_fields(request, services.server),
        spans=partial(spans, services.tokenizer) if request.return_token_offsets else None,
    )
    if request.stream:
        return await streamed(context, to_chunks(events, reply), pads=reply.fields.pads)
    return Response(await to_answer(events, reply), media_type="application/json")


def completion_fields(request: CompletionRequest, settings: ServerSettings) -> AnswerFields:
    """What the answer shows beside its text."""
    scores = request.logprobs is not None or request.logprob_token_ids is not None
    return answer_fields(request, settings, scores=scores)


async def to_chunks(
    events: AsyncGenerator[tuple[int, Event], None], reply: CompletionReply
) -> Chunks:
    """The stream of all prompts' events, each with the number of its prompt."""
    fields = reply.fields
    with_usage, continuous = fields.with_usage, fields.continuous_usage
    held: dict[int, dict[str, Any]] = {}  # the last delta of a choice that waits for its end
    tallies = [Tally(reply.n) for _ in reply.prompts]
    offsets = [[TextOffsets() for _ in range(reply.n)] for _ in reply.prompts]
    scored: dict[int, list[ScoredToken | None]] = {}
    unsaid = set(range(len(tallies))) if reply.request.echo else set[int]()
    plain = not (continuous or fields.token_ids or fields.as_vllm)
    heads = [_delta_head(reply, at) for at in range(len(tallies) * reply.n)] if plain else []
    tail = _PLAIN_END + (b',"usage":null}\n\n' if with_usage else b"}\n\n")

    def chunk(choice: dict[str, Any]) -> bytes:
        document = envelope(reply, [choice])
        if with_usage:
            document["usage"] = usage(tallies) if continuous else None
        return b"data: " + orjson.dumps(document) + b"\n\n"

    async with aclosing(events):
        async for number, event in events:
            tallies[number].take(event)
            if number in unsaid and isinstance(event, Delta | Ended):
                unsaid.remove(number)
                for sample in range(reply.n):
                    said = scored.get(number), number, sample, offsets[number][sample]
                    yield chunk(_echo(reply, *said))
            match event:
                case Delta() if plain and not event.scores:
                    head, text = heads[number * reply.n + event.index], orjson.dumps(event.text)
                    yield head + text + tail
                case Delta():
                    piece = _delta(reply, number, event, offsets[number][event.index])
                    if fields.as_vllm and event.last:
                        held[piece["index"]] = piece
                    else:
                        yield chunk(piece)
                case PromptScored():
                    scored[number] = event.scores
                case Ended():
                    last = held.pop(number * reply.n + event.index, None)
                    yield chunk(_end(reply, number, event, last))
                case Started() if not reply.request.echo and (
                    facts := _prompt_facts(reply, number)
                ):
                    yield chunk(plain_choice(reply, number, 0, "") | facts)
    if with_usage:
        last_words = envelope(reply, []) | {"usage": usage(tallies)} | _times(reply, tallies)
        yield b"data: " + orjson.dumps(last_words) + b"\n\n"
    yield DONE


def envelope(reply: CompletionReply, choices: list[dict[str, Any]]) -> dict[str, Any]:
    tier = reply.request.service_tier
    return {
        "id": reply.id,
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
        **({} if tier is None else {"service_tier": tier}),
        "choices": choices,
    }


def plain_choice(reply: CompletionReply, number: int, sample: int, text: str) -> dict[str, Any]:
    return {
        "index": number * reply.n + sample,
        "text": text,
        "logprobs": None,
        "finish_reason": None,
    }


def _delta_head(reply: CompletionReply, index: int) -> bytes:
    """The bytes of a plain delta's chunk up to its text."""
    whole = orjson.dumps(envelope(reply, [plain_choice(reply, 0, index, "")]))
    return b"data: " + whole.removesuffix(b'""' + _PLAIN_END + b"}")


def _echo(
    reply: CompletionReply,
    scores: list[ScoredToken | None] | None,
    number: int,
    sample: int,
    offsets: TextOffsets,
) -> dict[str, Any]:
    prompt = reply.prompts[number]
    choice = plain_choice(reply, number, sample, prompt.text)
    if reply.request.logprobs is not None and scores is not None:
        choice["logprobs"] = completion_logprobs(
            scores,
            first=prompt.first,
            offsets=offsets,
            as_id=reply.fields.tokens_as_ids,
            sampled_first=reply.fields.as_vllm,
        )
    return choice | _prompt_facts(reply, number)


def _prompt_facts(reply: CompletionReply, number: int) -> dict[str, Any]:
    """What is told of a prompt, if anything is asked."""
    prompt = reply.prompts[number]
    facts: dict[str, Any] = {}
    if reply.request.return_token_ids:
        facts["prompt_token_ids"] = prompt.ids
    if prompt.control_text is not None:
        facts["prompt_text"] = prompt.control_text
    if reply.spans is not None:
        facts["prompt_token_offsets"] = reply.spans(prompt.ids, continues=False)
    return facts


def _delta(
    reply: CompletionReply, number: int, event: Delta, offsets: TextOffsets
) -> dict[str, Any]:
    choice = plain_choice(reply, number, event.index, event.text)
    if event.scores:
        scores: list[ScoredToken | None] = list(event.scores)
        choice["logprobs"] = completion_logprobs(
            scores,
            first="",
            offsets=offsets,
            as_id=reply.fields.tokens_as_ids,
            sampled_first=reply.fields.as_vllm,
        )
    if reply.request.return_token_ids:
        choice["token_ids"] = event.token_ids
    return choice


def _end(
    reply: CompletionReply, number: int, event: Ended, last: dict[str, Any] | None
) -> dict[str, Any]:
    choice = plain_choice(reply, number, event.index, "") if last is None else last
    return choice | {"finish_reason": finish_reason(event), "stop_reason": stop_reason(event)}


async def to_answer(
    events: AsyncGenerator[tuple[int, Event], None], reply: CompletionReply
) -> bytes:
    """The full answer: the fold of the same events."""
    folds = [Fold(reply.n) for _ in reply.prompts]
    async with aclosing(events):
        async for number, event in events:
            folds[number].take(event)
    size = 0
    if reply.spans is not None:
        size = 2 * sum(len(choice.token_ids) for fold in folds for choice in fold.choices)
    choices = await TEXT_THREADS.run(size, partial(_choices, reply, folds))
    for number, fold in enumerate(folds):
        if fold.attention is not None:
            choices[number * reply.n] |= await asyncio.to_thread(
                captured_documents, fold.attention, reply.request.attn_capture_dtype
            )
    document = envelope(reply, choices)
    document |= {
        "usage": usage(folds),
        "kv_transfer_params": _transferred(reply, choices),
    }
    return orjson.dumps(document | _times(reply, folds))


def _transferred(reply: CompletionReply, choices: list[dict[str, Any]]) -> object:
    """The answer's `kv_transfer_params`; of several prompts each first choice has its own."""
    if len(choices) == reply.n and "kv_transfer_params" in choices[0]:
        return choices[0].pop("kv_transfer_params")
    return reply.fields.transferred(reply.id)


def _times(reply: CompletionReply, tallies: Sequence[Tally]) -> dict[str, Any]:
    """The `metrics`, where they are told: of one prompt with one choice."""
    if not reply.fields.metrics or len(tallies) != 1:
        return {}
    return {"metrics": request_metrics(tallies[0].first_ended)}


def _choices(reply: CompletionReply, folds: list[Fold]) -> list[dict[str, Any]]:
    return [
        _choice(reply, folds[number], number, sample)
        for number in range(len(folds))
        for sample in range(reply.n)
    ]


def _choice(reply: CompletionReply, fold: Fold, number: int, sample: int) -> dict[str, Any]:
    request, prompt, choice = reply.request, reply.prompts[number], fold.choices[sample]
    assert choice.ended is not None, f"choice {sample} of prompt {number} of {reply.id} never ended"
    text = "".join(choice.text)
    document = plain_choice(reply, number, sample, prompt.text + text if request.echo else text)
    document |= {
        "finish_reason": finish_reason(choice.ended),
        "stop_reason": stop_reason(choice.ended),
        "prompt_logprobs": None,
        "token_ids": None,
        "prompt_token_ids": None,
    }
    if reply.fields.scores:
        head = (fold.prompt_scores or []) if request.echo else []
        scores: list[ScoredToken | None] = [*head, *choice.scores]
        document["logprobs"] = completion_logprobs(
            scores,
            first=prompt.first,
            offsets=TextOffsets(),
            as_id=reply.fields.tokens_as_ids,
            sampled_first=reply.fields.as_vllm,
        )
    if request.prompt_logprobs is not None and fold.prompt_scores is not None:
        document["prompt_logprobs"] = scores_by_id(fold.prompt_scores)
    if request.return_token_ids:
        document["token_ids"] = choice.token_ids
    if reply.spans is not None:
        document["token_offsets"] = reply.spans(choice.token_ids, continues=True)
    return document | _prompt_facts(reply, number)
