"""A tool's input as it goes out to Anthropic's clients: one object, whatever the model writes and however it is cut."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import jiter
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.front.client.events import Event, Started
from headrace.front.server.anthropic.arguments import INVALID, ToolInput
from headrace.front.server.anthropic.stream import MessageReply, to_answer, to_chunks
from headrace.front.server.conversation.stages import ParsedDelta, ParsedEnded
from headrace.front.text.parsing.engine import CallArguments, CallBegin, CallEnd
from tests.api.clients import anthropic
from tests.spent import assert_linear

Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip

Objects = st.dictionaries(st.text(max_size=4), Json, max_size=4)
Pieces = st.text(alphabet='{}[]":,\\ut1e-. \nfalsnrd8c\x01ü', max_size=40)


def sent(text: str, cuts: list[int]) -> tuple[list[str], dict[str, Any]]:
    """The pieces that go out, and the object."""
    made, found, at = ToolInput(), [], 0
    for cut in [*cuts, len(text)]:
        found.append(made.push(text[at : at + cut]))
        at += cut
    found.append(made.push(text[at:]))
    found.append(made.end())
    return [piece for piece in found if piece], json.loads(made.document)


def check_parseable(pieces: list[str]) -> None:
    """As the client does: the pieces so far, after each of them."""
    for i in range(1, len(pieces) + 1):
        jiter.from_json("".join(pieces[:i]).encode(), partial_mode=True)


Cuts = st.lists(st.integers(0, 7), max_size=30)


@example({"id": -(2**63) - 1, "count": 2**64}, False, None, [])
@given(Objects, st.booleans(), st.sampled_from([None, 1]), Cuts)
def test_an_object_goes_out_as_it_was_written(
    given: dict[str, Any], ascii: bool, indent: int | None, cuts: list[int]
) -> None:
    text = json.dumps(given, ensure_ascii=ascii, indent=indent)
    pieces, value = sent(text, cuts)
    assert "".join(pieces) == text and value == json.loads(text)
    check_parseable(pieces)


@given(Objects, Pieces, st.data(), Cuts)
def test_what_is_none_goes_out_as_one_that_says_so(
    given: dict[str, Any], broken: str, data: st.DataObject, cuts: list[int]
) -> None:
    text = json.dumps(given)
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + broken + text[data.draw(st.integers(at, len(text))) :]
    pieces, value = sent(text, cuts)
    assert json.loads("".join(pieces) or "{}") == value
    check_parseable(pieces)
    try:
        wanted = jiter.from_json(text.encode(), allow_inf_nan=False)
    except ValueError:
        wanted = None
    if isinstance(wanted, dict) and INVALID not in value:
        assert value == wanted
    elif text.strip() in ("", "null"):
        assert value == {}
    else:
        assert value[INVALID] == text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"a": 1, "b": tru}', {"a": 1}),
        ('{"a": "x\ny"}', {"a": "x"}),
        ('{"a": {"b": [1, {"c": 2', {"a": {"b": [1, {}]}}),
        ('{"path": "/tm', {"path": "/tm"}),
        ("{'a': 1}", {}),
        ('{"a": 1} and more', {"a": 1}),
        ("[1]", {}),
        ('"x"', {}),
        ("{", {}),
        ('{"a": "\\ud800"}', {"a": ""}),
        ('{"a": 1e999, "b": NaN}', None),
    ],
)
def test_the_whole_text_stands_beside_what_was_out(text: str, kept: dict[str, Any] | None) -> None:
    value = sent(text, [1] * len(text))[1]
    assert value.pop(INVALID) == text
    assert kept is None or value == kept


def test_values_go_out_while_they_come() -> None:
    made = ToolInput()
    assert made.push('{"content": "line one') == '{"content": "line one'
    assert made.push("\\nline two") == "\\nline two"
    assert made.push("\\") == "" and made.push("u00") == "" and made.push("fc") == "\\u00fc"
    assert made.push('", "n": 1') == '"' and made.push("2") == "" and made.push("}") == ', "n": 12'
    assert made.end() == "}"


@example("a")
@given(st.text(max_size=5))
def test_no_arguments_are_no_properties(space: str) -> None:
    assert sent(" " * len(space), [])[1] == {} == sent(" null ", [1])[1]


@pytest.mark.covering(0)
@pytest.mark.parametrize("unit", ['"a', "[", '{"a":', '"k": "v", ', "\\", "1", "\\ud83d\\ude00"])
def test_time_is_linear(unit: str) -> None:
    def read(count: int) -> None:
        text, made = '{"x": "y", ' + unit * count, ToolInput()
        for at in range(0, len(text), 16):
            made.push(text[at : at + 16])
        made.end()

    assert_linear(read, 5_000)


BROKEN = '{"city": "Paris", "days": tru}'


@contextmanager
def replaying(body: bytes) -> Iterator[str]:
    """A server that answers everything with this stream."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def folded(client: anthropic.Anthropic, asked: Any) -> anthropic.types.Message:
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


async def test_the_official_client_reads_a_call_that_is_no_json() -> None:
    """Raw, its accumulator would raise at the third letter of `tru`."""
    reply = MessageReply(id="msg_1", model="m", max_tokens=99, sign=lambda text: "")
    parts = [CallBegin(0, "call_0", "f"), *(CallArguments(0, c) for c in BROKEN), CallEnd(0)]

    async def events() -> AsyncGenerator[Event, None]:
        yield Started(7)
        for part in parts:
            yield ParsedDelta(index=0, text="", parts=[part], num_reasoning=0)
        yield ParsedEnded(index=0, reason="stop", num_output=9, num_reasoning=0, called=True)

    body = b"".join([chunk async for chunk in to_chunks(events(), reply)])
    whole = await to_answer(events(), reply)
    with replaying(body) as url, anthropic.Anthropic(api_key="k", base_url=url) as client:
        asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        message = await asyncio.to_thread(lambda: folded(client, asked))
    assert message.content[0].input == {"city": "Paris", INVALID: BROKEN}
    assert orjson.loads(orjson.dumps(whole))["content"][0]["input"] == message.content[0].input
    assert message.stop_reason == "tool_use"
