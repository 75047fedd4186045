"""Operations over HTTP: who may ask, and how a request becomes an operation's fields.

The admin API (/v1/admin/) has a listener of its own (`--admin-listen`), behind the admin key if
there is one; without one the listener is a Unix socket or loopback, and only loopback names are
answered. Nothing of the API is served there, and /v1/admin/ is not served on the API's port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headrace.base.config.resolved import ServerSpec
from headrace.base.errors import Forbidden, InvalidRequest, Unsupported
from headrace.front.server.administration.named import ADMIN, READS, REFUSED
from headrace.front.server.administration.operations import Operation
from headrace.front.server.administration.parameters import from_words
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.request import parse
from headrace.front.server.http.auth import (
    ADMIN_TENANT,
    UNIX,
    ApiKeyAuthenticator,
    check_host,
    digest_matches,
    presented_digest,
)
from headrace.front.server.http.keys import ApiKeys


def api_authenticator(
    spec: ServerSpec, keys: ApiKeys, *, public: frozenset[str]
) -> ApiKeyAuthenticator:
    """Who may ask the API, and with which key the routes of administration on it."""
    return ApiKeyAuthenticator(
        keys=keys,
        admin_key_digest=spec.admin_key_digest,
        public_metrics=spec.public_metrics,
        admin=ADMIN,
        admin_reads=READS,
        public=public,
        readonly=spec.admin_readonly,
        socket_file=spec.host.startswith(UNIX),
    )


class AdminAuthenticator:
    """Decides who may ask the admin API."""

    def __init__(
        self, admin_key_digest: str | None, *, readonly: bool, socket_file: bool = False
    ) -> None:
        self._digest = admin_key_digest
        self._readonly = readonly
        self._socket_file = socket_file

    def tenant(self, scope: Scope) -> str:
        """ "admin"; Unauthorized without the key, Forbidden for a change in read-only mode."""
        if self._digest is None and not self._socket_file:
            check_host(scope)
        elif self._digest is not None:
            digest_matches(presented_digest(scope), self._digest)
        if self._readonly and scope["method"] not in ("GET", "HEAD"):
            raise Forbidden("the admin API is read-only here (--admin-readonly)")
        return ADMIN_TENANT


def fields_of(
    request: Request,
    body: object,
    reads: type[msgspec.Struct],
    fixed: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields of an operation: those of the query, of the path, and of the JSON body."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    query = request.query_params
    words = {name: query.getlist(name) for name in query}
    known = {name: body[name] for name in reads.__struct_fields__ if name in body}
    return {**fixed, **from_words(words, reads), **known, **request.path_params}


async def answer(
    context: RequestContext, operation: Operation, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """What an operation answers to these fields, whichever way it was asked."""
    return await operation.run(context, parse(dict(fields), operation.parameters))


def refusing(path: str) -> Callable[[RequestContext, Request], Awaitable[Response]]:
    """The handler of a row of REFUSED."""

    async def handler(context: RequestContext, request: Request) -> Response:
        raise Unsupported(f"{path.lstrip('/')}: {REFUSED[path]}")

    handler.__doc__ = f"Refused: {REFUSED[path]}."
    return handler
