"""RenderService: the routes that need no model."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from headrace import __version__
from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.prompts import TokenizeRequest
from headrace.front.server.conversation.rendering import render_chat, render_completion
from headrace.front.server.conversation.request import parse
from headrace.front.server.grpc.rpc import Fields, Rpc, RpcService
from headrace.front.text.threads import TEXT_THREADS


async def chat(context: RequestContext, fields: Fields) -> Fields:
    """RenderChat."""
    document = {**_sampling(fields), **fields}
    return _rendered_fields(await render_chat(context, document))


async def completion(context: RequestContext, fields: Fields) -> Fields:
    """RenderCompletion."""
    document = {**_sampling(fields), **fields, "prompt": fields.pop("prompts", [])}
    rendered = await render_completion(context, document)
    return {"prompts": [_rendered_fields(each) for each in rendered]}


def _sampling(fields: Fields) -> Fields:
    """Takes the fields of a request that have no field of their own."""
    sampling = fields.pop("sampling", {})
    if not isinstance(sampling, dict):
        raise InvalidRequest("sampling: must be a JSON object", field="sampling")
    return sampling


def _rendered_fields(rendered: dict[str, Any]) -> Fields:
    ids = rendered["token_ids"]
    reply = {
        "request_id": rendered["request_id"],
        "token_ids": ids,
        "num_tokens": len(ids),
        "model": rendered["model"],
        "sampling_params": msgspec.json.encode(rendered["sampling_params"]).decode(),
    }
    if "parse_context" in rendered:
        reply["parse_context"] = msgspec.json.encode(rendered["parse_context"]).decode()
    if "prompt_text" in rendered:
        reply["prompt_text"] = rendered["prompt_text"]
    if "token_offsets" in rendered:
        spans = rendered["token_offsets"]
        reply["token_offsets"] = [{"start": start, "end": end} for start, end in spans]
    return reply


async def tokenize(context: RequestContext, fields: Fields) -> Fields:
    """Tokenize."""
    request = parse(fields, TokenizeRequest)
    services = context.services
    services.model_name(request.model)
    ids = await services.tokenizer.encode_async(
        request.prompt, add_special_tokens=request.add_special_tokens
    )
    return {"token_ids": ids, "max_model_len": services.text.max_model_len}


async def detokenize(context: RequestContext, fields: Fields) -> Fields:
    """Detokenize."""
    context.services.model_name(fields.get("model"))
    ids = fields.get("token_ids", [])
    decode = partial(context.services.tokenizer.decode, ids, skip_special_tokens=False)
    return {"text": await TEXT_THREADS.run(2 * len(ids), decode)}


async def health(context: RequestContext, fields: Fields) -> Fields:
    """HealthCheck."""
    return {"status": "ok", "version": __version__}


SERVICE = RpcService(
    full_name="headrace.render.v1.RenderService",
    methods={
        "RenderChat": Rpc(
            route="/v1/chat/completions/render",
            unary=chat,
            json=("messages", "tools", "chat_template_kwargs", "sampling"),
            runs=False,
        ),
        "RenderCompletion": Rpc(
            route="/v1/completions/render", unary=completion, json=("sampling",), runs=False
        ),
        "Tokenize": Rpc(route="/tokenize", unary=tokenize, runs=False),
        "Detokenize": Rpc(route="/detokenize", unary=detokenize, runs=False),
        "HealthCheck": Rpc(route="/version", unary=health),
    },
)
