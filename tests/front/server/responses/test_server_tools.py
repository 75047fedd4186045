"""Tools that the server runs for a response (API-22): what is refused early, the events of a call, and the items that
the next generation reads."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.config.tool_servers import tool_servers
from headrace.base.errors import ConfigError, InvalidRequest
from headrace.front.client.events import Started
from headrace.front.server.conversation.stages import ParsedDelta, ParsedEnded
from headrace.front.server.responses import server_tools
from headrace.front.server.responses.document import ResponseReply
from headrace.front.server.responses.items import ItemMessages
from headrace.front.server.responses.schema import ResponsesRequest
from headrace.front.server.responses.stream import ResponseStream
from headrace.front.server.responses.tool_servers import _messages, _text_of
from headrace.front.server.responses.tools import Offered, to_choice
from headrace.front.text.parsing.engine import CallArguments, CallBegin, CallEnd, Content

LISTED: list[dict[str, Any]] = [
    {"name": name, "description": "d", "input_schema": {"type": "object"}, "annotations": None}
    for name in ("look", "say")
]
TOOL = {"type": "mcp", "server_label": "home", "require_approval": "never"}
CALL: Any = {"type": "mcp_call", "id": "mcp_1", "server_label": "home", "name": "look"}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server has said a moment ago."""
    known = {"http://h:1/mcp": (time.monotonic(), LISTED)}
    monkeypatch.setattr(server_tools, "_known", known)


async def offered(*tools: Any, servers: tuple[str, ...] = ("home=h:1",)) -> Offered:
    services: Any = SimpleNamespace(server=SimpleNamespace(tool_server=servers))
    request = ResponsesRequest(input="x", tools=list(tools))
    return await server_tools.tools_of(services, request, [])


async def test_tools_of_a_server_are_functions_under_its_label() -> None:
    tools = await offered(TOOL)
    assert [f["function"]["name"] for f in tools.functions] == ["home__look", "home__say"]
    assert tools.tool("home__look").server == "home" and tools.tool("home__look").name == "look"
    for allowed in (["say"], {"tool_names": ["say"]}):
        some = await offered({**TOOL, "allowed_tools": allowed})
        assert [f["function"]["name"] for f in some.functions] == ["home__say"]
    choice = to_choice({"type": "mcp", "server_label": "home", "name": "say"}, tools)
    assert choice["tool_choice"]["function"]["name"] == "home__say"
    assert not (await offered(TOOL, servers=())).functions, "off: passed over"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"server_url": "http://169.254.169.254/"}, "server_url"),
        ({"headers": {"a": "b"}}, "headers"),
        ({"authorization": "key"}, "authorization"),
        ({"connector_id": "x"}, "connector_id"),
        ({"server_label": "other"}, "server_label"),
        ({"require_approval": "always"}, "require_approval"),
        ({"require_approval": None}, "require_approval"),
        ({"allowed_tools": ["nap"]}, "allowed_tools"),
        ({"allowed_tools": "say"}, "allowed_tools"),
    ],
)
async def test_what_a_request_may_not_choose_is_refused(more: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await offered({**TOOL, **more})
    assert refused.value.field == f"tools[0].{field}"


@pytest.mark.parametrize(
    ("entry", "server"),
    [
        ("h:1", ("h:1", "http://h:1/mcp")),
        ("a=[::1]:80/x", ("a", "http://[::1]:80/x")),
        ("b=https://h/mcp?k=v", ("b", "https://h/mcp?k=v")),
    ],
)
def test_servers_are_named_by_label_and_address(entry: str, server: tuple[str, str]) -> None:
    assert tuple(*tool_servers((entry,)).items()) == server
    with pytest.raises(ConfigError, match="two servers"):
        tool_servers((entry, entry))
    for wrong in ("demo", "ftp://h:1", "a b=h:1", "user@h:1", ""):
        with pytest.raises(ConfigError):
            tool_servers((wrong,))


def said(*parts: Any) -> list[Any]:
    deltas = [ParsedDelta(index=0, text="", parts=[part], num_reasoning=0) for part in parts]
    end = ParsedEnded(index=0, reason="stop", num_output=4, num_reasoning=1, called=False)
    return [Started(3), *deltas, end]


async def test_a_call_pauses_the_response_and_its_output_goes_on() -> None:
    tools = await offered(TOOL)
    reply = ResponseReply(
        id="resp_" + "0" * 32,
        model="m",
        created=0,
        request=ResponsesRequest(input="x", tools=[TOOL]),
        document={},
        tools=tools,
        seal=lambda text: text,
        stored=False,
    )
    stream = ResponseStream(reply)
    call = (CallBegin(0, "call_1", "home__look"), CallArguments(0, '{"a": 1}'), CallEnd(0))
    events = [each for event in said(*call) for each in stream.take(event)]
    (item,) = stream.pending
    events += stream.run_call(item, "sunny", None)
    events += [each for event in said(Content("It is.")) for each in stream.take(event)]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "mcp_list_tools.in_progress"),
        *("mcp_list_tools.completed", "output_item.done", "output_item.added"),
        *("mcp_call_arguments.delta", "mcp_call_arguments.done", "mcp_call.in_progress"),
        *("mcp_call.completed", "output_item.done", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[10]["output_index"] == 1 == events[11]["output_index"]
    listed, called, message = events[-1]["response"]["output"]
    assert (listed["type"], listed["tools"]) == ("mcp_list_tools", LISTED)
    assert (called["name"], called["arguments"], called["output"]) == ("look", '{"a": 1}', "sunny")
    assert called["status"] == message["status"] == "completed" and called["error"] is None
    usage = events[-1]["response"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (6, 8, 14)
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2

    folded = ItemMessages(tools, lambda sealed: None)
    for one in (listed, called):
        folded.take(one, "input[0]")
    assistant, result = folded.messages
    (sent,) = assistant["tool_calls"]
    assert sent["function"] == {"name": "home__look", "arguments": '{"a": 1}'}
    assert result == {"role": "tool", "tool_call_id": sent["id"], "content": "sunny"}


async def test_a_failed_call_tells_the_model_why_and_others_calls_are_passed_over() -> None:
    folded = ItemMessages(await offered(TOOL), lambda sealed: None)
    folded.take({**CALL, "arguments": "{}", "error": "gone", "output": None}, "input[0]")
    assert folded.messages[1]["content"] == "Error: gone"
    folded.take({**CALL, "server_label": "elsewhere", "arguments": "{}"}, "input[1]")
    assert len(folded.messages) == 2


def test_answers_are_documents_or_events() -> None:
    body = b'event: message\r\ndata: {"id": 1,\r\ndata: "result": {}}\r\n\r\n: ping\n\ndata: {"id": 2}\n\n'
    assert _messages("text/event-stream; charset=utf-8", body) == [
        {"id": 1, "result": {}},
        {"id": 2},
    ]
    assert _messages("application/json", b'{"id": 3}') == [{"id": 3}]
    assert _messages("text/html", b"<html>") == []
    parts = [{"type": "text", "text": "a"}, {"type": "image", "data": "x"}]
    assert _text_of({"content": parts}) == "a\n[image]"
    assert _text_of({"content": [], "structuredContent": {"a": 1}}) == '{"a":1}'
