"""Who may ask for what: one decision on the raw ASGI path, before anything else looks at the
request.

Default-deny: a path is public only if it equals an entry of the public list byte for byte, so no
mutation of a path (double slashes, dots, escapes, letter case) can turn a guarded route into a
public one. Keys are compared as SHA-256 digests in constant time. The admin API has a key of its
own, and each key opens its own part only.

The ids of requests and answers are made here too: they are random, so that knowing one is the
permission to ask about what it names. What a client sends as an id is at most a label. What a key
has in flight is counted by `KeyShares`."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Scope

from headrace.base.config.resolved import ServerSpec
from headrace.base.errors import (
    Forbidden,
    NotFound,
    RateLimited,
    Unauthorized,
    UnsupportedMedia,
)
from headrace.base.telemetry.metrics import OTHER, template_of
from headrace.front.server.http.keys import ApiKeys

PROBES = frozenset(
    {"/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/api/hello"}
)
TENANT_CHARS = 32
UNIX = "unix:"
ADMIN_TENANT = "admin"
"""No key has it: those of keys are hexadecimal digits."""


@dataclass(frozen=True, kw_only=True)
class ApiKeyAuthenticator:
    """Decides from the scope alone. Without API keys every route but the admin ones is open (to
    loopback clients). `public`: paths that need no key; `admin`: those of administration;
    `admin_reads`: those of them that change nothing. `socket_file`: this server listens on a Unix
    socket, which no browser reaches, so that the Host does not count."""

    keys: ApiKeys
    admin_key_digest: str | None
    public_metrics: bool
    admin: frozenset[str]
    admin_reads: frozenset[str]
    public: frozenset[str] = PROBES
    readonly: bool = False
    socket_file: bool = False

    def tenant(self, scope: Scope) -> str:
        """The tenant this request belongs to ("" without keys); raises Unauthorized, Forbidden or
        NotFound."""
        path = scope["path"]
        if path in self.public or (self.public_metrics and path == "/metrics"):
            return ""
        presented = presented_digest(scope)
        if path in self.admin:
            return self._admin(path, presented)
        if not self.keys.required:
            if not self.socket_file:
                check_host(scope)
                check_form(scope)
            return ""
        if presented is None:
            raise Unauthorized(
                "no API key given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
        # Every digest is compared, so that the time does not depend on which one matches.
        matches = [hmac.compare_digest(presented, known) for known in self.keys.digests]
        if any(matches):
            return tenant_of(presented)
        if self.admin_key_digest and hmac.compare_digest(presented, self.admin_key_digest):
            if template_of(path) == OTHER:
                raise NotFound("unknown route")
            raise Forbidden("the admin key opens the administrative routes only")
        raise Unauthorized("the API key is not valid")

    def _admin(self, path: str, presented: str | None) -> str:
        if presented is None and (self.admin_key_digest or self.keys.required):
            raise Unauthorized("this route needs the admin key")
        if self.admin_key_digest is None:
            if self.keys.required and not self._is_api_key(presented):
                raise Unauthorized("the API key is not valid")
            raise NotFound("the administrative routes are off; start with --admin-key to use them")
        assert presented is not None
        if hmac.compare_digest(presented, self.admin_key_digest):
            if self.readonly and path not in self.admin_reads:
                raise Forbidden("administration is read-only here (--admin-readonly)")
            return ADMIN_TENANT
        if self._is_api_key(presented):
            raise Forbidden("this route needs the admin key")
        raise Unauthorized("the admin key is not valid")

    def _is_api_key(self, presented: str | None) -> bool:
        matches = [hmac.compare_digest(presented or "", known) for known in self.keys.digests]
        return any(matches)


def tenant_of(digest: str) -> str:
    """The name of the tenant whose key has this digest."""
    return digest[:TENANT_CHARS]


def presented_digest(scope: Scope) -> str | None:
    """The digest of the key in the headers: `Authorization: Bearer KEY` (scheme in any case) or
    `x-api-key: KEY`. Unauthorized where a header comes twice: a proxy may have looked at the
    other."""
    bearer = api_key = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            _must_be_first(bearer, "Authorization")
            scheme, _, rest = value.strip().partition(b" ")
            bearer = rest.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key":
            _must_be_first(api_key, "x-api-key")
            api_key = value.strip()
    key = bearer or api_key
    return hashlib.sha256(key).hexdigest() if key else None


def _must_be_first(before: bytes | None, name: str) -> None:
    if before is not None:
        raise Unauthorized(f"{name} is given more than once; send one key")


def digest_matches(presented: str | None, known: str) -> None:
    """Unauthorized unless the key in the headers is the one with this digest."""
    if presented is None:
        raise Unauthorized("this route needs the admin key")
    if not hmac.compare_digest(presented, known):
        raise Unauthorized("the admin key is not valid")


def check_host(scope: Scope) -> None:
    """Without keys only loopback names are served: a rebound DNS name in a browser is refused."""
    for name, value in scope["headers"]:
        if name == b"host" and not is_loopback(value.decode("latin-1")):
            raise Forbidden("without API keys this server answers only to localhost")


def check_form(scope: Scope) -> None:
    """Without keys, a page of another site may not send what browsers send without asking: a form.
    (JSON they send nowhere without our consent, which they never get.)"""
    headers = dict(scope["headers"])
    if b"json" not in headers.get(b"content-type", b"json").lower():
        check_origin(scope)


def check_origin(scope: Scope) -> None:
    """Without keys, only pages of this machine are served."""
    for name, value in scope["headers"]:
        if name == b"origin":
            host = value.decode("latin-1").partition("://")[2]
            if not host or not is_loopback(host):
                raise Forbidden("without API keys this server does not answer pages of other sites")


def check_content_type(request: Request) -> None:
    """Raises UnsupportedMedia unless the body calls itself JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not _is_as_ollamas_docs_send(request, kind):
        raise UnsupportedMedia(
            f"content-type {kind[:100]!r} is not supported; send application/json"
        )


def _is_as_ollamas_docs_send(request: Request, kind: str) -> bool:
    """`curl -d` calls JSON a form. No page sends so: a browser names the page's origin."""
    plain = kind in ("", "application/x-www-form-urlencoded")
    return plain and request.url.path.startswith("/api/") and "origin" not in request.headers


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("localhost", ""):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class KeyShares:
    """What each tenant has in flight in this process: requests, tokens (prompts and what may follow
    them) and bytes of bodies. A bound of None does not bind. Invariant: no tenant is kept at
    zero."""

    def __init__(
        self, requests: int, *, tokens: int | None = None, bytes: int | None = None
    ) -> None:
        self._limits = {"requests": requests, "tokens": tokens, "bytes": bytes}
        self._in_flight = {unit: Counter[str]() for unit in self._limits}

    @classmethod
    def of(cls, server: ServerSpec) -> KeyShares:
        """This process's part of the server's bounds: connections spread over its processes."""

        def part(limit: int) -> int:
            return max(1, limit // server.api_servers)

        tokens, bytes = server.max_tokens_per_key, server.max_bytes_per_key
        return cls(
            part(server.max_requests_per_key),
            tokens=None if tokens is None else part(tokens),
            bytes=None if bytes is None else part(bytes),
        )

    @property
    def total(self) -> int:
        """Requests in flight, all tenants."""
        return self._in_flight["requests"].total()

    @contextmanager
    def hold(self, tenant: str, unit: str = "requests", amount: int = 1) -> Iterator[None]:
        """Takes so much of the tenant's share; RateLimited where it is not left."""
        limit, in_flight = self._limits[unit], self._in_flight[unit]
        if limit is not None and in_flight[tenant] + amount > limit:
            what = f"{limit} {unit} in flight, its limit"
            if amount > 1:
                what = (
                    f"{in_flight[tenant]} {unit} in flight and asks for {amount}; {limit} allowed"
                )
            raise RateLimited(f"this key has {what}; wait for one to end", retry_after_s=1.0)
        in_flight[tenant] += amount
        try:
            yield
        finally:
            in_flight[tenant] -= amount
            if not in_flight[tenant]:
                del in_flight[tenant]


_LABEL = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


ID_HEADERS = (b"x-request-id", b"request-id")
"""What the clients of each vendor read."""


_OURS = re.compile(r"[a-z]+[-_][0-9a-f]{32}(-\d{1,6})?")
RESPONSE_PREFIX, CONVERSATION_PREFIX = "resp_", "conv_"


def request_id() -> str:
    """The id of one HTTP context, sent back as x-request-id and request-id."""
    return "req-" + secrets.token_hex(16)


def completion_id(kind: str) -> str:
    """The public id of one generation: `chatcmpl-...` or `cmpl-...`."""
    return f"{kind}-{secrets.token_hex(16)}"


def own_id(tenant: str, asked: str) -> str:
    """The public id of a generation that its client wants to name by an id of its own: nobody else
    can tell it, and the same name of another tenant is another id."""
    return "gen-" + hashlib.sha256(f"{tenant}\0{asked}".encode()).hexdigest()[:32]


def client_label(value: bytes | None) -> str | None:
    """A client's X-Request-Id if it is well formed (1 to 128 harmless characters), else None."""
    if value is None or _LABEL.fullmatch(value) is None:
        return None
    return value.decode("ascii")


def message_id() -> str:
    """The public id of one message of the Anthropic dialect."""
    return "msg_" + secrets.token_hex(16)


def response_id() -> str:
    """The public id of one response; the ids of its items are made from it."""
    return RESPONSE_PREFIX + secrets.token_hex(16)


def conversation_id() -> str:
    """The public id of one conversation of the Responses dialect."""
    return CONVERSATION_PREFIX + secrets.token_hex(16)


def is_ours(ident: str) -> bool:
    """Whether an id has the form of those made here: random, so that knowing it is the permission
    to ask about what it names."""
    return _OURS.fullmatch(ident) is not None
