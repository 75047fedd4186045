"""POST /tokenize and /detokenize: pure CPU work; no engine slot and no part in the queue limits."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import NotFound
from headrace.front.server.conversation import render
from headrace.front.server.exchange import Exchange, json_response
from headrace.front.server.openai.custom import with_functions
from headrace.front.server.openai.legacy import with_tools
from headrace.front.server.openai.schema import ChatRequest, Name, TokenId, parse

THREAD_TOKENS = 4096
"""From this many tokens on a text is made in a thread, so that running streams go on meanwhile."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A raw prompt."""

    prompt: str
    model: Name | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatRequest, frozen=True, kw_only=True):
    """Messages, rendered as /v1/chat/completions would."""

    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of this model's vocabulary."""

    tokens: Annotated[list[TokenId], Meta(max_length=2**22)]
    model: Name | None = None


async def post_tokenize(exchange: Exchange, document: Any) -> Response:
    """Token ids of a prompt or of messages, with the model's length."""
    services = exchange.services
    if isinstance(document, dict) and "messages" in document:
        given = parse(document, TokenizeChatRequest)
        services.model_name(given.model)
        chat, _ = with_functions(with_tools(given))
        ids, with_strings = await render(exchange, chat), given.return_token_strs
    else:
        plain = parse(document, TokenizeRequest)
        services.model_name(plain.model)
        with_strings = plain.return_token_strs
        ids = await services.tokenizer.encode_async(
            plain.prompt, add_special_tokens=plain.add_special_tokens
        )
    strings = [services.tokenizer.token_text(i) for i in ids] if with_strings else None
    return json_response(
        {
            "count": len(ids),
            "max_model_len": services.text.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


async def post_detokenize(exchange: Exchange, document: Any) -> Response:
    """The text of ids; an id out of range is refused."""
    request = parse(document, DetokenizeRequest)
    exchange.services.model_name(request.model)
    decode = exchange.services.tokenizer.decode
    if len(request.tokens) < THREAD_TOKENS:
        text = decode(request.tokens, skip_special_tokens=False)
    else:
        text = await asyncio.to_thread(decode, request.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


async def get_tokenizer_info(exchange: Exchange, request: Request) -> Response:
    """GET /tokenizer_info: what a client needs to know to tokenize by itself, and how answers are parsed."""
    services = exchange.services
    if not services.server.tokenizer_info:
        raise NotFound("/tokenizer_info is off on this server; --tokenizer-info turns it on")
    tokenizer, text = services.tokenizer, services.text
    special = {i: tokenizer.token_text(i) for i in sorted(tokenizer.special_ids)}
    return json_response(
        {
            "model": text.model_names[0],
            "max_model_len": text.max_model_len,
            "vocab_size": tokenizer.num_ids,
            "special_tokens": tokenizer.facts.special_tokens,
            "special_token_ids": {piece: i for i, piece in special.items()},
            "eos_token_ids": list(text.eos_ids),
            "chat_template": text.chat_template,
            "tool_parser": text.tool_parser,
            "reasoning_parser": text.reasoning_parser,
        }
    )
