"""Requests of the token routes. Sampling fields are those of /v1/completions, under `sampling_params`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.front.server.openai.schema import Common, Count, Name, StreamOptions, TokenId

MAX_TOKENS = 2**22
TokenKey = Annotated[str, Meta(pattern=r"^\d{1,9}$")]


class TokenSampling(Common, frozen=True, kw_only=True):
    """How to sample; as in /v1/completions."""

    best_of: Annotated[int, Meta(ge=1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_completion_tokens: Count | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /inference/v1/generate: what the render routes answer with. With output_mode derender the answer is the chat
    completion, parsed as `parse_context` says."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]
    sampling_params: dict[str, Any] = {}
    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text", "derender"] = "tokens"
    parse_context: dict[str, Any] | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: Annotated[str, Meta(max_length=128)] | None = None
    features: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class TopToken(msgspec.Struct, frozen=True, kw_only=True):
    """One alternative."""

    token_id: TokenId
    logprob: float
    rank: int | None = None


class ScoredEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token with its alternatives."""

    token_id: TokenId
    logprob: float
    rank: int | None = None
    top_logprobs: Annotated[list[TopToken], Meta(max_length=256)] = []


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of a choice."""

    content: list[ScoredEntry] = []


class PromptScore(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate of a prompt's position; the first of them is the token itself."""

    logprob: float
    rank: int | None = None


PromptScores = Annotated[dict[TokenKey, PromptScore], Meta(min_length=1, max_length=256)] | None


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer of /inference/v1/generate."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    index: Annotated[int, Meta(ge=0, lt=4096)] = 0
    finish_reason: Literal["stop", "length", "repetition", "abort"] = "stop"
    stop_reason: str | int | None = None
    logprobs: Scores | None = None


class TokenDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the usage."""

    cached_tokens: Count = 0


class GeneratedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage that the engine told."""

    prompt_tokens_details: TokenDetails = TokenDetails()


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of /inference/v1/generate."""

    choices: Annotated[list[GeneratedChoice], Meta(min_length=1, max_length=4096)]
    usage: GeneratedUsage = GeneratedUsage()
    prompt_logprobs: Annotated[list[PromptScores], Meta(max_length=MAX_TOKENS)] | None = None


class DerenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request as the client sent it, its prompt (as the render route told it, or rendered again), the answer."""

    request: dict[str, Any]
    response: Generated
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)] | None = None
