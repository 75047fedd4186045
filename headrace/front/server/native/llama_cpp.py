"""Routes that clients of llama.cpp's server ask beside the chats: what is served, and how messages
become a prompt."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.own_names import base_of
from headrace.front.server.conversation.pipeline import prompt_ids
from headrace.front.server.conversation.request import ChatRequest, parse
from headrace.front.server.conversation.resolved import called, prompt_source
from headrace.front.text.threads import TEXT_THREADS


async def get_props(context: RequestContext, request: Request) -> Response:
    """What is served: length, defaults of sampling, kinds of media, and with --tokenizer-info the
    chat template. `?model=` names one of several."""
    model = await base_of(context, request.query_params.get("model"))
    await context.choose_model({"model": model}, runs=False)
    services = context.services
    text, media = services.text, services.text.media
    document: dict[str, Any] = {
        "default_generation_settings": {
            "n_ctx": text.max_model_len,
            "params": text.generation_defaults,
        },
        "model_alias": text.model_names[0],
        "modalities": {
            "vision": media is not None and media.image_token is not None,
            "audio": media is not None and media.audio_token is not None,
        },
        "build_info": f"headrace {__version__}",
    }
    if services.server.tokenizer_info:
        document["chat_template"] = text.chat_template
    return json_response(document)


async def post_apply_template(context: RequestContext, document: Any) -> Response:
    """The prompt of a chat's messages, as text with its control tokens; nothing runs."""
    context.hold_place()
    request = parse(document, ChatRequest)
    context.services.model_name(request.model)
    chat, _ = called(request)
    ids = await prompt_ids(context, prompt_source(chat))
    decode = partial(context.services.tokenizer.decode, ids, skip_special_tokens=False)
    return json_response({"prompt": await TEXT_THREADS.run(2 * len(ids), decode)})
