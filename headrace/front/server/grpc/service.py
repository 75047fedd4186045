"""The gRPC server: generic handlers over the functions of the HTTP routes, with standard health and reflection.

Keys are checked as over HTTP, from the metadata. Errors: INVALID_ARGUMENT, UNAUTHENTICATED, PERMISSION_DENIED,
NOT_FOUND, RESOURCE_EXHAUSTED, UNAVAILABLE, UNIMPLEMENTED, DEADLINE_EXCEEDED, else INTERNAL.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import msgspec
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace import __version__
from headrace.base.errors import ConfigError
from headrace.front.server.auth import Gatekeeper
from headrace.front.server.exchange import Exchange, Services
from headrace.front.server.failures import Failure, failure_of
from headrace.front.server.grpc.messages import (
    CLASSES,
    METHODS,
    SERVICE,
    given_fields,
)
from headrace.front.server.native.tokenize import TokenizeRequest
from headrace.front.server.openai.schema import ChatRequest, CompletionRequest, parse
from headrace.front.server.tokens.render import rendered_chat, rendered_completion

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
MAX_CONCURRENT = 256
Handler = Callable[[Exchange, dict[str, Any]], Awaitable[dict[str, Any]]]


async def start_grpc(services: Services, address: str) -> tuple[aio.Server, int]:
    """A server that takes requests at `address` (host:port, port 0 takes a free one), and its port."""
    server = aio.server(
        options=[
            ("grpc.max_receive_message_length", services.server.max_body_bytes),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", MAX_CONCURRENT),
        ],
        maximum_concurrent_rpcs=MAX_CONCURRENT,
    )
    server.add_generic_rpc_handlers((_handlers(services),))
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    for name in ("", SERVICE):
        await state.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(
        (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen for gRPC on {address}", field="--grpc-port") from error
    await server.start()
    return server, port


def _handlers(services: Services) -> grpc.GenericRpcHandler:
    spec = services.server
    gatekeeper = Gatekeeper(
        api_key_digests=spec.api_key_digests,
        admin_key_digest=spec.admin_key_digest,
        public_metrics=False,
    )
    found = {}
    for name, (taken, given) in METHODS.items():
        found[name] = grpc.unary_unary_rpc_method_handler(
            _method(services, gatekeeper, _ROUTES[name], CLASSES[given]),
            request_deserializer=CLASSES[taken].FromString,
            response_serializer=CLASSES[given].SerializeToString,
        )
    return grpc.method_handlers_generic_handler(SERVICE, found)


def _method(
    services: Services, gatekeeper: Gatekeeper, handler: Handler, answer: Any
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def method(message: Any, context: Any) -> Any:
        exchange = Exchange(services=services, request_id=f"req_{secrets.token_hex(12)}")
        try:
            headers = [(k.encode(), _bytes(v)) for k, v in context.invocation_metadata()]
            exchange.tenant = gatekeeper.tenant({"path": f"/{SERVICE}", "headers": headers})
            return answer(**await handler(exchange, given_fields(message)))
        except Exception as error:
            failure = failure_of(error, request_id=exchange.request_id)
        await context.abort(_code(failure), failure.message)

    return method


def _bytes(value: str | bytes) -> bytes:
    return value.encode("latin-1", "replace") if isinstance(value, str) else value


def _code(failure: Failure) -> grpc.StatusCode:
    return _CODES.get(failure.status, grpc.StatusCode.INTERNAL)


async def _chat(exchange: Exchange, given: dict[str, Any]) -> dict[str, Any]:
    wants_text = given.pop("return_prompt_text", False)
    document = {**given.pop("sampling", {}), **given}
    rendered = await rendered_chat(exchange, parse(document, ChatRequest))
    made = _rendered(rendered)
    if wants_text:
        decode = exchange.services.tokenizer.decode
        made["prompt_text"] = decode(rendered["token_ids"], skip_special_tokens=False)
    return made


async def _completion(exchange: Exchange, given: dict[str, Any]) -> dict[str, Any]:
    document = {**given.pop("sampling", {}), **given, "prompt": given.pop("prompts", [])}
    rendered = await rendered_completion(exchange, parse(document, CompletionRequest))
    return {"prompts": [CLASSES["Rendered"](**_rendered(each)) for each in rendered]}


def _rendered(rendered: dict[str, Any]) -> dict[str, Any]:
    ids = rendered["token_ids"]
    return {
        "request_id": rendered["request_id"],
        "token_ids": ids,
        "num_tokens": len(ids),
        "model": rendered["model"],
        "sampling_params": msgspec.json.encode(rendered["sampling_params"]).decode(),
    }


async def _tokenize(exchange: Exchange, given: dict[str, Any]) -> dict[str, Any]:
    request = parse(given, TokenizeRequest)
    services = exchange.services
    services.model_name(request.model)
    ids = await services.tokenizer.encode_async(
        request.prompt, add_special_tokens=request.add_special_tokens
    )
    return {"token_ids": ids, "max_model_len": services.text.max_model_len}


async def _detokenize(exchange: Exchange, given: dict[str, Any]) -> dict[str, Any]:
    exchange.services.model_name(given.get("model"))
    ids = given.get("token_ids", [])
    return {"text": exchange.services.tokenizer.decode(ids, skip_special_tokens=False)}


async def _health(exchange: Exchange, given: dict[str, Any]) -> dict[str, Any]:
    return {"status": "ok", "version": __version__}


_ROUTES: dict[str, Handler] = {
    "RenderChat": _chat,
    "RenderCompletion": _completion,
    "Tokenize": _tokenize,
    "Detokenize": _detokenize,
    "HealthCheck": _health,
}
