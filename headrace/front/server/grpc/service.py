"""The gRPC server: the services of this package over the same functions as the HTTP routes, with
standard health and reflection.

Keys are checked as over HTTP, from the metadata; `traceparent` is taken from there too. Errors:
INVALID_ARGUMENT (what the caller did wrong), UNAUTHENTICATED, PERMISSION_DENIED, NOT_FOUND,
FAILED_PRECONDITION (409), RESOURCE_EXHAUSTED, UNAVAILABLE, UNIMPLEMENTED (no engine, or not built),
DEADLINE_EXCEEDED, else INTERNAL."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from headrace.base.config.tls import TlsSpec
from headrace.base.errors import ConfigError, InvalidRequest, Unavailable
from headrace.front.server.administration.api import api_authenticator
from headrace.front.server.conversation.context import RequestContext, Services
from headrace.front.server.conversation.own_names import base_of
from headrace.front.server.grpc import admin, control, engine, inference, render
from headrace.front.server.grpc.certificates import GrpcCertificates
from headrace.front.server.grpc.rpc import POOL, Fields, Rpc, RpcService, fields_of
from headrace.front.server.http.auth import PROBES, ApiKeyAuthenticator, request_id
from headrace.front.server.http.body_budget import WAIT_S
from headrace.front.server.http.error_names import ERROR_NAMES
from headrace.front.server.http.failures import Failure, failure_of

_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
MAX_CONCURRENT = 256
HEALTH_S = 0.25
SERVING = (render.SERVICE, inference.SERVICE, engine.SERVICE, control.SERVICE, admin.SERVICE)
"""What a server with a model serves."""
RENDERING = (render.SERVICE,)
"""What a server of texts serves; what needs a model is UNIMPLEMENTED."""
for _known in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
    POOL.AddSerializedFile(_known.serialized_pb)


class GrpcServer:
    """A running server. `port` is the one that was found."""

    def __init__(self, server: aio.Server, port: int, watch: asyncio.Task[None]) -> None:
        self.port = port
        self._server = server
        self._watch = watch

    async def stop(self, within_s: float) -> None:
        """Takes no more calls, and ends those that run after `within_s`."""
        self._watch.cancel()
        await self._server.stop(within_s)


async def start_grpc(
    services: Services,
    address: str,
    offered: Sequence[RpcService] = SERVING,
    *,
    shares_port: bool = True,
) -> GrpcServer:
    """A server that takes calls at `address` (port 0 takes a free one). `shares_port`: other
    processes may take calls there too, as those of one `headrace serve` do."""
    server = aio.server(
        options=[
            ("grpc.max_receive_message_length", services.server.max_body_bytes),
            ("grpc.so_reuseport", int(shares_port)),
            ("grpc.max_concurrent_streams", MAX_CONCURRENT),
        ],
        maximum_concurrent_rpcs=MAX_CONCURRENT,
    )
    spec = services.server
    authenticator = api_authenticator(spec, services.keys, public=PROBES)
    for service in offered:
        server.add_generic_rpc_handlers((_handlers(services, authenticator, service),))
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    names = [service.full_name for service in offered]
    reflection.enable_server_reflection(
        (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server, pool=POOL
    )
    try:
        port = _listening(server, spec.tls, address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen for gRPC on {address}", field="--grpc-port") from error
    await _tell_health(services, state, names)
    await server.start()
    watch = asyncio.ensure_future(_watch_health(services, state, names))
    return GrpcServer(server, port, watch)


def _listening(server: aio.Server, tls: TlsSpec | None, address: str) -> int:
    """The port that is listened on."""
    if tls is None:
        return int(server.add_insecure_port(address))
    files = GrpcCertificates(tls)
    credentials = grpc.dynamic_ssl_server_credentials(
        files.read(), files.changed, tls.client_authorities is not None
    )
    return int(server.add_secure_port(address, credentials))


async def _watch_health(services: Services, state: Any, names: list[str]) -> None:
    """What health says follows readiness: load balancers turn away from a server that drains or has
    no engine."""
    while True:
        await asyncio.sleep(HEALTH_S)
        await _tell_health(services, state, names)


async def _tell_health(services: Services, state: Any, names: list[str]) -> None:
    kinds = health_pb2.HealthCheckResponse
    for name in ("", *names):
        await state.set(name, kinds.SERVING if services.ready else kinds.NOT_SERVING)


def _handlers(
    services: Services, authenticator: ApiKeyAuthenticator, service: RpcService
) -> grpc.GenericRpcHandler:
    rpcs = {}
    for name, rpc in service.methods.items():
        path = f"{service.full_name}/{name}"
        messages = service.request(name), service.response(name)
        call = _Calls(services, authenticator, rpc, path, *messages)
        streams = service.described[name].server_streaming
        make = (
            grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        )
        rpcs[name] = make(
            call.stream if streams else call.unary,
            response_serializer=service.response(name).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, rpcs)


class _Calls:
    """The calls of one method."""

    def __init__(
        self,
        services: Services,
        authenticator: ApiKeyAuthenticator,
        rpc: Rpc,
        path: str,
        asked: Any,
        answer: Any,
    ) -> None:
        self._services = services
        self._authenticator = authenticator
        self._rpc = rpc
        self._path = path
        self._asked = asked
        self._answer = answer

    async def unary(self, message: bytes, call: Any) -> Any:
        """One answer."""
        assert self._rpc.unary is not None
        async with self._request_context(call, message) as context:
            fields = await self._fields(context, message)
            return self._answer(**await self._rpc.unary(context, fields))

    async def stream(self, message: bytes, call: Any) -> AsyncGenerator[Any, None]:
        """Answers as they come; a client that leaves ends what runs for it."""
        assert self._rpc.stream is not None
        async with self._request_context(call, message) as context:
            fields = await self._fields(context, message)
            async with contextlib.aclosing(self._rpc.stream(context, fields)) as answers:
                async for one in answers:
                    yield self._answer(**one)

    async def _fields(self, context: RequestContext, message: bytes) -> Fields:
        """What was sent, once the model it names can serve it."""
        try:
            fields = fields_of(self._asked.FromString(message), json=self._rpc.json)
        except DecodeError:
            name = self._asked.DESCRIPTOR.full_name
            raise InvalidRequest(f"the message is no {name}") from None
        if self._rpc.runs is not None:
            if "model" in fields:
                fields["model"] = await base_of(context, fields["model"])
            asked = {"model": fields.get("lora_name") or fields.get("model")}
            await context.choose_model(asked, runs=self._rpc.runs)
        return fields

    @contextlib.asynccontextmanager
    async def _request_context(self, call: Any, message: bytes) -> AsyncIterator[RequestContext]:
        """What app.Shell is to a request: who may ask, the room for the message while the call
        lasts, the trace, the count, and the failure as a code."""
        services = self._services
        context = RequestContext(services=services, request_id=request_id())
        failure, code = None, grpc.StatusCode.CANCELLED
        headers = [(k.encode(), _bytes(v)) for k, v in call.invocation_metadata() or ()]
        try:
            context.tenant = self._authenticator.tenant(
                {"path": self._rpc.route, "headers": headers}
            )
            if services.draining:
                raise Unavailable("the server is shutting down", retry_after_s=5.0)
            scope = {"method": "POST", "path": f"/{self._path}", "headers": headers}
            context.begin_trace(scope)
            if (left_s := call.time_remaining()) is not None:
                context.timeout_s = max(0.0, left_s)
            context.body_bytes = len(message)
            await context.make_room(context.body_bytes, wait_s=WAIT_S)
            yield context
            code = grpc.StatusCode.OK
        except Exception as error:
            failure = failure_of(error, request_id=context.request_id)
            code = _code(failure)
        finally:
            context.held.close()
            context.over(_status(failure, code))
            method, name = self._path.rpartition("/")[2], code.name
            services.metrics.add("headrace_grpc_requests_total", method=method, code=name)
        if failure is not None:
            await call.abort(code, failure.message)


def _bytes(value: str | bytes) -> bytes:
    return value.encode("latin-1", "replace") if isinstance(value, str) else value


def _code(failure: Failure) -> grpc.StatusCode:
    if failure.code == ERROR_NAMES["Unsupported"].code:
        return grpc.StatusCode.UNIMPLEMENTED
    if 400 <= failure.status < 500:
        return _CODES.get(failure.status, grpc.StatusCode.INVALID_ARGUMENT)
    return _CODES.get(failure.status, grpc.StatusCode.INTERNAL)


def _status(failure: Failure | None, code: grpc.StatusCode) -> int:
    """The HTTP status that traces tell: 499 for a client that left."""
    if failure is not None:
        return failure.status
    return 200 if code is grpc.StatusCode.OK else 499
