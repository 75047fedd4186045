"""Requests of POST /v2/chat: fields, types and bounds, as Cohere's client sends them.

Unknown fields are ignored. Parts inside messages are checked where they are translated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest
from headrace.front.server.http.limits import Count, Name, typed


class CitationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Whether answers point at the documents they rest on. This server makes no citations."""

    mode: str | None = None


class CohereThinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model may think first, and how long."""

    type: Literal["enabled", "disabled"]
    token_budget: Count | None = None


class CohereFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The structure of the answer's text."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None


class CohereChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v2/chat."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]
    model: Name | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    strict_tools: bool | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: Annotated[list[str | dict[str, Any]], Meta(max_length=1024)] | None = None
    citation_options: CitationOptions | None = None
    response_format: CohereFormat | None = None
    safety_mode: Literal["CONTEXTUAL", "STRICT", "OFF"] | None = None
    max_tokens: Count | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=5)]
        | None
    ) = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    k: Annotated[int, Meta(ge=0, le=500)] | None = None
    p: Annotated[float, Meta(gt=0, le=1)] | None = None
    logprobs: bool | None = None
    thinking: CohereThinking | None = None
    priority: Annotated[int, Meta(ge=0, lt=2**31)] | None = None


def parse_chat(document: Any) -> CohereChatRequest:
    """The request; InvalidRequest for what this server does not do."""
    request = typed(document, CohereChatRequest)
    mode = None if request.citation_options is None else request.citation_options.mode
    if mode is not None and mode.upper() != "OFF":
        raise InvalidRequest(
            f"citation_options.mode: {mode!r:.50} given; this server makes no citations; "
            "allowed: 'OFF'",
            field="citation_options.mode",
        )
    return request
