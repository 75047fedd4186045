"""The OpenAPI document, made from the table of routes: what a route says about itself is its
handler's docstring, what it takes is the struct its handler parses. Nothing is written twice, so
nothing can be out of date."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace import __version__
from headrace.front.server.administration.named import ADMIN
from headrace.front.server.conversation.context import RequestContext, json_response

Json = dict[str, Any]
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
NO_DEFAULTS: Mapping[str, Any] = {}
_REFERENCE = "#/components/schemas/{name}"


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong, with the field as it was sent."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, kw_only=True):
    """The body of a failure."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong; the message names the field."""

    type: str
    message: str


class MessagesError(msgspec.Struct, kw_only=True):
    """The body of a failure under /v1/messages."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class CohereError(msgspec.Struct, kw_only=True):
    """The body of a failure under /v2."""

    id: str
    message: str


class OllamaError(msgspec.Struct, kw_only=True):
    """The body of a failure under /api."""

    error: str


ERRORS: Mapping[str, type[msgspec.Struct]] = {
    **{"/v1/messages": MessagesError, "/v2/": CohereError},
    **{"/v1/tokenize": CohereError, "/v1/detokenize": CohereError},
    **{"/api/hello": Error, "/api/": OllamaError},
}
"""The failures of paths that begin so, where their dialect has a shape of its own."""


class ApiRoute(Route):
    """A route that can be described: `bodies` are the structs its request may be, `query` the one
    whose fields stand in its query, with `defaults` of its own; with `sockets` it also upgrades."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        methods: Sequence[str],
        doc: str,
        bodies: Sequence[type[msgspec.Struct]] = (),
        query: type[msgspec.Struct] | None = None,
        defaults: Mapping[str, Any] = NO_DEFAULTS,
        sockets: bool = False,
    ) -> None:
        super().__init__(path, endpoint, methods=list(methods))
        self.doc = doc
        self.bodies = bodies
        self.query = query
        self.defaults = defaults
        self.sockets = sockets
        self.described = list(methods)


def document(routes: Sequence[ApiRoute], *, public: Collection[str]) -> Json:
    """The document (OpenAPI 3.1)."""
    bodies = [body for route in routes for body in route.bodies]
    _, components = msgspec.json.schema_components(
        [Error, *ERRORS.values(), *bodies], ref_template=_REFERENCE
    )
    paths: dict[str, Json] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in route.described:
            paths.setdefault(path, {})[method.lower()] = _operation(
                route, method, is_public=route.path in public
            )
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"apiKey": []}],
    }


def _operation(route: ApiRoute, method: str, *, is_public: bool) -> Json:
    words = re.findall(r"\w+", route.path)
    own = [error for start, error in ERRORS.items() if route.path.startswith(start)]
    error = (own or [Error])[0].__name__
    operation: Json = {
        "operationId": "_".join([method.lower(), *words]),
        "summary": " ".join(route.doc.split()),
        "responses": {"200": _answer(route), "default": _json_body(error, "A failure.")},
    }
    if is_public:
        operation["security"] = []
    if route.path in ADMIN:
        operation["tags"] = ["admin"]
    if route.sockets:
        operation["x-websocket"] = True
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.bodies:
        schemas = [{"$ref": _REFERENCE.format(name=body.__name__)} for body in route.bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(route: ApiRoute) -> list[Json]:
    names = _PARAMETER.findall(route.path)
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    if route.query is None:
        return parameters
    _, components = msgspec.json.schema_components([route.query])
    described = components[route.query.__name__]
    for name, schema in described["properties"].items():
        if name in names:
            continue
        required = name in described.get("required", ()) and name not in route.defaults
        if name in route.defaults:
            schema = {**schema, "default": route.defaults[name]}
        parameters.append({"name": name, "in": "query", "required": required, "schema": schema})
    return parameters


def _answer(route: ApiRoute) -> Json:
    content: Json = {"application/json": {}}
    if any("stream" in body.__struct_fields__ for body in route.bodies):
        ollama = route.path.startswith("/api/")
        content["application/x-ndjson" if ollama else "text/event-stream"] = {}
    return {"description": "The answer.", "content": content}


def _json_body(name: str, description: str) -> Json:
    schema = {"$ref": _REFERENCE.format(name=name)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def serving(
    routes: list[ApiRoute], *, public: Collection[str]
) -> Callable[[RequestContext, Request], Awaitable[Response]]:
    """The handler of GET /openapi.json over this table, which is read when the first client
    asks."""
    described: Json = {}

    async def get_openapi(context: RequestContext, request: Request) -> Response:
        """GET /openapi.json: this document."""
        if not described:
            described.update(document(routes, public=public))
            if root := context.services.server.root_path:
                described["servers"] = [{"url": root}]
        return json_response(described)

    return get_openapi
