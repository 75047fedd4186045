"""The handlers of POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from typing import Any

from starlette.responses import Response

from headrace.front.client.events import Events
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.pipeline import begin, events_as_sent, generate, streamed
from headrace.front.server.conversation.pooling import (
    PoolInput,
    PoolJob,
    embeddings,
    one_vector,
    pooled,
    tokenized,
)
from headrace.front.server.conversation.prompts import prompt_of
from headrace.front.server.conversation.request import (
    CompletionRequest,
    completion_params,
    parse,
)
from headrace.front.server.conversation.resolved import as_sent, run_options
from headrace.front.server.conversation.structured import plain_structure
from headrace.front.server.http.auth import completion_id
from headrace.front.server.http.limits import typed
from headrace.front.server.http.line_stream import LineStream
from headrace.front.server.ollama.conversation import options_of, to_completion, to_conversation
from headrace.front.server.ollama.failures import SHAPE
from headrace.front.server.ollama.named import ChosenModel, choose
from headrace.front.server.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from headrace.front.server.ollama.stream import (
    NANOSECONDS,
    OllamaStream,
    now_text,
    to_answer,
    to_chunks,
)

Json = dict[str, Any]


async def post_chat(context: RequestContext, document: Any) -> Response:
    """POST /api/chat."""
    request = typed(document, OllamaChatRequest)
    if not request.messages:
        return await _loaded(context, request)
    chosen = await choose(context, request.model, keep_alive=request.keep_alive)
    return await _chat(context, request, chosen)


async def post_generate(context: RequestContext, document: Any) -> Response:
    """POST /api/generate: a prompt through the chat template, or as it is (`raw`, `suffix`)."""
    request = typed(document, OllamaGenerateRequest)
    if not (request.prompt or request.suffix or request.images):
        return await _loaded(context, request)
    chosen = await choose(context, request.model, keep_alive=request.keep_alive)
    if request.raw or request.suffix:
        return await _completion(context, request, chosen)
    return await _chat(context, request, chosen)


async def _chat(
    context: RequestContext,
    request: OllamaChatRequest | OllamaGenerateRequest,
    chosen: ChosenModel,
) -> Response:
    services = context.services
    ident = completion_id("chat")
    conversation = to_conversation(request, services.served, id=ident, target=chosen.target)
    _, events = await begin(context, conversation)
    return await _answered(context, request, chosen, events)


async def _completion(
    context: RequestContext, request: OllamaGenerateRequest, chosen: ChosenModel
) -> Response:
    services = context.services
    translated = to_completion(request, chosen.target, max_model_len=services.text.max_model_len)
    with as_sent(translated):
        completion = parse(translated.document, CompletionRequest)
        params = completion_params(
            completion,
            defaults=services.text.generation_defaults,
            max_n=services.server.max_n,
            max_logprobs=services.server.max_logprobs,
        )
        structure = plain_structure(completion)
        adapter = "" if chosen.target.name in services.text.model_names else chosen.target.name
        context.hold_place()
        prompt = await prompt_of(context, completion, request.prompt or "")
        context.body_is_read()
    events = generate(
        context,
        prompt.ids,
        params,
        run_options(completion, adapter),
        label=completion_id("cmpl"),
        structure=structure,
    )
    return await _answered(context, request, chosen, events_as_sent(events, translated))


async def _answered(
    context: RequestContext,
    request: OllamaChatRequest | OllamaGenerateRequest,
    chosen: ChosenModel,
    events: Events,
) -> Response:
    stream = OllamaStream(
        model=chosen.shown,
        chats=isinstance(request, OllamaChatRequest),
        load_s=chosen.load_s,
        timeline=lambda: context.timeline,
    )
    if request.streams:
        return await streamed(context, to_chunks(events, stream), shape=SHAPE, kind=LineStream)
    return json_response(await to_answer(events, stream))


async def _loaded(
    context: RequestContext, request: OllamaChatRequest | OllamaGenerateRequest
) -> Response:
    """Nothing is asked: the model is loaded, or with keep_alive 0 unloaded once it is idle. The
    only model of a server stays."""
    unloads = request.keep_alive in (0, "0", "0s") and context.services.models is not None
    chosen = await choose(context, request.model, keep_alive=request.keep_alive, runs=not unloads)
    text: Json = {"response": ""}
    if isinstance(request, OllamaChatRequest):
        text = {"message": {"role": "assistant", "content": ""}}
    reason = {"done": True, "done_reason": "unload" if unloads else "load"}
    return json_response({"model": chosen.shown, "created_at": now_text(), **text, **reason})


async def post_embed(context: RequestContext, document: Any) -> Response:
    """POST /api/embed: an embedding of length 1 for each text."""
    request = typed(document, OllamaEmbedRequest)
    options_of(request.options)
    began = time.monotonic()
    chosen = await choose(context, request.model, keep_alive=request.keep_alive)
    texts = [request.input] if isinstance(request.input, str) else request.input
    warnings: list[str] = []
    rows, num_prompt = await _embedded(
        context,
        texts,
        truncate=request.truncate is not False,
        dimensions=request.dimensions,
        warnings=warnings,
    )
    return json_response(
        {
            "model": chosen.shown,
            "embeddings": rows,
            "total_duration": round((time.monotonic() - began) * NANOSECONDS),
            "load_duration": round(chosen.load_s * NANOSECONDS),
            "prompt_eval_count": num_prompt,
            **_warned(warnings),
        }
    )


async def post_embeddings(context: RequestContext, document: Any) -> Response:
    """POST /api/embeddings: the embedding of one text, as the older clients ask for it."""
    request = typed(document, OllamaEmbeddingsRequest)
    options_of(request.options)
    await choose(context, request.model, keep_alive=request.keep_alive)
    warnings: list[str] = []
    rows, _ = await _embedded(
        context, [request.prompt], truncate=True, dimensions=None, warnings=warnings
    )
    return json_response({"embedding": rows[0], **_warned(warnings)})


def _warned(warnings: list[str]) -> Json:
    """What was cut off, which Ollama itself does not say."""
    return {"warnings": warnings} if warnings else {}


async def _embedded(
    context: RequestContext,
    texts: list[str],
    *,
    truncate: bool,
    dimensions: int | None,
    warnings: list[str],
) -> tuple[list[Any], int]:
    """The vectors, and how many tokens were read; `warnings` gets what was cut off."""
    services = context.services
    services.base_name(None)
    spec = one_vector(context)
    context.hold_place()
    inputs = []
    for i, text in enumerate(texts):
        field = "input" if len(texts) == 1 else f"input[{i}]"
        ids = await tokenized(
            context, text, field=field, truncate=-1 if truncate else None, warnings=warnings
        )
        inputs.append(PoolInput(ids=ids))
    answers = await pooled(context, inputs, PoolJob(how=spec.how))
    vectors = embeddings(context, answers, dimensions, True)
    return [vector.tolist() for vector in vectors], sum(answer.num_prompt for answer in answers)
