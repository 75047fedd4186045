"""POST /tokenize and /detokenize: pure CPU work; no engine slot and no part in the queue limits."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import NotFound
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.own_names import base_of
from headrace.front.server.conversation.pipeline import prompt_ids
from headrace.front.server.conversation.prompts import TokenizeRequest
from headrace.front.server.conversation.request import ChatRequest, parse
from headrace.front.server.conversation.resolved import called, prompt_source
from headrace.front.server.http.limits import Name, TokenId
from headrace.front.text.threads import TEXT_THREADS
from headrace.front.text.tokenizer import Tokenizer


class TokenizeChatRequest(ChatRequest, frozen=True, kw_only=True):
    """Messages, rendered as /v1/chat/completions would."""

    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of this model's vocabulary."""

    tokens: Annotated[list[TokenId], Meta(max_length=2**22)]
    model: Name | None = None


async def post_tokenize(context: RequestContext, document: Any) -> Response:
    """Token ids of a prompt or of messages, with the model's length."""
    services = context.services
    context.hold_place()
    if isinstance(document, dict) and "messages" in document:
        request = parse(document, TokenizeChatRequest)
        services.model_name(request.model)
        chat, _ = called(request)
        ids = await prompt_ids(context, prompt_source(chat))
        with_strings = request.return_token_strs
    else:
        plain = parse(document, TokenizeRequest)
        services.model_name(plain.model)
        with_strings = plain.return_token_strs
        ids = await services.tokenizer.encode_async(
            plain.prompt, add_special_tokens=plain.add_special_tokens
        )
    strings = await _strings(services.tokenizer, ids) if with_strings else None
    return json_response(
        {
            "count": len(ids),
            "max_model_len": services.text.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


async def post_detokenize(context: RequestContext, document: Any) -> Response:
    """The text of ids; an id out of range is refused."""
    request = parse(document, DetokenizeRequest)
    context.services.model_name(request.model)
    context.hold_place()
    decode = partial(context.services.tokenizer.decode, request.tokens, skip_special_tokens=False)
    return json_response({"prompt": await TEXT_THREADS.run(2 * len(request.tokens), decode)})


async def _strings(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return await TEXT_THREADS.run(
        2 * len(ids), lambda: [tokenizer.vocabulary_token(i) for i in ids]
    )


async def get_tokenizer_info(context: RequestContext, request: Request) -> Response:
    """GET /tokenizer_info: what a client needs to know to tokenize by itself, and how answers are
    parsed. `?model=` names one of several."""
    if not context.services.server.tokenizer_info:
        raise NotFound("/tokenizer_info is off on this server; --tokenizer-info turns it on")
    model = await base_of(context, request.query_params.get("model"))
    await context.choose_model({"model": model}, runs=False)
    services = context.services
    tokenizer, text = services.tokenizer, services.text
    special = {i: tokenizer.token_text(i) for i in sorted(tokenizer.special_ids)}
    return json_response(
        {
            "model": text.model_names[0],
            "max_model_len": text.max_model_len,
            "vocab_size": tokenizer.num_ids,
            "tokenizer_class": tokenizer.facts.tokenizer_class or type(tokenizer).__name__,
            **tokenizer.facts.special_tokens,
            "special_tokens": tokenizer.facts.special_tokens,
            "special_token_ids": {piece: i for i, piece in special.items()},
            "eos_token_ids": list(text.eos_ids),
            "chat_template": text.chat_template,
            "tool_parser": text.tool_parser,
            "reasoning_parser": text.reasoning_parser,
        }
    )
