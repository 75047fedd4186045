"""A conversation on its way to the engine: the one path of every dialect.

A dialect is three pure functions around it: `to_conversation`, its request as a `Conversation`
(resolved.py); `to_chunks`, events as its stream; and `to_answer`, the fold of the same events.
`begin` does the rest once for all of them: the chat template, a parser per answer, the
generation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from starlette.responses import Response

from headrace.base.errors import Forbidden, InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import SamplingParams
from headrace.front.client.context_shift import most_tokens
from headrace.front.client.events import Events, Generation
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.media import media_request
from headrace.front.server.conversation.resolved import (
    AS_CHAT,
    Conversation,
    PromptSource,
    RunOptions,
    SentNames,
    as_sent,
)
from headrace.front.server.conversation.stages import (
    ParsedAnswer,
    coalesced,
    measured,
    parsed,
    without_reasoning,
)
from headrace.front.server.conversation.structured import (
    FREE,
    AnswerForm,
    Structure,
    parser_of,
    structure_of,
)
from headrace.front.server.http.failures import ErrorFormat
from headrace.front.server.http.sse import Chunks, EventStream, padded, started
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.media_parts import has_media


async def begin(context: RequestContext, conversation: Conversation) -> tuple[list[int], Events]:
    """The prompt's ids and the events of its continuation, which runs once they are read."""
    services = context.services
    context.hold_place()
    with as_sent(conversation.sent):
        ids, media = await prompt_with_media(context, conversation.prompt)
        context.body_is_read()
        tail = services.answers.prompt_tail(services.tokenizer, ids)
        predicted: list[int] = []
        if conversation.prediction:
            predicted = await services.tokenizer.encode_async(
                conversation.prediction,
                add_special_tokens=False,
                max_tokens=services.context_tokens,
                field="prediction.content",
            )
        events = generate(
            context,
            ids,
            conversation.params,
            conversation.run,
            label=conversation.id,
            answers=parsers_after(context, conversation.form, tail, conversation.params),
            structure=structure_of(conversation.form, services.answers, prompt_tail=tail),
            shows_reasoning=conversation.shows_reasoning,
            prompt_field="messages",
            predicted=predicted,
            media=media,
        )
    if conversation.sent is not AS_CHAT:
        events = events_as_sent(events, conversation.sent)
    return ids, conversation.calls.as_sent(events)


async def events_as_sent(events: Events, sent: SentNames) -> Events:
    """The events; what goes wrong among them is told in the words of the request as it was sent."""
    async with aclosing(events):
        with as_sent(sent):
            async for event in events:
                yield event


async def prompt_ids(context: RequestContext, prompt: PromptSource) -> list[int]:
    """The messages as token ids; see `prompt_with_media`."""
    return (await prompt_with_media(context, prompt))[0]


async def prompt_with_media(
    context: RequestContext, prompt: PromptSource
) -> tuple[list[int], tuple[MediaInput, ...]]:
    """The messages as token ids, through the model's chat template, and what placeholders among
    them stand for; truncated where that is asked."""
    media = context.services.media
    if media is None and prompt.media_arguments:
        raise InvalidRequest(
            "mm_processor_kwargs: this model takes no images and no video",
            field="mm_processor_kwargs",
        )
    if media is None or not has_media(prompt.messages):
        return await _rendered_ids(context, prompt), ()
    if prompt.truncation is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: does not go with images and video, which have no parts",
            field="truncate_prompt_tokens",
        )
    prepared = await media.prepare(prompt.messages, media_request(context, prompt.media_arguments))
    ids = await _rendered_ids(context, replace(prompt, messages=prepared.messages))
    return media.expand(ids, prepared.media, field="messages")


async def _rendered_ids(context: RequestContext, prompt: PromptSource) -> list[int]:
    services = context.services
    template = services.template
    if prompt.template is not None:
        if not services.server.trust_request_chat_template:
            raise Forbidden(
                "chat_template: this server does not take templates from requests",
                field="chat_template",
            )
        template = ChatTemplate(
            prompt.template,
            services.tokenizer,
            pool=services.guest_templates,
            max_tokens=most_tokens(
                services.text.max_model_len, shifts=services.server.context_shift
            ),
            any_role=services.server.compat == "vllm",
        )
    ids = await template.render_async(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=prompt.opens,
        continue_final_message=prompt.continues,
        kwargs=prompt.kwargs,
        tenant=context.tenant,
    )
    if prompt.special_tokens:
        ids = services.tokenizer.with_special(ids)
    if prompt.truncation is None:
        return ids
    return prompt.truncation(ids, max_model_len=services.text.max_model_len)


def parsers(
    context: RequestContext, form: AnswerForm, ids: list[int], params: SamplingParams
) -> list[ParsedAnswer] | None:
    """A parser per choice for what follows the prompt with these ids."""
    services = context.services
    tail = services.answers.prompt_tail(services.tokenizer, ids)
    return parsers_after(context, form, tail, params)


def parsers_after(
    context: RequestContext, form: AnswerForm, tail: str, params: SamplingParams
) -> list[ParsedAnswer] | None:
    """A parser per choice; None where nothing is to be parsed."""
    answers, tokenizer = context.services.answers, context.services.tokenizer
    pieces = answers.pieces_of(tokenizer, skip_special_tokens=params.skip_special_tokens)
    each_parser = [parser_of(form, answers, prompt_tail=tail) for _ in range(params.n)]
    return [ParsedAnswer(parser, pieces) for parser in each_parser if parser is not None] or None


def generate(
    context: RequestContext,
    ids: list[int],
    params: SamplingParams,
    run: RunOptions,
    *,
    label: str,
    answers: list[ParsedAnswer] | None = None,
    structure: Structure = FREE,
    shows_reasoning: bool = True,
    prompt_field: str = "prompt",
    predicted: Sequence[int] = (),
    media: tuple[MediaInput, ...] = (),
    encoder: bytes = b"",
) -> Events:
    """The events of one prompt, parsed where there are parsers, and counted. `encoder`: see
    Generation."""
    services = context.services
    context.client_label = run.client_label
    if (most := params.max_tokens) is None:
        most = services.context_tokens - len(ids)
    context.hold("tokens", len(ids) + max(most, 0) * params.n)
    generation = Generation(
        prompt_ids=ids,
        params=params,
        label=label,
        external_id=context.external_id,
        tenant=context.tenant,
        priority=run.priority,
        deadline_s=context.deadline_s(run.timeout_s),
        cache_salt=run.cache_salt,
        adapter=run.adapter,
        pieces=answers[0].pieces if answers and services.answers.pieces is not None else None,
        grammar=structure.grammar,
        grammar_field=structure.field,
        reasoning=structure.reasoning,
        prompt_field=prompt_field,
        media=media,
        encoder=encoder,
        decoder_ids=run.decoder_ids,
        on_queued=context.queued.set,
        predicted_ids=predicted,
        hints=run.hints,
    )
    events = (context.retrying_engine or services.engine).generate(generation)
    interval = run.interval or services.interval
    if interval is not None:
        events = coalesced(events, interval)
    if answers is not None:
        events = parsed(events, answers)
        if not shows_reasoning:
            events = without_reasoning(events)
    return measured(events, context, generation)


async def streamed(
    context: RequestContext,
    chunks: Chunks,
    *,
    shape: ErrorFormat | None = None,
    pads: bool = False,
    kind: type[EventStream] = EventStream,
) -> Response:
    """The answer that sends `chunks`; what fails before the first of them keeps its own status.
    `pads`: the chunks come in few sizes, whatever text they hold. `kind`: how they are sent."""
    chunks = padded(chunks) if pads else chunks
    ping_s = context.services.server.ping_interval_s
    first = await started(chunks, context.queued, patience_s=ping_s)
    return kind(
        first,
        chunks,
        request_id=context.request_id,
        abandon=context.services.abandon,
        ping_s=ping_s,
        silent_since=context.arrival,
        shape=shape or context.services.errors,
        last_comment=context.timing_comment if context.tells_timing else None,
    )
