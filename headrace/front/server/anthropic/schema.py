"""Requests of POST /v1/messages and /v1/messages/count_tokens: fields, types and bounds.

Unknown fields are ignored (`metadata`, `service_tier`, `cache_control` and others that clients
send; the prefix cache works without being told). Blocks inside messages are checked where they are
translated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest
from headrace.front.server.http.limits import Count, Name, typed

MIN_THINKING_TOKENS = 1024


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model may think first. `display` omitted: clients get the signature alone."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=MIN_THINKING_TOKENS, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The structure of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much effort, and which structure."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: what makes up the prompt."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]
    model: Name | None = None
    system: str | Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """POST /v1/messages. `max_tokens` 0 computes the prompt and nothing else: it warms the prefix
    cache."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)]
        | None
    ) = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] | None = None


def parse_messages(document: Any) -> MessagesRequest:
    """The request of POST /v1/messages; InvalidRequest where fields contradict each other."""
    request = typed(document, MessagesRequest)
    if request.mcp_servers:
        raise InvalidRequest(
            "mcp_servers: this server connects to no others; send the tools themselves",
            field="mcp_servers",
        )
    thinking = request.thinking
    if thinking is not None and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise InvalidRequest(
                "thinking.budget_tokens: this field is required with type: enabled",
                field="thinking.budget_tokens",
            )
        if thinking.budget_tokens >= request.max_tokens:
            raise InvalidRequest(
                f"thinking.budget_tokens: {thinking.budget_tokens} given; "
                f"less than max_tokens ({request.max_tokens}) is needed",
                field="thinking.budget_tokens",
            )
    return request


def parse_prompt(document: Any) -> CountTokensRequest:
    """The request of POST /v1/messages/count_tokens."""
    return typed(document, CountTokensRequest)
