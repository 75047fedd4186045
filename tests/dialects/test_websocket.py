"""Responses over a WebSocket: the official client, and raw frames where it is too polite (API-13, REG-108)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from typing import Any

import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.api.serving import Served, eventually, serving
from tests.dialects import agent
from tests.dialects.conftest import KEY, OTHER
from tests.dialects.test_responses import ADD, CASES, TERMINAL, _comparable, events_of


@contextmanager
def opened(served: Served, key: str = KEY, **more: Any) -> Iterator[ClientConnection]:
    headers = {"Authorization": f"Bearer {key}"}
    url = served.url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers=headers, **more) as socket:
        yield socket


def create(socket: ClientConnection, **body: Any) -> None:
    asked = {"type": "response.create", "model": "demo", "input": ADD, "temperature": 0}
    socket.send(json.dumps({**asked, **body}))


def answer(socket: ClientConnection) -> list[dict[str, Any]]:
    """Events up to a terminal one."""
    found = []
    while True:
        found.append(json.loads(socket.recv(timeout=300)))
        if found[-1]["type"] in TERMINAL:
            return found


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """The kinds in order; how text was cut into deltas is a matter of timing."""
    return [kind for kind, _ in groupby(event["type"] for event in events)]


@pytest.fixture
def socket(bundled: Served) -> Iterator[ClientConnection]:
    with opened(bundled) as made:
        yield made


@pytest.mark.parametrize("case", CASES)
def test_the_events_are_those_of_http(socket: ClientConnection, bundled: Served, case: str) -> None:
    create(socket, stream=True, **CASES[case])
    over_socket, over_http = answer(socket), events_of(bundled, **CASES[case])
    assert kinds_of(over_socket) == kinds_of(over_http)
    assert [e["sequence_number"] for e in over_socket] == list(range(len(over_socket)))
    assert _comparable(over_socket[-1]["response"]) == _comparable(over_http[-1]["response"])


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager")  # by the client
def test_the_official_client_holds_a_conversation(gpt: openai.OpenAI) -> None:
    previous = None
    with gpt.responses.connect() as connection:
        for question, tool in agent.QUESTIONS:
            given: Any = question
            called = []
            for _ in range(4):
                connection.response.create(
                    model="demo", input=given, temperature=0, store=False,
                    tools=agent.for_responses(), previous_response_id=previous,
                )  # fmt: skip
                for event in connection:
                    if event.type in TERMINAL:
                        break
                assert event.type == "response.completed", event
                previous = event.response.id
                calls = [item for item in event.response.output if item.type == "function_call"]
                if not calls:
                    break
                called += [call.name for call in calls]
                given = [
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": agent.carry_out(call.name, json.loads(call.arguments)),
                    }
                    for call in calls
                ]
            assert tool in called and event.response.output_text


def test_a_warm_up_says_nothing_and_is_gone_on_from(socket: ClientConnection) -> None:
    create(socket, input="Hello!", generate=False, store=False, tools=agent.for_responses())
    events = answer(socket)
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress", "response.completed"),
    ]
    warm = events[-1]["response"]
    assert warm["output"] == [] and warm["usage"]["output_tokens"] == 0
    create(socket, previous_response_id=warm["id"], tools=agent.for_responses(), store=False)
    after = answer(socket)[-1]["response"]
    assert after["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_what_is_not_stored_is_known_to_its_connection_alone(
    socket: ClientConnection, bundled: Served
) -> None:
    create(socket, store=False)
    ident = answer(socket)[-1]["response"]["id"]
    for key in (KEY, OTHER):
        with opened(bundled, key) as other:
            create(other, previous_response_id=ident)
            (error,) = answer(other)
            assert error["type"] == "error" and error["status"] == 400
            assert error["error"]["code"] == "previous_response_not_found"
    create(socket, previous_response_id=ident, input="Why?")
    assert answer(socket)[-1]["type"] == "response.completed"


def test_an_error_makes_the_connection_forget_the_parent(socket: ClientConnection) -> None:
    create(socket, store=False)
    ident = answer(socket)[-1]["response"]["id"]
    create(socket, previous_response_id=ident, temperature=9)
    assert answer(socket)[-1]["error"]["param"] == "temperature"
    create(socket, previous_response_id=ident)
    assert answer(socket)[-1]["error"]["code"] == "previous_response_not_found"


def test_a_lane_keeps_its_order_and_lanes_run_side_by_side(slow_server: Served) -> None:
    with opened(slow_server) as socket:
        for _ in range(2):
            for lane in "ab":
                more = {"model": "tiny", "max_output_tokens": 10, "ignore_eos": True}
                create(socket, stream_id=lane, store=False, **more)
        order = []
        while [kind for _, kind in order].count("incomplete") < 4:
            event = json.loads(socket.recv(timeout=300))
            order.append((event["stream_id"], event["type"].removeprefix("response.")))
        ends = [at for at in order if at[1] in ("created", "incomplete")]
        for lane in "ab":
            assert [kind for name, kind in ends if name == lane] == ["created", "incomplete"] * 2
        assert {ends[0], ends[1]} == {("a", "created"), ("b", "created")}, "both began at once"


def test_bad_messages_are_answered_and_the_connection_goes_on(socket: ClientConnection) -> None:
    for message, param in (
        ("{", None),
        ("[]", None),
        ('{"type": "teleport"}', "type"),
        ('{"type": "response.create", "stream_id": "a b"}', "stream_id"),
        ('{"type": "response.create", "stream_id": 5}', "stream_id"),
        ('{"type": "response.create"}', "input"),
        ('{"type": "response.create", "input": "x", "model": "other"}', "model"),
        ('{"type": "response.create", "input": "\\ud800"}', None),
    ):
        socket.send(message)
        (error,) = answer(socket)
        assert error["type"] == "error" and 400 <= error["status"] < 500, error
        assert error["error"]["param"] == param, error
    socket.send(json.dumps({"type": "response.steer", "previous_response_id": "r", "input": []}))
    steered = json.loads(socket.recv(timeout=300))
    assert steered["type"] == "response.steer.failed"
    assert steered["error"]["code"] == "steering_not_supported"
    create(socket)
    assert answer(socket)[-1]["type"] == "response.completed"
    socket.send(b"bytes")
    with pytest.raises(ConnectionClosed):
        socket.recv(timeout=300)


def test_lanes_and_concurrent_responses_are_bounded(slow_server: Served) -> None:
    long = {"model": "tiny", "ignore_eos": True, "store": False}
    with opened(slow_server) as socket:
        for n in range(17):
            create(socket, stream_id=f"l{n}", **long)
        codes = []
        while not codes:
            event = json.loads(socket.recv(timeout=300))
            if event["type"] == "error":
                codes.append(event["error"]["code"])
                assert event["status"] == 429 and event["stream_id"] == "l16"
        assert codes == ["concurrent_request"]
    eventually(slow_server.at_rest, within_s=3)
    with opened(slow_server) as socket:
        for n in range(33):
            create(socket, stream_id=f"n{n}", model="tiny", max_output_tokens=1, store=False)
            event = answer(socket)[-1]
        assert event["error"]["code"] == "websocket_stream_limit_reached"
        create(socket, model="tiny", max_output_tokens=1, store=False)
        assert answer(socket)[-1]["type"] == "response.incomplete", "no name is none of the 32"


@pytest.fixture(scope="module")
def slow_server(model: Any) -> Iterator[Served]:
    """Steps of 50 ms; at most three connections; no keys."""
    with serving(
        model, "--max-websockets", "3", "--served-model-name", "tiny", step_s=0.05
    ) as served:
        yield served
        assert served.stop() == 0


@pytest.mark.serial
def test_a_dropped_connection_frees_the_cache_within_a_step(slow_server: Served) -> None:
    for abrupt in (False, True):
        with opened(slow_server) as socket:
            create(socket, model="tiny", ignore_eos=True, store=False)
            create(socket, model="tiny", ignore_eos=True, store=False, stream_id="b")
            while slow_server.ledger()["engines"][0]["running"] != 2:
                socket.recv(timeout=300)
            if abrupt:
                socket.socket.shutdown(2)  # no close frame
        assert eventually(slow_server.at_rest, within_s=2) < 1


def test_one_connection_too_many_is_refused(slow_server: Served) -> None:
    with ExitStack() as open_ones:

        def another() -> bool:
            """Those of other tests are gone when the server has seen them go."""
            with suppress(InvalidStatus):
                open_ones.enter_context(opened(slow_server))
                return True
            return False

        for _ in range(3):
            eventually(another, within_s=10)
        with pytest.raises(InvalidStatus) as caught, opened(slow_server):
            pass
        assert caught.value.response.status_code == 503
        assert "retry-after" in caught.value.response.headers

    def room() -> bool:
        with suppress(InvalidStatus), opened(slow_server):
            return True
        return False

    eventually(room, within_s=2)


def test_who_may_not_connect_is_told_by_http(bundled: Served, slow_server: Served) -> None:
    def status(served: Served, path: str = "/v1/responses", **headers: str) -> int:
        url = served.url.replace("http", "ws") + path
        with (
            pytest.raises(InvalidStatus) as caught,
            connect(url, additional_headers=headers),
        ):
            pass
        body = json.loads(caught.value.response.body or b"{}")
        assert body["error"]["message"]
        return caught.value.response.status_code

    assert status(bundled) == 401
    assert status(bundled, Authorization="Bearer wrong") == 401
    assert status(bundled, "/v1/chat/completions") == 401
    assert status(bundled, "/v1/nothing", Authorization=f"Bearer {KEY}") == 404
    assert status(slow_server, Origin="https://evil.example") == 403
    with opened(slow_server, origin="http://localhost:3000"):
        pass
    for served in (bundled, slow_server):
        assert not any("without completing" in line for line in served.lines)


def test_either_header_may_hold_the_key(bundled: Served) -> None:
    url = bundled.url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers={"x-api-key": KEY}) as socket:
        create(socket)
        assert answer(socket)[-1]["type"] == "response.completed"


def test_a_frame_that_is_too_large_ends_the_connection_alone(bundled: Served) -> None:
    with opened(bundled, max_size=None) as socket, opened(bundled) as bystander:
        with pytest.raises(ConnectionClosed):
            socket.send("x" * (33 << 20))
            socket.recv(timeout=300)
        create(bystander)
        assert answer(bystander)[-1]["type"] == "response.completed"


def test_a_compressed_bomb_is_bounded_after_decompression(bundled: Served) -> None:
    with opened(bundled) as socket:
        socket.protocol.max_size = None
        with pytest.raises(ConnectionClosed):
            for _ in range(2):
                socket.send(["x" * (20 << 20)] * 4)
            socket.recv(timeout=300)
