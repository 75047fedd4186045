"""POST /v1/tokenize and /v1/detokenize: texts and tokens in Cohere's form. Nothing runs."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.http.limits import Name, TokenId, typed
from headrace.front.text.threads import TEXT_THREADS

META = {"api_version": {"version": "1"}}
MAX_CHARS = 65_536


class CohereTokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/tokenize."""

    text: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]
    model: Name | None = None


class CohereDetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_CHARS)]
    model: Name | None = None


async def post_tokenize(context: RequestContext, document: Any) -> Response:
    """The tokens of a text, without the model's own around it."""
    request = typed(document, CohereTokenizeRequest)
    context.services.model_name(request.model)
    context.hold_place()
    tokenizer = context.services.tokenizer
    ids = await tokenizer.encode_async(request.text, add_special_tokens=False, field="text")
    strings = await TEXT_THREADS.run(
        2 * len(ids), lambda: [tokenizer.vocabulary_token(i) for i in ids]
    )
    return json_response({"tokens": ids, "token_strings": strings, "meta": META})


async def post_detokenize(context: RequestContext, document: Any) -> Response:
    """The text of tokens."""
    request = typed(document, CohereDetokenizeRequest)
    context.services.model_name(request.model)
    context.hold_place()
    tokenizer = context.services.tokenizer
    tokenizer.check_ids(request.tokens, field="tokens")
    decode = partial(tokenizer.decode, request.tokens, skip_special_tokens=False)
    text = await TEXT_THREADS.run(2 * len(request.tokens), decode)
    return json_response({"text": text, "meta": META})
