"""Both dialects' encoders over scripted events: whatever comes in which pieces, the events keep their grammar."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import Unavailable
from headrace.front.client.events import Delta, Ended, Event, ScoredToken, Started, TokenScore
from headrace.front.server.anthropic.stream import MessageReply, MessageStream
from headrace.front.server.conversation.calls import custom_input, cut_input
from headrace.front.server.conversation.fold import finish_reason
from headrace.front.server.conversation.stages import ParsedDelta, ParsedEnded
from headrace.front.server.responses.document import ResponseReply
from headrace.front.server.responses.schema import ResponsesRequest
from headrace.front.server.responses.stream import TERMINAL, ResponseStream
from headrace.front.server.responses.tools import offered
from headrace.front.text.parsing.engine import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
)

TOOLS: list[dict[str, Any]] = [
    {"type": "namespace", "name": "home", "tools": [{"type": "function", "name": "lamp"}]},
    {"type": "custom", "name": "shell"},
    {"type": "function", "name": "plain", "parameters": {}},
]
NAMES = ["home__lamp", "shell", "plain", "made_up"]


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[Part], str]:
    """Parts in an order that the parsers can give, and how the answer ended."""
    parts: list[Part] = []
    words = st.sampled_from(["a", " b", "\n", " ", "ü"])
    parts += [Reasoning(text) for text in draw(st.lists(words, max_size=3))]
    calls = 0
    for _ in range(draw(st.integers(0, 4))):
        parts += [Content(text) for text in draw(st.lists(words, max_size=3))]
        if draw(st.booleans()):
            parts.append(CallBegin(calls, f"call_{calls}", draw(st.sampled_from(NAMES))))
            text = orjson.dumps({"input": draw(words)}).decode()
            cut = draw(st.integers(0, len(text)))
            parts += [CallArguments(calls, piece) for piece in (text[:cut], text[cut:]) if piece]
            parts.append(CallEnd(calls))
            calls += 1
    reason = draw(st.sampled_from(["stop", "length"]))
    if reason == "length" and parts and isinstance(parts[-1], CallEnd):
        parts.pop()
    return parts, reason


def events(parts: list[Part], reason: str, group: int) -> list[Event]:
    """The parts in deltas of `group` parts each."""
    calls, ends = (sum(isinstance(p, kind) for p in parts) for kind in (CallBegin, CallEnd))
    found: list[Event] = [Started(7)]
    for at in range(0, len(parts), group):
        found.append(ParsedDelta(index=0, text="", parts=parts[at : at + group], num_reasoning=0))
    called = 0 < calls == ends
    ended = ParsedEnded(index=0, reason=reason, num_output=9, num_reasoning=2, called=called)
    return [*found, ended]


def as_sent(document: Any) -> Any:
    """As a client reads it."""
    return json.loads(orjson.dumps(document))


def response_stream(**asked: Any) -> ResponseStream:
    request = ResponsesRequest(input="x", tools=TOOLS, **asked)
    return ResponseStream(
        ResponseReply(
            id="resp_" + "0" * 32,
            model="m",
            created=1,
            request=request,
            document={},
            tools=offered(TOOLS),
            seal=lambda text: "sealed " + text,
            stored=False,
        )
    )


@given(answers(), st.integers(1, 4))
def test_a_response_keeps_its_grammar(answer: tuple[list[Part], str], group: int) -> None:
    parts, reason = answer
    stream = response_stream()
    made = [event for each in events(parts, reason, group) for event in stream.take(each)]
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    assert [event["type"] in TERMINAL for event in made] == [False] * (len(made) - 1) + [True]
    opened: list[Any] = []
    is_open = False
    for event in made[2:-1]:
        match event["type"]:
            case "response.output_item.added":
                assert not is_open and event["output_index"] == len(opened)
                opened.append(event["item"])
                is_open = True
            case "response.output_item.done":
                assert is_open and event["item"]["id"] == opened[-1]["id"]
                assert event["item"] == stream.response["output"][event["output_index"]]
                is_open = False
            case _:
                assert is_open and event["item_id"] == opened[-1]["id"]
    assert not is_open
    assert made[-1]["response"]["output"] == stream.response["output"]
    assert len({item["id"] for item in opened}) == len(opened)
    texts = "".join(part.text for part in parts if isinstance(part, Content))
    said = [item for item in stream.response["output"] if item["type"] == "message"]
    shown = "".join(part["text"] for item in said for part in item["content"])
    assert "".join(shown.split()) == "".join(texts.split()), "only white space between items may go"
    assert all(item["content"][0]["text"].strip() for item in said)


@given(answers())
def test_the_cut_into_deltas_changes_no_response(answer: tuple[list[Part], str]) -> None:
    outputs = []
    for group in (1, 2, 5):
        stream = response_stream()
        for each in events(*answer, group):
            stream.take(each)
        outputs.append({**stream.response, "completed_at": None})
    assert outputs[0] == outputs[1] == outputs[2]


@given(st.lists(st.sampled_from(["a", " b", " ", "", "ü"]), min_size=1), st.data())
def test_the_cut_into_deltas_loses_no_score(words: list[str], data: st.DataObject) -> None:
    """Tokens without text, the end among them, may come in a delta of their own or in that of their neighbours."""
    scores = [ScoredToken(TokenScore(i, -0.5, word, b"")) for i, word in enumerate(words)]
    stream, at = response_stream(top_logprobs=1), 0
    made = stream.take(Started(7))
    while at < len(words):
        end = at + data.draw(st.integers(1, len(words) - at))
        made += stream.take(Delta(index=0, text="".join(words[at:end]), scores=scores[at:end]))
        at = end
    made += stream.take(Ended(index=0, reason="stop", num_output=len(words)))
    told = [part["logprobs"] for item in stream.response["output"] for part in item["content"]]
    assert [len(found) for found in told] == ([len(words)] if "".join(words).strip() else [])
    whole = "".join(e["delta"] for e in made if e["type"] == "response.output_text.delta")
    assert whole == ("".join(words) if told else "")


def test_calls_carry_the_names_that_were_offered() -> None:
    parts: list[Part] = []
    for i, name in enumerate(NAMES):
        parts += [CallBegin(i, f"call_{i}", name), CallArguments(i, '{"input":"ls"}'), CallEnd(i)]
    stream = response_stream()
    for each in events(parts, "stop", 1):
        stream.take(each)
    lamp, shell, plain, made_up = stream.response["output"]
    assert (lamp["type"], lamp["namespace"], lamp["name"]) == ("function_call", "home", "lamp")
    assert (shell["type"], shell["input"]) == ("custom_tool_call", "ls")
    assert plain["arguments"] == '{"input":"ls"}' and "namespace" not in plain
    assert made_up["name"] == "made_up"


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_call_that_was_cut_off_is_none_in_any_dialect(reason: str) -> None:
    """By the model's own end or by the limit: no client may take it for one it can run."""
    parts: list[Part] = [
        *(CallBegin(0, "call_0", "plain"), CallArguments(0, '{"a":1}'), CallEnd(0)),
        *(CallBegin(1, "call_1", "shell"), CallArguments(1, '{"input": "ls \\"-')),
    ]
    given = events(parts, reason, 2)
    ended = given[-1]
    assert isinstance(ended, ParsedEnded) and finish_reason(ended) == reason
    response = response_stream()
    message = MessageStream(MessageReply(id="m", model="m", max_tokens=9, sign=str))
    for each in given:
        response.take(each)
        message.take(each)
    whole, cut = response.response["output"]
    assert (whole["status"], cut["status"]) == ("completed", "incomplete")
    assert cut["input"] == 'ls "-'
    assert message.message["stop_reason"] == ("end_turn" if reason == "stop" else "max_tokens")


@given(st.text(max_size=6), st.data())
def test_the_input_of_a_cut_call_is_a_part_of_the_text_and_never_json(
    text: str, data: st.DataObject
) -> None:
    for whole in (json.dumps({"input": text}), orjson.dumps({"input": text}).decode()):
        cut = data.draw(st.integers(0, len(whole)))
        assert text.startswith(cut_input(whole[:cut]))
        assert cut_input(whole) == cut_input(whole[:-1]) == text


def test_free_text_that_is_no_object_stays_as_it_is() -> None:
    assert [custom_input(text) for text in ('{"input": "a"}', "{", "5", '{"x": 1}', "")] == [
        *("a", "{", "5", '{"x": 1}', ""),
    ]


@given(answers(), st.integers(1, 4))
def test_a_message_keeps_its_grammar(answer: tuple[list[Part], str], group: int) -> None:
    parts, reason = answer
    reply = MessageReply(id="msg_1", model="m", max_tokens=9, sign=lambda text: f"sign {text}")
    stream = MessageStream(reply)
    made = [event for each in events(parts, reason, group) for event in stream.take(each)]
    kinds = [event["type"] for event in made]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    at, is_open = -1, False
    texts: dict[int, str] = {}
    for event in made[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == at + 1
            at, is_open = at + 1, True
            continue
        assert is_open and event["index"] == at
        is_open = event["type"] != "content_block_stop"
        texts[at] = texts.get(at, "") + event.get("delta", {}).get("text", "")
    assert not is_open
    content = as_sent(stream.message)["content"]
    for i, block in enumerate(content):
        match block["type"]:
            case "text":
                assert block["text"].strip() and block["text"] == texts[i]
            case "tool_use":
                assert isinstance(block["input"], dict) and block["id"].startswith("toolu_")
    complete = sum(isinstance(part, CallEnd) for part in parts)
    wanted = "max_tokens" if reason == "length" else "tool_use" if complete else "end_turn"
    assert stream.message["stop_reason"] == wanted


def test_an_administrators_abort_is_no_normal_end() -> None:
    reply = MessageReply(id="m", model="m", max_tokens=1, sign=str)
    for stream in (response_stream(), MessageStream(reply)):
        stream.take(Started(1))
        with pytest.raises(Unavailable, match="administrator"):
            stream.take(Ended(index=0, reason="abort"))


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        (['{"a"', ": 1}"], {"a": 1}),
        (["[1", "]"], {"INVALID_JSON": "[1]"}),
        (["5"], {"INVALID_JSON": "5"}),
        (['{"a": tr', "u}"], {"INVALID_JSON": '{"a": tru}'}),
        (["{}"], {}),
        ([], {}),
    ],
)
def test_the_input_of_a_tool_is_an_object_streamed_and_whole(
    pieces: list[str], wanted: object
) -> None:
    """Whatever the model wrote: clients fail on anything else (contract 6)."""
    stream = MessageStream(MessageReply(id="msg_1", model="m", max_tokens=99, sign=lambda text: ""))
    parts = [CallBegin(0, "call_0", "plain"), *(CallArguments(0, p) for p in pieces), CallEnd(0)]
    made = [event for each in events(parts, "stop", 1) for event in stream.take(each)]
    deltas = [event["delta"] for event in made if event["type"] == "content_block_delta"]
    streamed = "".join(delta["partial_json"] for delta in deltas)
    assert orjson.loads(streamed or "{}") == wanted
    assert as_sent(stream.message)["content"][0]["input"] == wanted
    assert stream.message["stop_reason"] == "tool_use"
