"""Tools of an MCP server, run within a response over real sockets: the tool server is one of our own making, which
answers as documents and as events (API-22)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

from tests.api.clients import openai_client
from tests.api.serving import Served, serving
from tests.dialects import agent
from tests.dialects.conftest import KEY

WEATHER = "What is the weather in Paris?"


class ToolHandler(BaseHTTPRequestHandler):
    """A tool server with a session; results of calls come as events."""

    calls: list[Any] = []
    breaks = False

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method, kind = message["method"], "application/json"
        if method == "initialize":
            result: Any = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}
        elif self.headers["mcp-session-id"] != "s-1":
            return self.answer(400, b"", kind)
        elif "id" not in message:
            return self.answer(202, b"", kind)
        elif method == "tools/list":
            tools = [{**f, "inputSchema": f["parameters"]} for f in agent.functions()]
            result = {"tools": tools}
        else:
            self.calls.append(message["params"])
            if self.breaks:
                return self.answer(500, b"", kind)
            params = message["params"]
            text = agent.carry_out(params["name"], params["arguments"])
            result = {"content": [{"type": "text", "text": text}]}
            kind = "text/event-stream"
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
        self.answer(200, b"data: " + body + b"\n\n" if kind != "application/json" else body, kind)

    def do_DELETE(self) -> None:
        self.answer(200, b"", "application/json")

    def answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (
            ("content-type", kind),
            ("mcp-session-id", "s-1"),
            ("content-length", str(len(body))),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ToolHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    at = f"home=127.0.0.1:{server.server_port}"
    options = ("--api-keys", KEY, "--served-model-name", "demo", "--tool-server", at)
    with serving(None, *options) as served:
        yield from _client(served)
    server.shutdown()
    thread.join()
    server.server_close()


def _client(served: Served) -> Iterator[openai.OpenAI]:
    with openai_client(served.url, KEY) as client:
        yield client
    assert served.stop() == 0


def ask(client: openai.OpenAI, **more: Any) -> Any:
    tool = {"type": "mcp", "server_label": "home", "require_approval": "never"}
    asked: dict[str, Any] = {"model": "demo", "input": WEATHER, "tools": [tool], "temperature": 0}
    return client.responses.create(**{**asked, **more})


@pytest.mark.slow
def test_a_tool_is_run_within_the_response(client: openai.OpenAI) -> None:
    ToolHandler.calls.clear()
    choice = {"type": "mcp", "server_label": "home", "name": "get_weather"}
    full = ask(client, tool_choice=choice)
    kinds = [item.type for item in full.output]
    assert kinds == ["mcp_list_tools", "mcp_call", "message"] and full.status == "completed"
    listed, called, _ = full.output
    assert [tool.name for tool in listed.tools] == [f["name"] for f in agent.functions()]
    assert called.name == "get_weather" and called.server_label == "home" and called.error is None
    assert ToolHandler.calls == [{"name": "get_weather", "arguments": json.loads(called.arguments)}]
    assert str(json.loads(called.output)["temperature"]) in full.output_text
    events = list(ask(client, tool_choice=choice, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert [item.type for item in last.output] == kinds and last.output_text == full.output_text
    assert last.usage.output_tokens == full.usage.output_tokens
    second = ask(client, previous_response_id=full.id, input="And in Rome?")
    assert second.status == "completed"


@pytest.mark.slow
def test_what_fails_is_told_and_what_is_too_much_is_not_run(client: openai.OpenAI) -> None:
    choice = {"type": "mcp", "server_label": "home", "name": "get_weather"}
    ToolHandler.calls.clear()
    ToolHandler.breaks = True
    try:
        failed = ask(client, tool_choice=choice, background=True)
        while failed.status in ("queued", "in_progress"):
            failed = client.responses.retrieve(failed.id)
    finally:
        ToolHandler.breaks = False
    call = next(item for item in failed.output if item.type == "mcp_call")
    assert call.status == "failed" and call.error == "the tool server answers 500"
    assert failed.status == "completed" and failed.output[-1].type == "message"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tools=[{"type": "mcp", "server_label": "away", "require_approval": "never"}])
    assert refused.value.param == "tools[0].server_label"
