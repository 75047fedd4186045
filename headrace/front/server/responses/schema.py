"""Requests of the Responses routes: fields, types and bounds.

Unknown fields are ignored (clients send `client_metadata`, `prompt_cache_key`, `safety_identifier` and others; the
prefix cache works without being told). Sampling fields beyond OpenAI's go on to the conversation as they are
(`EXTENSIONS`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest
from headrace.front.server.openai.schema import Count, Effort, Name, typed

MAX_ITEMS = 4096
MAX_ADDED = 20
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
EXTENSIONS = (
    *("top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("bad_words", "allowed_token_ids", "logit_bias", "skip_special_tokens", "priority"),
    *("cache_salt", "timeout_s", "chat_template", "chat_template_kwargs", "structured_outputs"),
    "thinking_token_budget",
)
Json = dict[str, Any]
Ident = Annotated[str, Meta(max_length=128)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How much the model thinks, and whether its thinking is summed up (here: shown whole) for people."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The structure of the answer's text."""

    format: Json | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationRef(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation by its id."""

    id: Ident


class InputRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses/input_tokens and /v1/responses/compact: what makes up the prompt."""

    model: Name | None = None
    input: str | Annotated[list[Json], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: Ident | None = None
    conversation: Ident | ConversationRef | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tool_choice: str | Json | None = None
    tools: Annotated[list[Json], Meta(max_length=1024)] | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesRequest(InputRequest, frozen=True, kw_only=True):
    """POST /v1/responses, and `response.create` of the WebSocket."""

    background: bool | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)] | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None


def parse_response(document: Any) -> ResponsesRequest:
    """The request of POST /v1/responses; InvalidRequest where it asks for what is not there."""
    request = typed(document, ResponsesRequest)
    _check(request, document)
    if request.background and request.store is False:
        raise InvalidRequest("background: needs store: true", field="background")
    if request.conversation is not None and request.store is False:
        raise InvalidRequest(
            "conversation: keeps what is said, store: false does not", field="conversation"
        )
    return request


def parse_prompt(document: Any) -> InputRequest:
    """The request of POST /v1/responses/input_tokens and /compact."""
    request = typed(document, InputRequest)
    _check(request, document)
    return request


def _check(request: InputRequest, document: Json) -> None:
    if document.get("prompt") is not None:
        raise InvalidRequest(
            "prompt: not kept by this server; send instructions and input", field="prompt"
        )
    if request.conversation is not None and request.previous_response_id is not None:
        raise InvalidRequest(
            "conversation: does not go with previous_response_id; send one of them",
            field="conversation",
        )
    before = request.previous_response_id or request.conversation
    if request.input is None and before is None:
        raise InvalidRequest("input: this field is required", field="input")


def conversation_of(request: InputRequest) -> str | None:
    """The id of the conversation that a request belongs to."""
    given = request.conversation
    return given.id if isinstance(given, ConversationRef) else given


def extensions(document: Json) -> Json:
    """The sampling fields beyond OpenAI's, as they were sent."""
    return {name: document[name] for name in EXTENSIONS if document.get(name) is not None}


class ItemsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/conversations/{id}/items."""

    items: Annotated[list[Json], Meta(min_length=1, max_length=MAX_ADDED)]


class ConversationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/conversations."""

    items: Annotated[list[Json], Meta(max_length=MAX_ADDED)] | None = None
    metadata: Metadata | None = None


class MetadataRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/conversations/{id}."""

    metadata: Metadata | None
