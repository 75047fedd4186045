"""Servers of tools, asked by MCP's streamable HTTP transport (specification 2025-06-18): which
tools one has, and a call of one.

Whom to ask, the operator says (--tool-server); no address, header or key of a request gets here.
Redirects are not followed, no proxy of the environment is used. An answer is bounded in bytes and
in time."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import orjson

from headrace import __version__

if TYPE_CHECKING:
    import httpx

Json = dict[str, Any]
PROTOCOL = "2025-06-18"
CALL_S = 60.0
LIST_S = 10.0
LEAVE_S = 2.0
MAX_BYTES = 1 << 20
MAX_PAGES = 8
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEADERS = {
    "content-type": "application/json",
    "accept": "application/json, text/event-stream",
    "accept-encoding": "identity",
    "user-agent": f"headrace/{__version__}",
}


class ToolServerError(Exception):
    """The server cannot be reached, or answers with an error; the text is for the model too."""


class ToolSession:
    """One session with a server. Used as a context."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._number = 0
        self._session: dict[str, str] = {}
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> ToolSession:
        http = _httpx()
        self._client = http.AsyncClient(trust_env=False, follow_redirects=False, timeout=CALL_S)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._client is not None
        if "mcp-session-id" in self._session:  # the server may forget it; that it does, matters not
            with suppress(_httpx().HTTPError):
                headers = {**_HEADERS, **self._session}
                await self._client.delete(self._url, headers=headers, timeout=LEAVE_S)
        await self._client.aclose()

    async def tools(self) -> list[Json]:
        """The tools that the server has, each with name, description and input schema."""
        tools: list[Json] = []
        cursor: str | None = None
        async with _within(LIST_S):
            await self._begin()
            for _ in range(MAX_PAGES):
                page = await self._ask("tools/list", {} if cursor is None else {"cursor": cursor})
                listed = page.get("tools")
                if not isinstance(listed, list):
                    raise ToolServerError("the tool server lists no tools")
                tools += [tool for tool in map(_tool, listed) if tool is not None]
                cursor = page.get("nextCursor")
                if not isinstance(cursor, str):
                    break
        if len(tools) > MAX_TOOLS:
            raise ToolServerError(f"the tool server has more than {MAX_TOOLS} tools")
        return tools

    async def call(self, name: str, arguments: Json, *, within_s: float) -> str:
        """What a tool answers; ToolServerError where it fails."""
        async with _within(min(CALL_S, within_s)):
            if not self._number:
                await self._begin()
            answer = await self._ask("tools/call", {"name": name, "arguments": arguments})
        text = _text_of(answer)
        if answer.get("isError"):
            raise ToolServerError(text or "the tool failed")
        return text

    async def _begin(self) -> None:
        about = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "headrace", "version": __version__},
        }
        answer = await self._ask("initialize", about)
        version = answer.get("protocolVersion")
        if isinstance(version, str) and version.isprintable():
            self._session["mcp-protocol-version"] = version[:32]
        await self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _ask(self, method: str, params: Json) -> Json:
        self._number += 1
        number = self._number
        asked = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        for message in _messages(*await self._post(asked)):
            if message.get("id") != number:
                continue  # of its own accord: progress, logs
            if isinstance(error := message.get("error"), dict):
                raise ToolServerError(f"{method}: {str(error.get('message', ''))[:500]}")
            if isinstance(result := message.get("result"), dict):
                return result
        raise ToolServerError(f"{method}: the tool server gives no answer")

    async def _post(self, message: Json) -> tuple[str, bytes]:
        """The kind of the answer, and its bytes."""
        assert self._client is not None
        http = _httpx()
        request = self._client.build_request(
            "POST", self._url, content=orjson.dumps(message), headers={**_HEADERS, **self._session}
        )
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code not in (200, 202):
                    raise ToolServerError(f"the tool server answers {response.status_code}")
                if ident := response.headers.get("mcp-session-id"):
                    self._session["mcp-session-id"] = ident
                body = bytearray()
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise ToolServerError(
                            f"the tool server answers with over {MAX_BYTES} bytes"
                        )
                return response.headers.get("content-type", ""), bytes(body)
            finally:
                await response.aclose()
        except (http.HTTPError, http.InvalidURL, OSError):
            raise ToolServerError("the tool server cannot be reached") from None


class _within:
    """A bound in seconds, beyond which it is the server's failure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ToolServerError(
                f"the tool server does not answer within {self._seconds:g} s"
            ) from None


def _messages(kind: str, body: bytes) -> list[Json]:
    """The messages of an answer: one document, or events of a stream."""
    texts = [body]
    if kind.partition(";")[0].strip() == "text/event-stream":
        events = body.replace(b"\r\n", b"\n").split(b"\n\n")
        texts = [_data(event) for event in events]
    messages = []
    for text in texts:
        try:
            message = orjson.loads(text)
        except orjson.JSONDecodeError:
            continue
        messages += [one for one in [message] if isinstance(one, dict)]
    return messages


def _data(event: bytes) -> bytes:
    lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b"data:").removeprefix(b" ") for line in lines)


def _tool(tool: Any) -> Json | None:
    """A tool as the model may be offered it; one whose name cannot be written is left out."""
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return None
    schema, description = tool.get("inputSchema"), tool.get("description")
    return {
        "name": name,
        "description": description if isinstance(description, str) else "",
        "input_schema": schema if isinstance(schema, dict) else {"type": "object"},
        "annotations": tool.get("annotations"),
    }


def _text_of(answer: Json) -> str:
    """What a model reads of a result: its texts; else its structure as JSON."""
    content = answer.get("content")
    parts = content if isinstance(content, list) else []
    texts = [
        part["text"] if part.get("type") == "text" else f"[{part.get('type')}]"
        for part in parts
        if isinstance(part, dict) and (part.get("type") != "text" or "text" in part)
    ]
    if not texts and isinstance(answer.get("structuredContent"), dict):
        return orjson.dumps(answer["structuredContent"]).decode()
    return "\n".join(str(text) for text in texts)


def _httpx() -> ModuleType:
    """Its import takes 0.09 s of each server's start, which most need for nothing."""
    import httpx

    return httpx
