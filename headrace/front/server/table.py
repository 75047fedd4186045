"""The table of routes: which path leads to which handler, and what a handler takes; and the
applications over it.

What kinds of rows there are, and what a request passes through on its way to one: app.py. The
OpenAPI document is made from this table."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp

from headrace.front.server import invocations, openapi
from headrace.front.server.administration import api as admin
from headrace.front.server.administration import named, slots
from headrace.front.server.administration.api import AdminAuthenticator, api_authenticator
from headrace.front.server.administration.operations import OPERATIONS, PREFIX
from headrace.front.server.anthropic import routes as anthropic
from headrace.front.server.anthropic.failures import SHAPE as ANTHROPIC
from headrace.front.server.anthropic.schema import CountTokensRequest, MessagesRequest
from headrace.front.server.app import (
    PUBLIC,
    Reader,
    Shell,
    Writer,
    administers,
    posts,
    posts_named,
    posts_to,
    reads,
    shape_of,
    uploads,
)
from headrace.front.server.batches import messages as message_batches
from headrace.front.server.batches import routes as batches
from headrace.front.server.cohere import routes as cohere
from headrace.front.server.cohere import tokens as cohere_tokens
from headrace.front.server.cohere.schema import CohereChatRequest
from headrace.front.server.conversation.context import (
    LineRoute,
    RequestContext,
    Services,
)
from headrace.front.server.conversation.generation import GenerateRequest
from headrace.front.server.conversation.prompts import TokenizeRequest
from headrace.front.server.conversation.request import ChatRequest, CompletionRequest
from headrace.front.server.decisions import routes as decisions
from headrace.front.server.decisions.schema import DecisionsRequest, SystemOneRequest
from headrace.front.server.http.auth import UNIX
from headrace.front.server.http.failures import ErrorFormat
from headrace.front.server.native import health, infill, llama_cpp, requests, tokenize
from headrace.front.server.native.tokenize import DetokenizeRequest, TokenizeChatRequest
from headrace.front.server.ollama import changes as ollama_changes
from headrace.front.server.ollama import models as ollama_models
from headrace.front.server.ollama import pull as ollama_pull
from headrace.front.server.ollama import routes as ollama
from headrace.front.server.ollama import schema as ollama_schema
from headrace.front.server.ollama.named_requests import standing_for
from headrace.front.server.openai import (
    audio,
    batch,
    chat,
    completions,
    generate,
    models,
    realtime,
    render,
    stored_chats,
)
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
from headrace.front.server.responses import compact, conversations, websocket
from headrace.front.server.responses import routes as responses
from headrace.front.server.responses.schema import (
    ConversationRequest,
    InputRequest,
    ItemsRequest,
    MetadataRequest,
    ResponsesRequest,
)
from headrace.front.server.sockets import Session, SocketShell
from headrace.front.server.webui import routes as webui
from headrace.front.server.webui.pages import PAGES


def make_app(services: Services) -> ASGIApp:
    """The application over `services`."""
    authenticator = api_authenticator(services.server, services.keys, public=PUBLIC)
    sessions: dict[str, Session] = {
        "/v1/responses": websocket.serve,
        "/v1/realtime": realtime.serve,
    }
    sockets = SocketShell(services, authenticator, sessions)
    return Shell(services, Router(table(), redirect_slashes=False), authenticator, sockets)


def make_admin_app(services: Services) -> ASGIApp:
    """The admin API over `services`; it answers while the server drains too."""
    spec = services.server
    authenticator = AdminAuthenticator(
        spec.admin_key_digest,
        readonly=spec.admin_readonly,
        socket_file=(spec.admin_listen or "").startswith(UNIX),
    )
    router = Router(admin_routes(), redirect_slashes=False)
    return Shell(services, router, authenticator, None)


def table() -> list[ApiRoute]:
    """Every route there is."""
    routes = [
        *_generation(),
        *_pooling(),
        *_ollama(),
        *_tokens(),
        *_stored_chats(),
        *_other_routes(),
    ]
    routes.append(reads("/openapi.json", openapi.serving(routes, public=PUBLIC)))
    return routes


def _generation() -> list[ApiRoute]:
    """What answers in words, by dialect, and batches of it."""
    return [
        posts("/v1/chat/completions", chat.post_chat, ChatRequest, queued=True),
        posts("/v1/chat/completions/batch", batch.post_batch, batch.BatchChatRequest, queued=True),
        posts("/v1/completions", completions.post_completions, CompletionRequest, queued=True),
        posts("/v1/messages", anthropic.post_messages, MessagesRequest, queued=True),
        posts("/v1/messages/count_tokens", anthropic.post_count_tokens, CountTokensRequest),
        posts("/v2/chat", cohere.post_chat, CohereChatRequest, queued=True),
        posts(
            "/v1/responses", responses.post_responses, ResponsesRequest, sockets=True, queued=True
        ),
        posts("/v1/responses/input_tokens", responses.post_input_tokens, InputRequest),
        posts(
            "/v1/responses/compact",
            compact.post_compact,
            InputRequest,
            queued=True,
            named=standing_for(),  # what a name brings comes again with the next turn
        ),
        reads("/v1/responses/{id}", responses.get_response),
        reads("/v1/responses/{id}", responses.delete_response, "DELETE"),
        reads("/v1/responses/{id}/cancel", responses.post_cancel, "POST"),
        reads("/v1/responses/{id}/input_items", responses.get_input_items),
        *_conversations(),
        posts("/invocations", invocations.post_invocations, *invocations.BODIES, queued=True),
        reads("/api/hello", anthropic.get_hello),
    ]


def _stored_chats() -> list[ApiRoute]:
    """Chats that are kept; behind the routes whose names stand where an id would."""
    one = "/v1/chat/completions/{id}"
    return [
        reads("/v1/chat/completions", stored_chats.get_chats),
        reads(one, stored_chats.get_chat),
        posts_to(one, stored_chats.post_metadata, stored_chats.ChatMetadataRequest),
        reads(one, stored_chats.delete_chat, "DELETE"),
        reads(f"{one}/messages", stored_chats.get_messages),
    ]


def _conversations() -> list[ApiRoute]:
    """What the Responses dialect keeps under an id."""
    one = "/v1/conversations/{id}"
    return [
        posts("/v1/conversations", conversations.post_conversations, ConversationRequest),
        reads(one, conversations.get_conversation),
        posts_to(one, conversations.post_metadata, MetadataRequest),
        reads(one, conversations.delete_conversation, "DELETE"),
        posts_to(f"{one}/items", conversations.post_items, ItemsRequest),
        reads(f"{one}/items", conversations.get_items),
        reads(f"{one}/items/{{item}}", conversations.get_item),
        reads(f"{one}/items/{{item}}", conversations.delete_item, "DELETE"),
    ]


def _pooling() -> list[ApiRoute]:
    """What answers in vectors, classes and scores."""
    return [
        posts("/v1/embeddings", pooling.post_embeddings, EmbeddingRequest, queued=True),
        posts("/v2/embed", post_cohere_embed, CohereEmbedRequest, queued=True),
        posts("/pooling", pooling.post_pooling, PoolingRequest, queued=True),
        posts("/classify", pooling.post_classify, ClassifyRequest, queued=True),
        *(
            posts(path, scoring.post_score, ScoreRequest, queued=True)
            for path in ("/score", "/v1/score")
        ),
        *(
            posts(path, scoring.post_rerank, RerankRequest, queued=True)
            for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ),
        posts(
            "/generative_scoring",
            generative.post_generative_scoring,
            GenerativeScoringRequest,
            queued=True,
        ),
        posts("/v1/decisions", decisions.posting(responses.chat_of), DecisionsRequest, queued=True),
        posts("/v1/systemone", decisions.post_systemone, SystemOneRequest, queued=True),
    ]


def _ollama() -> list[ApiRoute]:
    """Ollama's own routes. Their handlers choose the model: its name may be a client's own."""
    return [
        posts_named("/api/chat", ollama.post_chat, ollama_schema.OllamaChatRequest, queued=True),
        posts_named(
            "/api/generate", ollama.post_generate, ollama_schema.OllamaGenerateRequest, queued=True
        ),
        posts_named("/api/embed", ollama.post_embed, ollama_schema.OllamaEmbedRequest, queued=True),
        posts_named(
            "/api/embeddings",
            ollama.post_embeddings,
            ollama_schema.OllamaEmbeddingsRequest,
            queued=True,
        ),
        posts_named("/api/show", ollama_models.post_show, ollama_schema.OllamaModelRequest),
        posts_named("/api/create", ollama_changes.post_create, ollama_schema.OllamaCreateRequest),
        posts_named("/api/copy", ollama_changes.post_copy, ollama_schema.OllamaCopyRequest),
        posts_named(
            "/api/delete",
            ollama_changes.delete_model,
            ollama_schema.OllamaModelRequest,
            method="DELETE",
        ),
        posts_named("/api/pull", ollama_pull.post_pull, ollama_schema.OllamaPullRequest),
        reads("/api/tags", ollama_models.get_tags),
        reads("/api/ps", ollama_models.get_ps),
        reads("/api/version", ollama_models.get_ollama_version),
        reads("/api/push", ollama_changes.refuse, "POST"),
        reads("/api/blobs/{id}", ollama_changes.refuse, "POST", "HEAD"),
    ]


def _tokens() -> list[ApiRoute]:
    """Tokens in, tokens out."""
    return [
        posts("/inference/v1/generate", generate.post_generate, GenerateRequest, queued=True),
        posts("/inference/v1/abort_requests", requests.post_abort, requests.AbortRequest),
        posts("/v1/chat/completions/render", render.post_render_chat, ChatRequest),
        posts("/v1/chat/completions/derender", render.post_derender_chat, *DERENDER_CHAT),
        posts("/v1/messages/render", anthropic.post_render_messages, MessagesRequest),
        posts("/v1/responses/render", responses.post_render_responses, ResponsesRequest),
        posts("/v1/completions/render", render.post_render_completion, CompletionRequest),
        posts("/v1/completions/derender", render.post_derender_completion, *DERENDER_COMPLETION),
        reads("/tokenizer_info", tokenize.get_tokenizer_info),
        reads("/props", llama_cpp.get_props),
        posts("/infill", infill.post_infill, infill.InfillRequest, queued=True),
        posts("/apply-template", llama_cpp.post_apply_template, ChatRequest),
        posts("/tokenize", tokenize.post_tokenize, TokenizeRequest, TokenizeChatRequest),
        posts("/detokenize", tokenize.post_detokenize, DetokenizeRequest),
        posts("/v1/tokenize", cohere_tokens.post_tokenize, cohere_tokens.CohereTokenizeRequest),
        posts(
            "/v1/detokenize", cohere_tokens.post_detokenize, cohere_tokens.CohereDetokenizeRequest
        ),
    ]


def _other_routes() -> list[ApiRoute]:
    """Files, models, requests in flight, health, the page, administration."""
    return [
        uploads("/v1/audio/transcriptions", audio.post_transcription),
        uploads("/v1/audio/translations", audio.post_translation),
        uploads("/v1/files", batches.post_file),
        reads("/v1/files", batches.get_files),
        reads("/v1/files/{id}", batches.get_file),
        reads("/v1/files/{id}", batches.delete_file, "DELETE"),
        reads("/v1/files/{id}/content", batches.get_content),
        posts("/v1/batches", batches.post_batch, batches.BatchRequest),
        reads("/v1/batches", batches.get_batches),
        reads("/v1/batches/{id}", batches.get_batch),
        reads("/v1/batches/{id}/cancel", batches.post_cancel, "POST"),
        *_message_batches(),
        reads("/v1/models", _by_dialect(models.get_models, anthropic.get_models)),
        reads("/v1/models/{id:path}", _by_dialect(models.get_model, anthropic.get_model)),
        reads("/v1/requests", requests.get_ledger),
        reads("/slots", requests.get_slots),
        administers(slots.ROUTE),
        reads("/v1/requests/{id}", requests.get_request),
        *(
            reads(path, health.probing(state), "GET", *(["POST"] if path == "/ping" else []))
            for path, state in health.PROBES.items()
        ),
        reads("/health/startup", health.get_startup),
        reads("/health/generate", health.get_generate),
        reads("/version", health.get_version),
        reads("/load", health.get_load),
        reads("/metrics", health.get_metrics),
        *(reads(path, webui.get_page) for path in PAGES),
        *(administers(route) for route in named.NAMED),
        *(reads(path, admin.refusing(path), "GET", "POST") for path in named.REFUSED),
    ]


def _message_batches() -> list[ApiRoute]:
    """Batches in Anthropic's form."""
    every, one = "/v1/messages/batches", "/v1/messages/batches/{id}"
    return [
        posts(every, message_batches.post_batch, message_batches.MessageBatchRequest),
        reads(every, message_batches.get_batches),
        reads(one, message_batches.get_batch),
        reads(one, message_batches.delete_batch, "DELETE"),
        reads(f"{one}/cancel", message_batches.post_cancel, "POST"),
        reads(f"{one}/results", message_batches.get_results),
    ]


def line_routes() -> dict[str, LineRoute]:
    """What a line of a batch may ask for (batches/lines.py: ENDPOINTS)."""
    return {
        "/v1/chat/completions": _line(chat.post_chat, ChatRequest),
        "/v1/completions": _line(completions.post_completions, CompletionRequest),
        "/v1/responses": _line(responses.post_responses, ResponsesRequest),
        "/v1/messages": _line(anthropic.post_messages, MessagesRequest, errors=ANTHROPIC),
        "/v1/embeddings": _line(pooling.post_embeddings, EmbeddingRequest),
        "/v1/score": _line(scoring.post_score, ScoreRequest),
        "/v1/rerank": _line(scoring.post_rerank, RerankRequest),
    }


def _line(
    handler: Writer, body: type[msgspec.Struct], errors: ErrorFormat | None = None
) -> LineRoute:
    return LineRoute(handler=handler, named=standing_for(body), errors=errors)


def admin_routes() -> list[ApiRoute]:
    """The admin API: a route for each operation."""
    return [
        administers(
            named.NamedRoute(
                path=f"{PREFIX}/{operation.path or operation.name}",
                operation=operation,
                reads=operation.parameters,
                has_body=operation.changes,
            )
        )
        for operation in OPERATIONS
    ]


def _by_dialect(openai: Reader, anthropic: Reader) -> Reader:
    """One path that two dialects share: the clients of one of them name its version in a header."""

    def handler(context: RequestContext, request: Request) -> Awaitable[Response]:
        chosen = anthropic if shape_of(request.scope) is ANTHROPIC else openai
        return chosen(context, request)

    handler.__doc__ = openai.__doc__
    return handler
