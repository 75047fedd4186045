"""Anthropic Messages with the official client, over real sockets, against the bundled model (API-04, API-14,
REG-103)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.clients import anthropic, anthropic_client
from tests.api.serving import NO_TLS, Served, eventually, serving
from tests.dialects import agent
from tests.dialects.conftest import KEY, OTHER

GREEDY: Any = {"temperature": 0}
ADD: Any = [{"role": "user", "content": "What is 17 + 25?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


def ask(claude: anthropic.Anthropic, messages: Any = ADD, **more: Any) -> anthropic.types.Message:
    more = {"max_tokens": 400, "extra_body": GREEDY, **more}
    return claude.messages.create(model="demo", messages=messages, **more)


def test_an_answer_has_what_the_type_requires(claude: anthropic.Anthropic) -> None:
    answer = ask(claude)
    assert answer.id.startswith("msg_") and answer.type == "message" and answer.role == "assistant"
    assert answer.model == "demo" and answer.stop_reason == "end_turn"
    (block,) = answer.content
    assert block.type == "text" and "42" in block.text
    assert answer.usage.output_tokens > 0 and answer._request_id


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_tokens": 2000, "thinking": THINK},
        {"max_tokens": 2000, "thinking": {**THINK, "display": "omitted"}},
        {"messages": WEATHER, "tools": agent.for_messages()},
        {"max_tokens": 2},
        {"stop_sequences": ["2"]},
    ],
    ids=["plain", "thinking", "omitted", "tools", "cut", "stop"],
)
def test_a_stream_folds_to_the_full_message(
    claude: anthropic.Anthropic, asked: dict[str, Any]
) -> None:
    full = ask(claude, **asked)
    call: Any = {"max_tokens": 400, "messages": ADD, "extra_body": GREEDY, **asked}
    with claude.messages.stream(model="demo", **call) as stream:
        folded = stream.get_final_message()
    for message in (full, folded):
        message.usage.input_tokens = prompt_tokens(message.usage)
        message.usage.cache_read_input_tokens = message.usage.cache_creation_input_tokens = 0

    def shown(message: Any) -> Any:
        found = message.model_dump(exclude={"id", "parsed_output"}, exclude_none=True)
        if "output_tokens_details" not in type(message.usage).model_fields:
            found["usage"].pop("output_tokens_details", None)  # lower clients fold what they know
        for block in found["content"]:
            block.pop("id", None)
            if asked.get("thinking", {}).get("display"):
                block.pop("signature", None)  # sealed with a fresh nonce each time
            block.pop("parsed_output", None)
        return found

    assert shown(folded) == shown(full)


def events_of(bundled: Served, **asked: Any) -> list[tuple[str, dict[str, Any]]]:
    body = {"model": "demo", "messages": ADD, "max_tokens": 2000, "temperature": 0, "stream": True}
    headers = {"x-api-key": KEY}
    with httpx.stream(
        "POST",
        bundled.url + "/v1/messages?beta=true",
        json={**body, **asked},
        headers=headers,
        timeout=300,
        verify=NO_TLS,
    ) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["request-id"].startswith("req-")
        text = response.read().decode()
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


@pytest.mark.parametrize(
    "asked", [{"thinking": THINK}, {"messages": WEATHER, "tools": agent.for_messages()}]
)
def test_events_follow_the_grammar_of_the_contract(bundled: Served, asked: dict[str, Any]) -> None:
    events = [(name, data) for name, data in events_of(bundled, **asked) if name != "ping"]
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    first = events[0][1]["message"]
    assert first["type"] == "message" and first["role"] == "assistant" and first["content"] == []
    open_index, last = None, -1
    kinds: list[str] = []
    deltas: dict[int, list[str]] = {}
    for name, data in events[1:-2]:
        match name:
            case "content_block_start":
                assert open_index is None and data["index"] == last + 1
                open_index = last = data["index"]
                kinds.append(data["content_block"]["type"])
            case "content_block_delta":
                assert data["index"] == open_index
                deltas.setdefault(data["index"], []).append(data["delta"]["type"])
            case "content_block_stop":
                assert data["index"] == open_index
                open_index = None
            case _:
                pytest.fail(name)
    assert open_index is None
    if "thinking" in asked:
        assert kinds == ["thinking", "text"]
        assert set(deltas[0][:-1]) == {"thinking_delta"} and deltas[0][-1] == "signature_delta"
    else:
        assert kinds[-1] == "tool_use" and set(deltas[last]) == {"input_json_delta"}
        assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


def test_an_agent_works_through_several_turns_with_tools(claude: anthropic.Anthropic) -> None:
    """Every answer of the model goes back as it came; calls are carried out until it is done."""
    messages: list[Any] = []
    for question, tool in agent.QUESTIONS:
        messages.append({"role": "user", "content": question})
        called = []
        for _ in range(4):
            answer = ask(claude, messages, tools=agent.for_messages())
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            assert (answer.stop_reason == "tool_use") == bool(calls)
            if not calls:
                break
            called += [call.name for call in calls]
            assert all(call.id.startswith("toolu_") for call in calls)
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": agent.carry_out(call.name, dict(call.input)),
                }
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
        else:
            pytest.fail("the model never finished")
        assert tool in called
        assert any(block.type == "text" and block.text for block in answer.content)


def test_thinking_comes_first_signed_and_goes_back(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, max_tokens=2000, thinking=THINK)
    thought, text = answer.content
    assert thought.type == "thinking" and thought.thinking and thought.signature
    assert text.type == "text" and "42" in text.text
    details = answer.usage.model_dump()["output_tokens_details"]
    assert 0 < details["thinking_tokens"] < answer.usage.output_tokens
    history = [*ADD, {"role": "assistant", "content": answer.content}]
    again = ask(claude, [*history, {"role": "user", "content": "What is 3 + 4?"}])
    assert "7" in str(again.content)


def count(claude: anthropic.Anthropic, messages: Any, **more: Any) -> int:
    return claude.messages.count_tokens(model="demo", messages=messages, **more).input_tokens


def test_omitted_thinking_is_inside_its_signature_for_its_owner_alone(
    claude: anthropic.Anthropic, bundled: Served
) -> None:
    omitted = {**THINK, "display": "omitted"}
    answer = ask(claude, max_tokens=2000, thinking=omitted)
    thought = answer.content[0]
    assert thought.type == "thinking" and thought.thinking == "" and thought.signature
    rest = [{"type": "text", "text": "42"}]
    back = {"role": "user", "content": "Go on."}

    def with_block(*blocks: Any) -> Any:
        return [*ADD, {"role": "assistant", "content": [*blocks, *rest]}, back]

    sealed = {"type": "thinking", "thinking": "", "signature": thought.signature}
    redacted = {"type": "redacted_thinking", "data": thought.signature}
    foreign = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    without = count(claude, with_block())
    assert count(claude, with_block(sealed)) == count(claude, with_block(redacted)) > without
    assert count(claude, with_block(foreign)) == without
    with anthropic_client(bundled.url, OTHER) as other:
        assert count(other, with_block(sealed)) == without


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, None])
def test_without_thinking_there_is_none(claude: anthropic.Anthropic, thinking: Any) -> None:
    asked = {} if thinking is None else {"thinking": thinking}
    assert [block.type for block in ask(claude, **asked).content] == ["text"]


def test_adaptive_thinking_is_understood(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, max_tokens=2000, thinking={"type": "adaptive"})
    assert answer.content[0].type == "thinking"


def test_a_stop_sequence_is_told(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, stop_sequences=["nothing", "2"])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == "2"
    assert "2" not in str(answer.content)


def prompt_tokens(usage: Any) -> int:
    """All of a prompt: what was read from the cache, what was written into it, the rest."""
    cached: int = usage.cache_read_input_tokens or 0
    created: int = usage.cache_creation_input_tokens or 0
    assert isinstance(usage.input_tokens, int)
    return usage.input_tokens + cached + created


def test_cached_tokens_are_told_apart(claude: anthropic.Anthropic) -> None:
    """The three counts are the prompt, whichever share of it was read or written; what one request
    writes, the next one reads."""
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; turn={n};"},
        {"type": "text", "text": "Answer briefly. " * 20, "cache_control": {"type": "ephemeral"}},
    ]
    seen = []
    for n in range(2):
        system[0]["text"] = f"x-anthropic-billing-header: cc_version=1; turn={n};"
        usage = ask(claude, system=system).usage
        assert usage.cache_read_input_tokens is not None
        seen.append(usage)
    (total,) = {prompt_tokens(usage) for usage in seen}  # what only bills is no part of the prompt
    kept = [
        (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        for usage in seen
    ]
    assert kept == [total // 16 * 16] * 2
    assert (seen[1].cache_read_input_tokens or 0) >= (total - 1) // 16 * 16


def test_counting_equals_what_the_answer_bills(claude: anthropic.Anthropic) -> None:
    usage = ask(claude, WEATHER, tools=agent.for_messages()).usage
    counted = count(claude, WEATHER, tools=agent.for_messages())
    assert counted == prompt_tokens(usage)


def test_the_conversation_changes_which_tools_are_offered(claude: anthropic.Anthropic) -> None:
    """Changes stand in system messages; the prompt is that of a request which offers what is left."""
    weather, clock, lamp = agent.for_messages()
    turns: Any = [{"role": "user", "content": "Hello!"}]
    last: Any = {"role": "user", "content": "Go on."}

    def counted(tools: Any, *changes: tuple[str, Any]) -> int:
        blocks = [{"type": kind, "tool": tool} for kind, tool in changes]
        system = [{"role": "system", "content": blocks}] if blocks else []
        return count(claude, [*turns, *system, last], tools=tools)

    def named(tool: Any) -> Any:
        return {"type": "tool_reference", "name": tool["name"]}

    defined = {"type": "tool_definition", "definition": lamp}
    both = counted([weather, clock])
    assert counted([weather, clock], ("tool_removal", named(clock))) == counted([weather]) < both
    again = (("tool_removal", named(clock)), ("tool_addition", named(clock)))
    assert counted([weather, clock], *again) == both
    assert counted([weather], ("tool_addition", defined)) == counted([weather, lamp])
    for change, field in (
        (("tool_removal", named(lamp)), "messages[1].content[0].tool.name"),
        (("tool_removal", defined), "messages[1].content[0].tool.type"),
        (("tool_addition", "x"), "messages[1].content[0].tool.type"),
        (("tool_addition", {**defined, "definition": 5}), "messages[1].content[0].tool.definition"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=re.escape(field)):
            counted([weather], change)


def test_results_of_tools_run_elsewhere_are_passed_over(claude: anthropic.Anthropic) -> None:
    result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    text = {"type": "text", "text": "What is 17 + 25?"}
    assert count(claude, [{"role": "user", "content": [result, text]}]) == count(claude, ADD)


@pytest.mark.slow
def test_counting_takes_no_place_in_a_full_queue(model: Any) -> None:
    """Agents count every tool of theirs at once, whatever the engine is doing."""
    options = ("--max-running", "1", "--max-queued-requests", "1", "--served-model-name", "tiny")
    with serving(model, *options, step_s=0.1) as served, ThreadPoolExecutor(24) as pool:
        long = {"messages": ADD, "max_tokens": 300, "ignore_eos": True}
        asked = [pool.submit(served.post, "/v1/messages", long) for _ in range(2)]
        full = {"running": 1, "waiting": 1}
        eventually(
            lambda: full.items() <= served.ledger()["engines"][0].items(),
            within_s=10,
        )
        assert served.post("/v1/messages", long).status_code == 503
        tools = [{"name": f"tool{n}", "input_schema": {"type": "object"}} for n in range(24)]
        counted = list(
            pool.map(
                lambda tool: served.post(
                    "/v1/messages/count_tokens", {"messages": ADD, "tools": [tool]}
                ),
                tools,
            )
        )
        assert [answer.status_code for answer in counted] == [200] * 24
        assert not any(each.done() for each in asked)
        eventually(lambda: _asked_to_end(served) is not None, within_s=10)


def _asked_to_end(served: Served) -> int | None:
    """The status of a process that has been asked once more: the second time it does not wait for what runs."""
    served.process.terminate()
    return served.process.poll()


def test_what_agents_send_is_understood(bundled: Served) -> None:
    """Beta query and headers, blocks with cache_control, an environment block as system in mid-conversation."""
    headers = {
        "authorization": f"Bearer {KEY}",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,made-up-2026-01-01",
    }
    tool = {
        **agent.for_messages()[0],
        "cache_control": {"type": "ephemeral"},
        "defer_loading": True,
    }
    body = {
        "model": "demo",
        "max_tokens": 32000,
        "temperature": 0,
        "metadata": {"user_id": json.dumps({"device_id": "x"})},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "tools": [tool, {"type": "bash_20250124", "name": "bash"}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello!"}]},
            {"role": "system", "content": "The folder is /tmp."},
            {"role": "user", "content": "What is 17 + 25?"},
        ],
    }
    answer = httpx.post(
        bundled.url + "/v1/messages?beta=true",
        json=body,
        headers=headers,
        timeout=300,
        verify=NO_TLS,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["context_management"] == {"applied_edits": []}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"system": [{"type": "image", "source": {}}]}, "system[0].type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ],
)  # fmt: skip
def test_a_bad_request_names_its_field(
    claude: anthropic.Anthropic, change: dict[str, Any], said: str
) -> None:
    asked: Any = {"messages": ADD, "max_tokens": 2000, **change}
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="demo", extra_body=asked, messages=[], max_tokens=1)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(said), body
    assert body["request_id"] == caught.value.request_id


def test_a_prompt_that_is_too_long_says_so_in_the_words_agents_parse(
    claude: anthropic.Anthropic,
) -> None:
    for text in ("word " * 9000, "word " * 200_000):
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"
        ):
            ask(claude, [{"role": "user", "content": text}], max_tokens=10)


def test_errors_are_the_clients_typed_exceptions(bundled: Served) -> None:
    with anthropic_client(bundled.url, "wrong") as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            ask(stranger)
        with pytest.raises(anthropic.AuthenticationError):
            stranger.models.list()
    with (
        anthropic_client(bundled.url, KEY) as client,
        pytest.raises(anthropic.NotFoundError),
    ):
        client.messages.create(model="other", messages=ADD, max_tokens=5)


def test_models_are_listed_in_both_shapes(claude: anthropic.Anthropic, bundled: Served) -> None:
    page = claude.models.list()
    assert [card.id for card in page.data] == ["demo"] and page.data[0].type == "model"
    assert claude.models.retrieve("demo").display_name == "demo"
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("other")
    plain = bundled.get("/v1/models", **{"x-api-key": KEY}).json()
    assert plain["object"] == "list"


def test_probes_at_the_start_are_answered(bundled: Served) -> None:
    assert httpx.head(bundled.url + "/api/hello").status_code == 200
    assert httpx.head(bundled.url + "/v1/models", headers={"x-api-key": KEY}).status_code == 200


def test_warming_the_cache_answers_nothing(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, max_tokens=0)
    assert answer.content == [] and answer.usage.output_tokens == 0


def test_a_prefilled_answer_is_continued(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, [*ADD, {"role": "assistant", "content": "The answer is"}])
    assert "42" in str(answer.content) and "The answer is" not in str(answer.content)


def test_leaving_a_stream_ends_the_work(bundled: Served) -> None:
    story = [{"role": "user", "content": "Tell me a long story."}]
    body = {"model": "demo", "messages": story, "max_tokens": 4000, "stream": True}
    body["ignore_eos"] = True
    headers = {"x-api-key": KEY}
    with httpx.stream(
        "POST", bundled.url + "/v1/messages", json=body, headers=headers, timeout=300, verify=NO_TLS
    ) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: message_start"
    eventually(lambda: _at_rest(bundled), within_s=5)


def _at_rest(bundled: Served) -> bool:
    core = bundled.get("/v1/requests", **{"x-api-key": KEY}).json()["engines"][0]
    return bool(core["running"] == 0 and core["held_blocks"] == 0)


def test_a_stream_that_waits_gets_pings_of_its_dialect_and_an_end_that_is_an_error(
    model: Any,
) -> None:
    """The status goes out with the first ping; a server that ends says so in an error event."""
    options = ("--ping-interval-s", "0.1", "--shutdown-timeout-s", "0")
    with serving(model, *options, step_s=0.6) as served:
        body = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 500, "stream": True}
        with httpx.stream(
            "POST", served.url + "/v1/messages", json=body, timeout=300, verify=NO_TLS
        ) as response:
            lines = response.iter_lines()
            assert [next(lines) for _ in range(2)] == ["event: ping", 'data: {"type":"ping"}']
            served.process.terminate()
            rest = list(lines)
        assert rest[-3] == "event: error" and "overloaded_error" in rest[-2]
        assert "message_stop" not in "".join(rest)
        served.process.wait(300)


def test_an_agents_turn_with_parallel_calls_an_error_and_its_thinking(
    claude: anthropic.Anthropic,
) -> None:
    """Signed thinking before two calls, one of which failed; their results as a text, as blocks and with is_error."""
    asked: Any = {"max_tokens": 2000, "tools": agent.for_messages(), "thinking": THINK}
    first = ask(claude, WEATHER, **asked)
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.content[0].type == "thinking" and first.content[0].signature and calls
    second: Any = {"type": "tool_use", "id": "toolu_2", "name": "get_time", "input": {"city": "Rome"}}  # fmt: skip
    result = agent.carry_out(calls[0].name, dict(calls[0].input))
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": result}]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True},
    ]  # fmt: skip
    history = [
        *WEATHER,
        {"role": "assistant", "content": [*first.content, second]},
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    answer = ask(claude, history, **asked)
    assert answer.stop_reason == "end_turn" and any(b.type == "text" for b in answer.content)
    plain = count(claude, history, tools=agent.for_messages())
    results[1]["content"] = ""
    assert count(claude, history, tools=agent.for_messages()) < plain, "the error is in the prompt"


def test_an_image_in_a_tools_result_is_refused_by_its_place(claude: anthropic.Anthropic) -> None:
    image = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    history: Any = [
        *WEATHER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": image}]}
        ]},
    ]  # fmt: skip
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, history, tools=agent.for_messages())
    body: Any = caught.value.body
    assert body["error"]["message"].startswith("messages[2].content[0].content[0]"), body
    assert "image" in body["error"]["message"]


# The list of models


@pytest.fixture(scope="module")
def five(model: Path) -> Iterator[anthropic.Anthropic]:
    """A client of a server with five names for its model."""
    with (
        serving(model, "--served-model-name", "a,b,c,d,e") as served,
        anthropic_client(served.url, "none") as client,
    ):
        yield client


def test_models_come_in_pages(five: anthropic.Anthropic) -> None:
    first = five.models.list(limit=2)
    assert [model.id for model in first.data] == ["a", "b"]
    assert (first.has_more, first.first_id, first.last_id) == (True, "a", "b")
    assert [model.id for model in first] == list("abcde"), "the client turns the pages"
    last = five.models.list(limit=2, after_id="d")
    assert [model.id for model in last.data] == ["e"] and last.has_more is False
    before = five.models.list(limit=2, before_id="d")
    assert [model.id for model in before.data] == ["b", "c"] and before.has_more
    assert (before.first_id, before.last_id) == ("b", "c")
    assert [model.id for model in before] == ["b", "c", "a"], "backwards, page by page"
    none = five.models.list(after_id="e")
    assert (none.data, none.has_more, none.first_id, none.last_id) == ([], False, None, None)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"after_id": "z"}, "after_id"),
        ({"before_id": "z"}, "before_id"),
        ({"before_id": "b", "after_id": "a"}, "before_id"),
    ],
)
def test_a_page_that_is_none_is_refused(
    five: anthropic.Anthropic, query: dict[str, Any], field: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=f"{field}:"):
        five.models.list(**query)


def test_a_stop_sequence_does_not_hide_what_was_cached(
    claude: anthropic.Anthropic, bundled: Served
) -> None:
    """It ends the answer before the engine knows. A stream tells the share with its first event."""
    asked: Any = {"system": "Answer briefly. " * 20, "stop_sequences": ["2"]}
    ask(claude, **asked)
    before = cached_total(bundled)
    answer = ask(claude, **asked)
    assert answer.stop_reason == "stop_sequence"
    cached = answer.usage.cache_read_input_tokens or 0
    assert cached >= 16 and cached_total(bundled) - before == cached
    (_, first), *_ = events_of(bundled, **asked)
    assert first["message"]["usage"]["cache_read_input_tokens"] == cached


def test_an_answer_that_ends_behind_its_one_call_tells_what_was_cached(
    claude: anthropic.Anthropic,
) -> None:
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    asked: Any = {"messages": WEATHER, "tools": agent.for_messages(), "tool_choice": one}
    usages = [ask(claude, **asked).usage for _ in range(2)]
    assert (usages[1].cache_read_input_tokens or 0) >= 16


def cached_total(bundled: Served) -> float:
    found = re.search(
        r"^headrace_cached_prompt_tokens_total (\S+)", bundled.get("/metrics").text, re.M
    )
    assert found is not None
    return float(found[1])
