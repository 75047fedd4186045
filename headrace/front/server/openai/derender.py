"""What the derender routes take: our body, and vLLM's, which is turned into ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.generation import MAX_TOKENS
from headrace.front.server.conversation.prompts import MAX_PROMPTS
from headrace.front.server.conversation.request import parse
from headrace.front.server.conversation.resolved import AS_CHAT, SentNames, as_sent
from headrace.front.server.http.limits import Count, Keywords, Name, TokenId

T = TypeVar("T")


_VLLM_NAMES = SentNames(names={"response": "generate_response", "token_ids": "prompt_token_ids"})


PromptIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]


FinishReason = Literal["stop", "length", "repetition", "abort"]


TokenKey = Annotated[str, Meta(pattern=r"^\d{1,9}$")]


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


class TokenScores(msgspec.Struct, frozen=True, kw_only=True):
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
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None
    logprobs: TokenScores | None = None


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
    """The request as the client sent it, its prompt (as the render route told it, or rendered
    again), the answer. `prompt_tokens`: what the usage says of the prompt, where that is not the
    length of `token_ids`."""

    request: Keywords
    response: Generated
    token_ids: PromptIds | None = None
    prompt_tokens: Count | None = None


class VllmDerender(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM's bodies of whole answers share."""

    model: Name | None = None
    stream: Literal[False] = False


class VllmDerenderChat(VllmDerender, frozen=True, kw_only=True):
    """vLLM's body for a chat."""

    generate_response: Keywords
    chat_request: Keywords | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: PromptIds | None = None


class VllmDerenderCompletion(VllmDerender, frozen=True, kw_only=True):
    """vLLM's body for a completion: an answer per prompt, and lists of as many."""

    generate_responses: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_PROMPTS)]
    completion_request: Keywords | None = None
    prompt_tokens: list[Count] | None = None
    prompt_token_ids: list[PromptIds | None] | None = None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What one chunk of a stream of /inference/v1/generate says of a choice."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)] = []
    index: Annotated[int, Meta(ge=0, lt=4096 * MAX_PROMPTS)] = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: TokenScores | None = None


class ChunkUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a stream, as its last chunk tells it."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: TokenDetails | None = None


class GeneratedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of a stream of /inference/v1/generate; without a choice it tells the usage."""

    choices: Annotated[list[ChunkChoice], Meta(max_length=1)] = []
    usage: ChunkUsage | None = None
    request_id: Annotated[str, Meta(max_length=128)] | None = None


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """What a client carries from one chunk of a choice to the next: the server keeps nothing.
    `output_token_ids`: the choice's ids so far; `finish_reason`: how it ended, if it did."""

    id: Annotated[str, Meta(max_length=128)]
    created: Count
    output_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)] = []
    finish_reason: FinishReason | None = None


class DerenderChunk(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's body for one chunk of a stream, with the state that came with the chunk before. One
    choice has one state: with `n` the client carries one for each."""

    stream: Literal[True]
    generate_chunk: GeneratedChunk
    stream_state: StreamState | None = None
    model: Name | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: PromptIds | None = None


class DerenderChatChunk(DerenderChunk, frozen=True, kw_only=True):
    """Of a chat."""

    chat_request: Keywords | None = None


class DerenderCompletionChunk(DerenderChunk, frozen=True, kw_only=True):
    """Of a completion."""

    completion_request: Keywords | None = None


DERENDER_CHAT = (DerenderRequest, VllmDerenderChat, DerenderChatChunk)
DERENDER_COMPLETION = (DerenderRequest, VllmDerenderCompletion, DerenderCompletionChunk)
"""The bodies that the routes take."""


def is_chunk(document: Any) -> bool:
    """Whether a body is one chunk of a stream."""
    return isinstance(document, dict) and bool(document.get("stream"))


def derender_chat(document: Any) -> tuple[DerenderRequest, SentNames]:
    """The body of one chat, and how its client named things."""
    if not isinstance(document, dict) or "generate_response" not in document:
        return parse(document, DerenderRequest), AS_CHAT
    body = parse(document, VllmDerenderChat)
    asked, count = body.chat_request, body.prompt_tokens
    if asked is None:
        choices = body.generate_response.get("choices")
        asked = {"messages": [{"role": "user", "content": ""}], "n": len(choices or ()) or 1}
        count = len(body.prompt_token_ids or ()) if count is None else count
    if body.model is not None:
        asked = {"model": body.model} | asked
    with as_sent(_VLLM_NAMES):
        own = _own(asked, body.generate_response, body.prompt_token_ids, count)
    return own, _VLLM_NAMES


def derender_completion(document: Any) -> tuple[list[DerenderRequest], SentNames]:
    """The bodies of a completion's prompts, which share the request; how the client named
    things."""
    if not isinstance(document, dict) or "generate_responses" not in document:
        return [parse(document, DerenderRequest)], AS_CHAT
    body = parse(document, VllmDerenderCompletion)
    number = len(body.generate_responses)
    counts = _as_many(body.prompt_tokens, number, "prompt_tokens")
    prompts = _as_many(body.prompt_token_ids, number, "prompt_token_ids")
    asked = body.completion_request
    if asked is None:
        choices = body.generate_responses[0].get("choices")
        asked = {"prompt": [""] * number, "n": len(choices or ()) or 1}
        counts = [
            len(ids or ()) if n is None else n for ids, n in zip(prompts, counts, strict=True)
        ]
    if body.model is not None:
        asked = {"model": body.model} | asked
    own = zip(body.generate_responses, prompts, counts, strict=True)
    with as_sent(_VLLM_NAMES):
        return [_own(asked, *fields) for fields in own], _VLLM_NAMES


def _as_many(values: Sequence[T] | None, number: int, field: str) -> list[T | None]:
    if values is not None and len(values) != number:
        raise InvalidRequest(
            f"{field}: {len(values)} given, generate_responses are {number}", field=field
        )
    return [None] * number if values is None else list(values)


def _own(
    asked: dict[str, Any], response: dict[str, Any], ids: list[int] | None, count: int | None
) -> DerenderRequest:
    """Our body. vLLM's answers hold null for what was not asked; ours leave it out."""
    known = ids or response.get("prompt_token_ids") or None
    return parse(
        {
            "request": asked,
            "response": _without_nulls(response),
            "token_ids": known,
            "prompt_tokens": count,
        },
        DerenderRequest,
    )


def _without_nulls(response: dict[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in response.items() if value is not None}
    choices = fields.get("choices")
    if isinstance(choices, list):
        fields["choices"] = [_choice(one) if isinstance(one, dict) else one for one in choices]
    return fields


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in choice.items() if value is not None}
    scores = fields.get("logprobs")
    if isinstance(scores, dict) and scores.get("content") is None:
        del fields["logprobs"]
    return {"token_ids": [], **fields}
