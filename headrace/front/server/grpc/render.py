"""RenderService: the routes that need no model."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace import __version__
from headrace.front.server.exchange import Exchange
from headrace.front.server.grpc.messages import RENDER
from headrace.front.server.grpc.rpc import Given, Rpc, RpcService
from headrace.front.server.native.tokenize import TokenizeRequest
from headrace.front.server.openai.schema import parse
from headrace.front.server.tokens.render import render_chat, render_completion


async def chat(exchange: Exchange, given: Given) -> Given:
    """RenderChat."""
    document = {**given.pop("sampling", {}), **given}
    return _told(await render_chat(exchange, document))


async def completion(exchange: Exchange, given: Given) -> Given:
    """RenderCompletion."""
    document = {**given.pop("sampling", {}), **given, "prompt": given.pop("prompts", [])}
    found = await render_completion(exchange, document)
    return {"prompts": [_told(each) for each in found]}


def _told(rendered: dict[str, Any]) -> Given:
    ids = rendered["token_ids"]
    told = {
        "request_id": rendered["request_id"],
        "token_ids": ids,
        "num_tokens": len(ids),
        "model": rendered["model"],
        "sampling_params": msgspec.json.encode(rendered["sampling_params"]).decode(),
    }
    if "prompt_text" in rendered:
        told["prompt_text"] = rendered["prompt_text"]
    if "token_offsets" in rendered:
        spans = rendered["token_offsets"]
        told["token_offsets"] = [{"start": start, "end": end} for start, end in spans]
    return told


async def tokenize(exchange: Exchange, given: Given) -> Given:
    """Tokenize."""
    request = parse(given, TokenizeRequest)
    services = exchange.services
    services.model_name(request.model)
    ids = await services.tokenizer.encode_async(
        request.prompt, add_special_tokens=request.add_special_tokens
    )
    return {"token_ids": ids, "max_model_len": services.text.max_model_len}


async def detokenize(exchange: Exchange, given: Given) -> Given:
    """Detokenize."""
    exchange.services.model_name(given.get("model"))
    ids = given.get("token_ids", [])
    return {"text": exchange.services.tokenizer.decode(ids, skip_special_tokens=False)}


async def health(exchange: Exchange, given: Given) -> Given:
    """HealthCheck."""
    return {"status": "ok", "version": __version__}


SERVICE = RpcService(
    protocol=RENDER,
    name="RenderService",
    methods={
        "RenderChat": Rpc(route="/v1/chat/completions/render", unary=chat),
        "RenderCompletion": Rpc(route="/v1/completions/render", unary=completion),
        "Tokenize": Rpc(route="/tokenize", unary=tokenize),
        "Detokenize": Rpc(route="/detokenize", unary=detokenize),
        "HealthCheck": Rpc(route="/version", unary=health),
    },
)
