"""The table of routes: which path leads to which handler, and what a handler takes.

A route with a JSON body reads it under its limits and runs its handler beside a watch on the
connection; the watch ends the work when the client leaves. The OpenAPI document is made from this
table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headrace.front.server import invocations, openapi
from headrace.front.server.administration import api as admin
from headrace.front.server.administration import named, slots
from headrace.front.server.administration.operations import OPERATIONS, PREFIX
from headrace.front.server.anthropic import routes as anthropic
from headrace.front.server.anthropic.failures import SHAPE as ANTHROPIC
from headrace.front.server.anthropic.schema import CountTokensRequest, MessagesRequest
from headrace.front.server.batches import messages as message_batches
from headrace.front.server.batches import routes as batches
from headrace.front.server.cohere import routes as cohere
from headrace.front.server.cohere.failures import SHAPE as COHERE
from headrace.front.server.cohere.schema import CohereChatRequest
from headrace.front.server.conversation.context import (
    SCOPE_KEY,
    LineRoute,
    RequestContext,
    context_of,
    json_response,
)
from headrace.front.server.conversation.generation import GenerateRequest
from headrace.front.server.conversation.prompts import TokenizeRequest
from headrace.front.server.conversation.request import ChatRequest, CompletionRequest
from headrace.front.server.decisions import routes as decisions
from headrace.front.server.decisions.schema import DecisionsRequest, SystemOneRequest
from headrace.front.server.http.auth import PROBES
from headrace.front.server.http.failures import ErrorFormat
from headrace.front.server.http.limits import read_json
from headrace.front.server.http.sse import until_gone
from headrace.front.server.native import health, llama_cpp, requests, tokenize
from headrace.front.server.native.tokenize import DetokenizeRequest, TokenizeChatRequest
from headrace.front.server.openai import audio, batch, chat, completions, generate, models, render
from headrace.front.server.openai.derender import DERENDER_CHAT, DERENDER_COMPLETION
from headrace.front.server.openapi import ApiRoute
from headrace.front.server.pooling import generative, scoring
from headrace.front.server.pooling import routes as pooling
from headrace.front.server.pooling.cohere import post_cohere_embed
from headrace.front.server.pooling.schema import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    GenerativeScoringRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from headrace.front.server.responses import compact, conversations
from headrace.front.server.responses import routes as responses
from headrace.front.server.responses.schema import (
    ConversationRequest,
    InputRequest,
    ItemsRequest,
    MetadataRequest,
    ResponsesRequest,
)
from headrace.front.server.webui import routes as webui
from headrace.front.server.webui.pages import PAGES

PUBLIC = PROBES | PAGES.keys()
"""Paths that need no key."""
Reader = Callable[[RequestContext, Request], Awaitable[Response]]
Writer = Callable[[RequestContext, Any], Any]
Changer = Callable[[RequestContext, Request, Any], Awaitable[Response]]


def table() -> list[ApiRoute]:
    """Every route there is."""
    routes = [*_generation(), *_pooling(), *_tokens(), *_other_routes()]
    routes.append(_route("/openapi.json", openapi.serving(routes, public=PUBLIC)))
    return routes


def _generation() -> list[ApiRoute]:
    """What answers in words, by dialect, and batches of it."""
    return [
        _posts("/v1/chat/completions", chat.post_chat, ChatRequest, queued=True),
        _posts("/v1/chat/completions/batch", batch.post_batch, batch.BatchChatRequest, queued=True),
        _posts("/v1/completions", completions.post_completions, CompletionRequest, queued=True),
        _posts("/v1/messages", anthropic.post_messages, MessagesRequest, queued=True),
        _posts("/v1/messages/count_tokens", anthropic.post_count_tokens, CountTokensRequest),
        _posts("/v2/chat", cohere.post_chat, CohereChatRequest, queued=True),
        _posts(
            "/v1/responses", responses.post_responses, ResponsesRequest, sockets=True, queued=True
        ),
        _posts("/v1/responses/input_tokens", responses.post_input_tokens, InputRequest),
        _posts("/v1/responses/compact", compact.post_compact, InputRequest, queued=True),
        _route("/v1/responses/{id}", responses.get_response),
        _route("/v1/responses/{id}", responses.delete_response, "DELETE"),
        _route("/v1/responses/{id}/cancel", responses.post_cancel, "POST"),
        _route("/v1/responses/{id}/input_items", responses.get_input_items),
        *_conversations(),
        _posts("/invocations", invocations.post_invocations, *invocations.BODIES, queued=True),
        _route("/api/hello", anthropic.get_hello),
    ]


def _conversations() -> list[ApiRoute]:
    """What the Responses dialect keeps under an id."""
    one = "/v1/conversations/{id}"
    return [
        _posts("/v1/conversations", conversations.post_conversations, ConversationRequest),
        _route(one, conversations.get_conversation),
        _posts_to(one, conversations.post_metadata, MetadataRequest),
        _route(one, conversations.delete_conversation, "DELETE"),
        _posts_to(f"{one}/items", conversations.post_items, ItemsRequest),
        _route(f"{one}/items", conversations.get_items),
        _route(f"{one}/items/{{item}}", conversations.get_item),
        _route(f"{one}/items/{{item}}", conversations.delete_item, "DELETE"),
    ]


def _pooling() -> list[ApiRoute]:
    """What answers in vectors, classes and scores."""
    return [
        _posts("/v1/embeddings", pooling.post_embeddings, EmbeddingRequest, queued=True),
        _posts("/v2/embed", post_cohere_embed, CohereEmbedRequest, queued=True),
        _posts("/pooling", pooling.post_pooling, PoolingRequest, queued=True),
        _posts("/classify", pooling.post_classify, ClassifyRequest, queued=True),
        *(
            _posts(path, scoring.post_score, ScoreRequest, queued=True)
            for path in ("/score", "/v1/score")
        ),
        *(
            _posts(path, scoring.post_rerank, RerankRequest, queued=True)
            for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ),
        _posts(
            "/generative_scoring",
            generative.post_generative_scoring,
            GenerativeScoringRequest,
            queued=True,
        ),
        _posts(
            "/v1/decisions", decisions.posting(responses.chat_of), DecisionsRequest, queued=True
        ),
        _posts("/v1/systemone", decisions.post_systemone, SystemOneRequest, queued=True),
    ]


def _tokens() -> list[ApiRoute]:
    """Tokens in, tokens out."""
    return [
        _posts("/inference/v1/generate", generate.post_generate, GenerateRequest, queued=True),
        _posts("/inference/v1/abort_requests", requests.post_abort, requests.AbortRequest),
        _posts("/v1/chat/completions/render", render.post_render_chat, ChatRequest),
        _posts("/v1/chat/completions/derender", render.post_derender_chat, *DERENDER_CHAT),
        _posts("/v1/messages/render", anthropic.post_render_messages, MessagesRequest),
        _posts("/v1/responses/render", responses.post_render_responses, ResponsesRequest),
        _posts("/v1/completions/render", render.post_render_completion, CompletionRequest),
        _posts("/v1/completions/derender", render.post_derender_completion, *DERENDER_COMPLETION),
        _route("/tokenizer_info", tokenize.get_tokenizer_info),
        _route("/props", llama_cpp.get_props),
        _posts("/apply-template", llama_cpp.post_apply_template, ChatRequest),
        _posts("/tokenize", tokenize.post_tokenize, TokenizeRequest, TokenizeChatRequest),
        _posts("/detokenize", tokenize.post_detokenize, DetokenizeRequest),
    ]


def _other_routes() -> list[ApiRoute]:
    """Files, models, requests in flight, health, the page, administration."""
    return [
        _uploads("/v1/audio/transcriptions", audio.post_transcription),
        _uploads("/v1/audio/translations", audio.post_translation),
        _uploads("/v1/files", batches.post_file),
        _route("/v1/files", batches.get_files),
        _route("/v1/files/{id}", batches.get_file),
        _route("/v1/files/{id}", batches.delete_file, "DELETE"),
        _route("/v1/files/{id}/content", batches.get_content),
        _posts("/v1/batches", batches.post_batch, batches.BatchRequest),
        _route("/v1/batches", batches.get_batches),
        _route("/v1/batches/{id}", batches.get_batch),
        _route("/v1/batches/{id}/cancel", batches.post_cancel, "POST"),
        *_message_batches(),
        _route("/v1/models", _by_dialect(models.get_models, anthropic.get_models)),
        _route("/v1/models/{id:path}", _by_dialect(models.get_model, anthropic.get_model)),
        _route("/v1/requests", requests.get_ledger),
        _route("/slots", requests.get_slots),
        _administers(slots.ROUTE),
        _route("/v1/requests/{id}", requests.get_request),
        *(
            _route(path, health.probing(state), "GET", *(["POST"] if path == "/ping" else []))
            for path, state in health.PROBES.items()
        ),
        _route("/health/startup", health.get_startup),
        _route("/health/generate", health.get_generate),
        _route("/version", health.get_version),
        _route("/load", health.get_load),
        _route("/metrics", health.get_metrics),
        *(_route(path, webui.get_page) for path in PAGES),
        *(_administers(route) for route in named.NAMED),
        *(_route(path, admin.refusing(path), "GET", "POST") for path in named.REFUSED),
    ]


def _message_batches() -> list[ApiRoute]:
    """Batches in Anthropic's form."""
    every, one = "/v1/messages/batches", "/v1/messages/batches/{id}"
    return [
        _posts(every, message_batches.post_batch, message_batches.MessageBatchRequest),
        _route(every, message_batches.get_batches),
        _route(one, message_batches.get_batch),
        _route(one, message_batches.delete_batch, "DELETE"),
        _route(f"{one}/cancel", message_batches.post_cancel, "POST"),
        _route(f"{one}/results", message_batches.get_results),
    ]


def line_routes() -> dict[str, LineRoute]:
    """What a line of a batch may ask for (batches/lines.py: ENDPOINTS)."""
    return {
        "/v1/chat/completions": LineRoute(handler=chat.post_chat),
        "/v1/completions": LineRoute(handler=completions.post_completions),
        "/v1/responses": LineRoute(handler=responses.post_responses),
        "/v1/messages": LineRoute(handler=anthropic.post_messages, errors=ANTHROPIC),
        "/v1/embeddings": LineRoute(handler=pooling.post_embeddings),
        "/v1/score": LineRoute(handler=scoring.post_score),
        "/v1/rerank": LineRoute(handler=scoring.post_rerank),
    }


def admin_routes() -> list[ApiRoute]:
    """The admin API: a route for each operation."""
    return [
        _administers(
            named.NamedRoute(
                path=f"{PREFIX}/{operation.path or operation.name}",
                operation=operation,
                reads=operation.parameters,
                has_body=operation.changes,
            )
        )
        for operation in OPERATIONS
    ]


def _route(path: str, handler: Reader, *methods: str) -> ApiRoute:
    """A route without a body."""

    async def endpoint(request: Request) -> Response:
        context = context_of(request)
        work = handler(context, request)
        return await until_gone(request.receive, _awaited(work), abandon=context.services.abandon)

    return ApiRoute(path, endpoint, methods=methods or ("GET",), doc=handler.__doc__ or "")


def _uploads(path: str, handler: Reader) -> ApiRoute:
    """A route whose handler reads the body itself."""

    async def endpoint(request: Request) -> Response:
        return await handler(context_of(request), request)

    return ApiRoute(path, endpoint, methods=("POST",), doc=handler.__doc__ or "")


def _posts(
    path: str,
    handler: Writer,
    *bodies: type[msgspec.Struct],
    sockets: bool = False,
    queued: bool = False,
) -> ApiRoute:
    """A route with a JSON body: read under its limits first, then handled until done or the client
    leaves. `queued`: it needs the engine and a place in its queue, and is refused by its headers
    while that is full."""

    async def chosen(context: RequestContext, document: Any) -> Any:
        if context.services.models is not None:
            await context.choose_model(document, runs=queued)
        return await handler(context, document)

    async def endpoint(request: Request) -> Response:
        if queued:
            context = context_of(request)
            context.services.engine.check_queue(context.deadline_s(None))
        return await _handled(request, chosen, await _document(request))

    doc = handler.__doc__ or ""
    return ApiRoute(path, endpoint, methods=("POST",), doc=doc, bodies=bodies, sockets=sockets)


def _administers(route: named.NamedRoute) -> ApiRoute:
    """A route of an operation: its fields stand in the query, the path, or a JSON body."""
    operation = route.operation

    async def endpoint(request: Request) -> Response:
        context = context_of(request)
        headers = request.headers
        is_empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        body: object = {} if is_empty else await _document(request)
        fields = admin.fields_of(request, body, route.reads, route.fixed)
        work = admin.answer(context, operation, fields)
        document = await until_gone(request.receive, work, abandon=context.services.abandon)
        # A health check by status: what it tells of a dead engine is no success.
        status = 503 if document.get("status") == "unavailable" else 200
        return json_response(route.answer(document), status=status)

    return ApiRoute(
        route.path,
        endpoint,
        methods=route.methods or (operation.method,),
        doc=operation.doc,
        bodies=(route.reads,) if route.has_body and route.reads.__struct_fields__ else (),
        query=None if route.has_body else route.reads,
        defaults=route.fixed,
    )


async def _document(request: Request) -> object:
    """The JSON body, read under the server's limits."""
    context = context_of(request)
    spec = context.services.server
    length = request.headers.get("content-length", "0")
    context.body_bytes = int(length) if length.isdecimal() else 0
    return await read_json(request, spec, context.make_room, context.services.body_checks)


async def _handled(request: Request, handler: Writer, document: object) -> Response:
    """Until it is done or the client leaves."""
    context = context_of(request)
    response: Response = await until_gone(
        request.receive, handler(context, document), abandon=context.services.abandon
    )
    return response


def _posts_to(path: str, handler: Changer, *bodies: type[msgspec.Struct]) -> ApiRoute:
    """A route with a JSON body for the thing that its path names."""

    async def endpoint(request: Request) -> Response:
        context = context_of(request)
        services = context.services
        document = await read_json(
            request, services.server, context.make_room, services.body_checks
        )
        return await handler(context, request, document)

    return ApiRoute(path, endpoint, methods=("POST",), doc=handler.__doc__ or "", bodies=bodies)


def _by_dialect(openai: Reader, anthropic: Reader) -> Reader:
    """One path that two dialects share: the clients of one of them name its version in a header."""

    def handler(context: RequestContext, request: Request) -> Awaitable[Response]:
        chosen = anthropic if shape_of(request.scope) is ANTHROPIC else openai
        return chosen(context, request)

    handler.__doc__ = openai.__doc__
    return handler


def shape_of(scope: Scope) -> ErrorFormat:
    """The shape of errors that the client of this context reads."""
    path = scope["path"]
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    if path == "/v2/chat":
        return COHERE
    named = any(name == b"anthropic-version" for name, _ in scope["headers"])
    if named and path.startswith("/v1/models"):
        return ANTHROPIC
    context: RequestContext = scope[SCOPE_KEY]
    return context.services.errors


async def _awaited(work: Awaitable[Response]) -> Response:
    return await work
