"""Tools that this server runs for a response: those of the servers that --tool-server names.

A request says which of them it wants (`type: mcp`, by its label), and that nobody is to be asked
(`require_approval: never`). What a model calls is run between two generations of the same response;
its output is an item, and the model goes on from there. A response makes so many calls at most
(`max_tool_calls`, MAX_CALLS); then it answers without tools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import orjson

from headrace.base.config.tool_servers import tool_servers
from headrace.base.errors import InvalidRequest, Unavailable
from headrace.front.server.conversation.context import RequestContext, Services
from headrace.front.server.responses.schema import InputRequest, Json
from headrace.front.server.responses.tool_servers import ToolServerError, ToolSession
from headrace.front.server.responses.tools import Listing, Offered, offered

MAX_CALLS = 32
MAX_OUTPUT_CHARS = 1 << 18
KNOWN_S = 30.0
"""How long a server's list of tools is taken as known."""
MAX_RUNNING = 64
_running = asyncio.Semaphore(MAX_RUNNING)
_known: dict[str, tuple[float, list[Json]]] = {}


async def tools_of(services: Services, request: InputRequest, items: Sequence[Json]) -> Offered:
    """The tools of a request, those of servers with what these list now."""
    return offered(request.tools, items, await _listings(services, request.tools or []))


async def _listings(services: Services, tools: Sequence[Any]) -> Mapping[str, Listing]:
    servers = tool_servers(services.server.tool_server)
    listings: dict[str, Listing] = {}
    if not servers:
        return listings
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "mcp":
            continue
        label = _checked(tool, f"tools[{i}]", servers)
        if label in listings:
            raise _bad(f"tools[{i}].server_label", f"{label!r:.80} is offered twice")
        listed = await _listed(label, servers[label], f"tools[{i}]")
        listings[label] = Listing(label=label, tools=_allowed(tool, f"tools[{i}]", listed))
    return listings


def _checked(tool: Json, at: str, servers: Mapping[str, str]) -> str:
    """The label of a tool that may be run."""
    for name in ("server_url", "connector_id", "headers", "authorization"):
        if tool.get(name):
            raise _bad(
                f"{at}.{name}",
                "requests choose no server and no key; the operator does (--tool-server)",
            )
    label = tool.get("server_label")
    if not isinstance(label, str) or label not in servers:
        raise _bad(
            f"{at}.server_label", f"{label!r:.80} given; allowed: {', '.join(map(repr, servers))}"
        )
    if tool.get("require_approval") != "never":
        shown = tool.get("require_approval", "always")
        raise _bad(
            f"{at}.require_approval",
            f"{shown!r:.80} given (without the field: 'always'); this server asks nobody before it "
            "runs a tool; allowed: 'never'",
        )
    return label


def _allowed(tool: Json, at: str, listed: list[Json]) -> list[Json]:
    allowed = tool.get("allowed_tools")
    if isinstance(allowed, dict):
        if allowed.get("read_only"):
            raise _bad(f"{at}.allowed_tools.read_only", "name the tools (tool_names)")
        allowed = allowed.get("tool_names")
    if allowed is None:
        return listed
    if not isinstance(allowed, list):
        raise _bad(f"{at}.allowed_tools", "an array of names is needed")
    names = {one["name"] for one in listed}
    for name in allowed:
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise _bad(f"{at}.allowed_tools", f"{name!r:.80} is no tool there; there are: {known}")
    return [one for one in listed if one["name"] in allowed]


async def _listed(label: str, url: str, at: str) -> list[Json]:
    if url in _known and time.monotonic() - _known[url][0] < KNOWN_S:
        return _known[url][1]
    try:
        async with ToolSession(url) as session:
            listed = await session.tools()
    except ToolServerError as error:
        raise Unavailable(
            f"{at}: the tools of {label!r} cannot be listed: {error}", field=at, retry_after_s=5.0
        ) from None
    _known[url] = time.monotonic(), listed
    return listed


class LaterRound(RequestContext):
    """The context of a response's further generation: its request holds a place already."""

    @classmethod
    def of(cls, context: RequestContext) -> LaterRound:
        """Beside the request's own context, which outlives it."""
        return cls(
            services=context.services,
            request_id=context.request_id,
            tenant=context.tenant,
            timeout_s=context.timeout_s,
            arrival=context.arrival,
            tells_timing=context.tells_timing,
            client_label=context.client_label,
            sent_id=context.sent_id,
            trace=context.trace,
            queued=context.queued,
        )

    def hold_place(self) -> None:
        """It is held."""


async def outputs(
    context: RequestContext, calls: Sequence[Json], num_before: int, most: int
) -> AsyncGenerator[tuple[Json, str | None, str | None], None]:
    """(call, output, error) of each call, one after the other; those beyond `most` calls of the
    response are not run."""
    servers = tool_servers(context.services.server.tool_server)
    async with AsyncExitStack() as held:
        sessions: dict[str, ToolSession] = {}
        for number, call in enumerate(calls, num_before + 1):
            if number > most:
                yield call, None, f"the response has made {most} calls, which is all it may"
                continue
            label = call["server_label"]
            if label not in sessions:
                sessions[label] = await held.enter_async_context(ToolSession(servers[label]))
            try:
                yield call, await _called(context, sessions[label], call), None
            except ToolServerError as error:
                yield call, None, str(error)


async def _called(context: RequestContext, session: ToolSession, call: Json) -> str:
    try:
        arguments = orjson.loads(call["arguments"] or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ToolServerError("the arguments are no JSON object")
    async with _running:
        text = await session.call(call["name"], arguments, within_s=context.deadline_s(None))
    if len(text) > MAX_OUTPUT_CHARS:
        raise ToolServerError(
            f"the tool answers with {len(text)} characters; {MAX_OUTPUT_CHARS} are allowed"
        )
    return text


def without_choice(request: InputRequest, *, calls_left: bool) -> InputRequest:
    """The request for a further generation: what had to be called has been; without calls left
    nothing may be."""
    return msgspec.structs.replace(request, tool_choice="auto" if calls_left else "none")


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
