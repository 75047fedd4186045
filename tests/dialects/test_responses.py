"""Responses with the official client, over real sockets, against the bundled model (API-03, API-12, REG-102,
contract 4)."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.api.clients import openai_client
from tests.api.serving import NO_TLS, Served, eventually, serving
from tests.dialects import agent
from tests.dialects.conftest import KEY, OTHER

ADD = "What is 17 + 25?"
WEATHER = "What is the weather in Paris?"
HEADERS = {"Authorization": f"Bearer {KEY}"}
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


def ask(gpt: openai.OpenAI, given: Any = ADD, **more: Any) -> Any:
    return gpt.responses.create(
        model="demo", input=given, **{"temperature": 0, "max_output_tokens": 400, **more}
    )


def post(bundled: Served, **body: Any) -> httpx.Response:
    asked = {"model": "demo", "input": ADD, "temperature": 0, **body}
    return httpx.post(
        bundled.url + "/v1/responses", json=asked, headers=HEADERS, timeout=300, verify=NO_TLS
    )


def events_of(bundled: Served, **body: Any) -> list[dict[str, Any]]:
    response = post(bundled, stream=True, **body)
    assert response.status_code == 200, response.text
    found = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


def test_an_answer_has_what_the_published_document_requires(bundled: Served) -> None:
    answer = post(bundled, metadata={"a": "b"}).json()
    for field in (
        *("id", "object", "created_at", "model", "output", "parallel_tool_calls", "tool_choice"),
        *("tools", "error", "incomplete_details", "instructions", "metadata", "temperature"),
        *("top_p", "status", "usage", "text", "truncation", "store"),
    ):
        assert field in answer, field
    assert answer["object"] == "response" and answer["status"] == "completed"
    assert answer["id"].startswith("resp_") and answer["metadata"] == {"a": "b"}
    (message,) = answer["output"]
    (part,) = message["content"]
    assert "42" in part["text"] and part["annotations"] == [] and part["logprobs"] == []
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0
    assert usage["input_tokens_details"]["cache_write_tokens"] == 0
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_prompt_and_answer_are_told_as_tokens_where_that_is_asked(
    bundled: Served, gpt: openai.OpenAI
) -> None:
    """vLLM's enable_response_messages (contract 4)."""
    asked: Any = {"enable_response_messages": True}
    response = ask(gpt, extra_body=asked, reasoning={"effort": "low"})
    (sent,), (answer,) = response.input_messages, response.output_messages
    assert sent["type"] == answer["type"] == "raw_message_tokens"
    assert ADD in sent["message"] and "<|im_start|>" in sent["message"]
    assert "</think>" in answer["message"] and response.output_text in answer["message"]
    for told, count in (
        (sent, response.usage.input_tokens),
        (answer, response.usage.output_tokens),
    ):
        assert len(told["tokens"]) == count
        body = {"tokens": told["tokens"]}
        url = bundled.url + "/detokenize"
        text = httpx.post(url, json=body, headers=HEADERS, timeout=300, verify=NO_TLS).json()
        assert text["prompt"] == told["message"]
    last = events_of(bundled, **asked)[-1]["response"]
    assert last["input_messages"][0]["tokens"] and last["output_messages"][0]["tokens"]
    assert "input_messages" not in post(bundled).json()
    refused = post(bundled, background=True, **asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "enable_response_messages"


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reasoning": {"reasoning": {"effort": "low", "summary": "auto"}},
    "tools": {"input": WEATHER, "tools": agent.for_responses()},
    "cut": {"max_output_tokens": 2},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "items": {"input": [{"role": "user", "content": ADD, "id": "msg_1", "type": None}]},
}


@pytest.mark.parametrize("case", CASES)
def test_events_follow_the_grammar_and_fold_to_the_full_answer(bundled: Served, case: str) -> None:
    events = events_of(bundled, **CASES[case])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    assert kinds[-1] == f"response.{last['status']}"
    assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    open_item = None
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_item is None and event["output_index"] == len(items)
            open_item = event["item"]
            items.append(open_item)
        elif kind == "response.output_item.done":
            assert open_item is not None and event["item"]["id"] == open_item["id"]
            assert event["item"] == last["output"][event["output_index"]]
            open_item = None
        else:
            assert open_item is not None and event["item_id"] == open_item["id"]
            if kind.endswith(".delta"):
                texts[kind] = texts.get(kind, "") + event["delta"]
            elif kind.endswith("_text.done"):
                assert texts[kind.removesuffix("done") + "delta"] == event["text"]
            elif kind.endswith("arguments.done"):
                assert texts[kind.removesuffix("done") + "delta"] == event["arguments"]
                assert event["name"]
    assert open_item is None and len(items) == len(last["output"])

    full = post(bundled, **CASES[case]).json()
    assert _comparable(full) == _comparable(last)


def _comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without ids, times and what the prefix cache changes."""
    found = {k: v for k, v in answer.items() if k not in ("id", "created_at", "completed_at")}
    found["usage"] = {**answer["usage"], "input_tokens_details": None}
    found["output"] = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in answer["output"]
    ]
    return found


def test_an_agent_works_through_several_turns_with_tools(gpt: openai.OpenAI) -> None:
    """State is on the server: each request brings only what is new."""
    previous: str | None = None
    for question, tool in agent.QUESTIONS:
        given: Any = question
        called = []
        for _ in range(4):
            answer = ask(gpt, given, tools=agent.for_responses(), previous_response_id=previous)
            previous = answer.id
            calls = [item for item in answer.output if item.type == "function_call"]
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
        else:
            pytest.fail("the model never finished")
        assert tool in called and answer.output_text


def test_an_agent_that_keeps_its_own_history_gets_the_same(gpt: openai.OpenAI) -> None:
    """store: false, all items sent each turn, reasoning sealed: as coding agents do it."""
    history: list[Any] = [{"role": "user", "content": WEATHER}]
    asked: Any = {
        "store": False,
        "tools": agent.for_responses(),
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "extra_body": {"client_metadata": {"x": "y"}, "prompt_cache_key": "k"},
    }
    for _ in range(4):
        with gpt.responses.stream(
            model="demo", input=history, temperature=0, max_output_tokens=400, **asked
        ) as stream:
            answer = stream.get_final_response()
        history += [item.model_dump(exclude_none=True, mode="json") for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            result = agent.carry_out(call.name, json.loads(call.arguments))
            history.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
    assert answer.output_text and not calls
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(answer.id)


def test_stored_responses_are_read_listed_and_deleted(gpt: openai.OpenAI) -> None:
    first = ask(gpt, [{"role": "user", "content": "Hello!"}, {"role": "user", "content": ADD}])
    assert gpt.responses.retrieve(first.id).output_text == first.output_text
    items = gpt.responses.input_items.list(first.id, order="asc").data
    assert [item.content[0].text for item in items] == ["Hello!", ADD]
    page = gpt.responses.input_items.list(first.id, order="asc", limit=1)
    assert page.has_more and [item.id for item in page.data] == [items[0].id]
    rest = gpt.responses.input_items.list(first.id, order="asc", after=items[0].id or "")
    assert [item.id for item in rest.data] == [items[1].id]
    gpt.responses.delete(first.id)
    for gone in (
        lambda: gpt.responses.retrieve(first.id),
        lambda: gpt.responses.delete(first.id),
        lambda: gpt.responses.input_items.list(first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            gone()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(gpt, "x", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


def test_why_a_response_cannot_be_gone_on_from_is_told(gpt: openai.OpenAI, slow: Served) -> None:
    """What is there was said not to be, where it was one before it that is gone, or where it was not complete yet."""

    def told(client: openai.OpenAI, ident: str, model: str) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=model, input="Go on.", previous_response_id=ident)
        assert caught.value.code == "previous_response_not_found"
        return caught.value.message

    first = gpt.responses.create(model="demo", input="Hello!", max_output_tokens=16)
    second = gpt.responses.create(
        model="demo", input="Hello!", max_output_tokens=16, previous_response_id=first.id
    )
    gpt.responses.delete(first.id)
    assert gpt.responses.retrieve(second.id).id == second.id
    assert "goes on from a response that is not there" in told(gpt, second.id, "demo")
    assert "is not there (any more)" in told(gpt, first.id, "demo")
    with openai_client(slow.url) as client:
        running = client.responses.create(
            model="tiny", input="x", background=True, extra_body={"ignore_eos": True}
        )
        assert "is still being made" in told(client, running.id, "tiny")
        client.responses.cancel(running.id)


def test_another_key_sees_nothing_of_it(gpt: openai.OpenAI, bundled: Served) -> None:
    mine = ask(gpt, ADD, background=True)
    item = f"msg_{mine.id.removeprefix('resp_')}0000"
    with openai_client(bundled.url, OTHER) as other:
        for attempt in (
            lambda: other.responses.retrieve(mine.id),
            lambda: other.responses.cancel(mine.id),
            lambda: other.responses.delete(mine.id),
            lambda: other.responses.input_items.list(mine.id),
            lambda: list(other.responses.retrieve(mine.id, stream=True)),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        for given in (
            {"previous_response_id": mine.id},
            {"given": [{"type": "item_reference", "id": item}]},
        ):
            with pytest.raises(openai.BadRequestError):
                ask(other, **given)
    eventually(lambda: gpt.responses.retrieve(mine.id).status == "completed", within_s=20)


def test_a_reference_stands_for_the_stored_item(gpt: openai.OpenAI) -> None:
    first = ask(gpt)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    counted = []
    for middle in (reference, {"role": "assistant", "content": first.output_text}):
        given: Any = [{"role": "user", "content": ADD}, middle, {"role": "user", "content": "Why?"}]
        counted.append(gpt.responses.input_tokens.count(model="demo", input=given).input_tokens)
    assert counted[0] == counted[1]


def test_reasoning_goes_out_in_the_clear_summed_up_and_sealed_and_comes_back(
    gpt: openai.OpenAI, bundled: Served
) -> None:
    answer = ask(
        gpt,
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
    )
    thought, message = answer.output
    assert thought.type == "reasoning" and message.type == "message"
    assert thought.content[0].text == thought.summary[0].text
    details = answer.usage.output_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.output_tokens

    def counted(client: openai.OpenAI, *items: Any) -> int:
        given: Any = [
            {"role": "user", "content": ADD},
            *items,
            {"role": "assistant", "content": "42"},
        ]
        return client.responses.input_tokens.count(model="demo", input=given).input_tokens

    empty: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
    content = [{"type": "reasoning_text", "text": thought.content[0].text}]
    clear: Any = {**empty, "content": content}
    sealed: Any = {**empty, "encrypted_content": thought.encrypted_content}
    assert counted(gpt, clear) == counted(gpt, sealed) > counted(gpt, empty) == counted(gpt)
    with openai_client(bundled.url, OTHER) as other:
        assert counted(other, sealed) == counted(other)


def test_a_custom_tool_gets_free_text_and_hosted_ones_are_passed_over(gpt: openai.OpenAI) -> None:
    hosted: Any = {"type": "web_search", "external_web_access": False}
    custom: Any = {"type": "custom", "name": "search_web", "description": "Search the web"}
    stream = gpt.responses.create(
        model="demo",
        input="Search the web for red foxes.",
        tools=[custom, hosted],
        temperature=0,
        stream=True,
    )
    events = list(stream)
    done: Any = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert len(done) == 1 and "fox" in done[0].input
    final: Any = events[-1]
    (item,) = final.response.output
    assert item.type == "custom_tool_call" and item.input == done[0].input
    back = [
        {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "Foxes are red."}
    ]
    assert ask(gpt, back, tools=[custom], previous_response_id=final.response.id).status


def test_a_custom_tools_regular_expression_is_held_to(gpt: openai.OpenAI) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]{2,5}"}
    custom: Any = {"type": "custom", "name": "shell", "description": "Runs", "format": form}
    made = ask(
        gpt, "List the files.", tools=[custom], tool_choice={"type": "custom", "name": "shell"}
    )
    (call,) = made.output
    assert call.type == "custom_tool_call" and re.fullmatch("[a-z]{2,5}", call.input), call


def test_tools_and_include_may_be_empty(gpt: openai.OpenAI) -> None:
    assert "42" in ask(gpt, tools=[], include=[]).output_text


def test_tools_are_repeated_with_the_fields_their_schema_requires(bundled: Served) -> None:
    given = {"type": "function", "name": "lamp"}
    (shown,) = post(bundled, tools=[given], max_output_tokens=1).json()["tools"]
    assert shown == {**given, "parameters": None, "strict": None}


def test_a_cut_answer_is_incomplete_and_says_why(gpt: openai.OpenAI) -> None:
    answer = ask(gpt, "Tell me a story.", max_output_tokens=5)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"


def test_truncation_drops_the_oldest_turns(gpt: openai.OpenAI) -> None:
    turns: Any = []
    for words in (7000, 7000, 1500):
        turns += [
            {"role": "user", "content": "word " * words},
            {"role": "assistant", "content": "ok"},
        ]
    turns.append({"role": "user", "content": ADD})
    with pytest.raises(openai.BadRequestError) as caught:
        ask(gpt, turns)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    answer = ask(gpt, turns, truncation="auto", instructions="Answer briefly.")
    assert answer.error is None and 1500 < answer.usage.input_tokens < 3500


def test_compaction_stands_for_the_conversation(gpt: openai.OpenAI, bundled: Served) -> None:
    asked: Any = [{"role": "user", "content": ADD}]
    made: Any = gpt.responses.compact(model="demo", input=asked, extra_body={"temperature": 0})
    assert made.object == "response.compaction"
    item = made.output[0].model_dump(exclude_none=True)
    assert item["type"] == "compaction"
    assert ask(gpt, [item, {"role": "user", "content": "Hello!"}]).output_text
    with (
        openai_client(bundled.url, OTHER) as other,
        pytest.raises(openai.BadRequestError, match="not made by this server for you"),
    ):
        ask(other, [item])


# What runs in the background


def test_background_runs_on_and_is_polled(gpt: openai.OpenAI) -> None:
    queued = ask(gpt, ADD, background=True)
    assert queued.status == "queued" and queued.output == []
    eventually(lambda: gpt.responses.retrieve(queued.id).status == "completed", within_s=20)
    assert gpt.responses.retrieve(queued.id).output_text == ask(gpt).output_text
    assert gpt.responses.cancel(queued.id).status == "completed", "it was over: nothing changes"


def test_a_background_stream_is_taken_up_where_it_was_left(gpt: openai.OpenAI) -> None:
    asked: Any = {"background": True, "stream": True, "max_output_tokens": 60}
    stream = ask(gpt, "Tell me a story.", **asked)
    seen: list[Any] = []
    for event in stream:
        seen.append(event)
        if event.sequence_number == 9:
            break
    stream.close()
    ident = seen[0].response.id
    assert [event.type for event in seen[:3]] == [
        *("response.created", "response.queued", "response.in_progress"),
    ]
    seen += list(gpt.responses.retrieve(ident, stream=True, starting_after=9))
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    final = seen[-1].response
    deltas = [e.delta for e in seen if e.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == gpt.responses.retrieve(ident).output_text
    again = list(gpt.responses.retrieve(ident, stream=True))
    assert [event.sequence_number for event in again] == [event.sequence_number for event in seen]


@pytest.fixture(scope="module")
def slow(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose steps take 50 ms, with two API processes over one store."""
    cache = str(tmp_path_factory.mktemp("slow"))
    with serving(
        model, "--api-servers", "2", "--served-model-name", "tiny", step_s=0.05, HEADRACE_CACHE_DIR=cache
    ) as served:  # fmt: skip
        yield served
        assert served.stop() == 0


def test_cancelling_ends_the_work_whichever_process_is_asked(slow: Served) -> None:
    with openai_client(slow.url) as client:
        for _ in range(4):  # connections land on either of the two processes
            made = client.responses.create(
                model="tiny", input="fox", background=True, max_output_tokens=2000, extra_body={"ignore_eos": True}
            )  # fmt: skip
            eventually(
                lambda ident=made.id: _status(slow, ident) == "in_progress",
                within_s=10,
            )
            answer = slow.post(f"/v1/responses/{made.id}/cancel", {})
            assert answer.json()["status"] == "cancelled"
            assert _status(slow, made.id) == "cancelled"
    eventually(slow.at_rest, within_s=5)


def _followed(
    served: Served, ident: str, after: int, begun: threading.Event | None = None
) -> list[dict[str, Any]]:
    query = f"?stream=true&starting_after={after}" if after >= 0 else "?stream=true"
    url = f"{served.url}/v1/responses/{ident}{query}"
    with httpx.stream("GET", url, verify=NO_TLS, timeout=300) as answer:
        if begun is not None:
            begun.set()
        text = answer.read().decode()
    events = [event for event in text.strip().split("\n\n") if not event.startswith(":")]
    return [json.loads(event.partition("\ndata: ")[2]) for event in events]


def test_who_follows_is_told_the_end_of_a_cancelled_or_deleted_response(slow: Served) -> None:
    """Exactly one terminal event, with the next number; also for whoever comes back after it."""
    asked = {"input": "fox", "background": True, "max_output_tokens": 2000, "ignore_eos": True}
    for end in ("cancel", "delete"):
        ident = slow.post("/v1/responses", asked).json()["id"]
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(_followed, slow, ident, -1, begun := threading.Event())
            eventually(lambda ident=ident: _status(slow, ident) == "in_progress", within_s=10)
            assert begun.wait(300)
            if end == "cancel":
                slow.post(f"/v1/responses/{ident}/cancel", {})
            else:
                httpx.delete(f"{slow.url}/v1/responses/{ident}", timeout=300, verify=NO_TLS)
            events = following.result(300)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        terminal = [event for event in events if event["type"] in TERMINAL]
        assert terminal == events[-1:]
        if end == "delete":
            assert terminal[0]["type"] == "error" and terminal[0]["param"] == "response_id"
            continue
        assert terminal[0]["response"]["status"] == "cancelled"
        last = len(events) - 1
        assert _followed(slow, ident, last) == []
        assert _followed(slow, ident, last - 1) == terminal
    eventually(slow.at_rest, within_s=5)


def _status(served: Served, ident: str) -> Any:
    return served.get(f"/v1/responses/{ident}").json()["status"]


def test_only_what_runs_in_the_background_can_be_cancelled_or_streamed_again(
    gpt: openai.OpenAI,
) -> None:
    done = ask(gpt)
    with pytest.raises(openai.BadRequestError, match="background"):
        gpt.responses.cancel(done.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        gpt.responses.retrieve(done.id, stream=True)


def test_state_survives_a_restart_and_a_crash_in_the_background_is_told(
    model: Any, tmp_path: Any
) -> None:
    with serving(model, step_s=0.05, HEADRACE_CACHE_DIR=str(tmp_path)) as served:
        first = served.post("/v1/responses", {"input": "fox", "max_output_tokens": 3}).json()
        asked = {"input": "fox", "background": True, "max_output_tokens": 2000, "ignore_eos": True}
        lost = served.post("/v1/responses", asked).json()
        children = served.children
        served.process.send_signal(signal.SIGSTOP)  # or it would have the others end in order
        for child in children:
            child.suspend()  # or one would tell of the other's end
        for child in children:
            child.kill()
        served.process.kill()
    import sqlite3

    with sqlite3.connect(tmp_path / "responses.sqlite3") as database:  # as if it were long ago
        database.execute("UPDATE responses SET beat = 0")
    database.close()
    with serving(model, HEADRACE_CACHE_DIR=str(tmp_path)) as served:
        assert served.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
        after = {"input": "dog", "previous_response_id": first["id"], "max_output_tokens": 2}
        assert served.post("/v1/responses", after).status_code == 200
        found = served.get(f"/v1/responses/{lost['id']}").json()
        assert found["status"] == "failed" and "restarted" in found["error"]["message"]
        told = _followed(served, lost["id"], -1)
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        assert told[0]["type"] == "response.created" and told[-1]["type"] == "response.failed"
        assert told[-1]["response"] == found
        assert served.stop() == 0


@pytest.mark.slow
def test_a_server_without_a_store_says_so(model: Any) -> None:
    with serving(model, "--response-store", "off") as served:
        given = {"input": "fox", "max_output_tokens": 2}
        answer = served.post("/v1/responses", given)
        assert answer.status_code == 200 and answer.json()["store"] is False
        assert served.post("/v1/responses", {**given, "store": True}).status_code == 400
        assert served.post("/v1/responses", {**given, "background": True}).status_code == 400
        assert served.get(f"/v1/responses/{answer.json()['id']}").status_code == 404
        assert served.stop() == 0


# What is wrong with a request


PICTURE = {"type": "input_image", "image_url": "x"}


def user(part: dict[str, Any]) -> dict[str, Any]:
    """The change to an input of one part."""
    return {"input": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "mystery"}]}, "input[0].type"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
        (user(PICTURE), "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [PICTURE]}]}, "input[0].output[0].type"),
        (user({"type": "input_file", "file_id": "file-1"}), "input[0].content[0].file_id"),
        (user({"type": "input_file", "file_data": "data:application/pdf,x"}), "input[0].content[0].file_data"),
        ({"include": ["message.thoughts"]}, "include[0]"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"n": 2}, "n"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"tools": [{"type": "teleport"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": agent.for_responses() * 2}, "tools[3].name"),
        ({"tool_choice": {"type": "teleport"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "structured_outputs"),
        ({"conversation": "conv_1", "store": False}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_x"}, "conversation"),
        ({"conversation": 5}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"x" * 65: "y"}}, "metadata"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"top_k": "x"}, "top_k"),
    ],
)  # fmt: skip
def test_a_bad_request_names_its_field(bundled: Served, change: dict[str, Any], field: str) -> None:
    answer = post(bundled, **change)
    assert answer.status_code == (403 if field == "chat_template" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == field and error["message"].startswith(field), error


def test_errors_are_the_clients_typed_exceptions(bundled: Served) -> None:
    with (
        openai_client(bundled.url, "wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        ask(stranger)
    with openai_client(bundled.url, KEY) as client:
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="other", input="x")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_unknown")


def test_leaving_a_stream_ends_the_work(slow: Served) -> None:
    body = {"input": "fox", "stream": True, "max_output_tokens": 2000, "ignore_eos": True}
    with httpx.stream(
        "POST", slow.url + "/v1/responses", json=body, timeout=300, verify=NO_TLS
    ) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: response.created"
        eventually(lambda: not slow.at_rest(), within_s=3)
    eventually(slow.at_rest, within_s=3)


def test_an_agents_turn_with_parallel_calls_and_an_error(gpt: openai.OpenAI) -> None:
    """Sealed reasoning before two calls, one of which failed; outputs as a text and as parts."""
    asked: Any = {
        "tools": agent.for_responses(),
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
    }
    first = ask(gpt, WEATHER, **asked)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = agent.carry_out(call.name, json.loads(call.arguments))
    second = {
        "type": "function_call",
        "call_id": "c2",
        "name": "get_time",
        "arguments": '{"city": "Rome"}',
    }
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": result}]},
        {"type": "function_call_output", "call_id": "c2", "output": "error: no such city"},
    ]  # fmt: skip
    said = [item.model_dump(exclude_none=True, mode="json") for item in first.output]
    history = [{"role": "user", "content": WEATHER}, *said, second, *outputs]
    assert ask(gpt, history, **asked).output_text
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    outputs[0]["output"] = [picture]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(gpt, history, **asked)
    assert "image" in caught.value.message and str(caught.value.param).startswith("input[")


def test_a_prompt_kept_elsewhere_is_refused_with_what_to_send_instead(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(gpt, extra_body={"prompt": {"id": "pmpt_1"}})
    assert caught.value.param == "prompt" and "send" in caught.value.message


def test_a_hosted_tool_is_passed_over_and_cannot_be_forced(gpt: openai.OpenAI) -> None:
    """Clients always offer some (P25): nothing runs, and nothing goes out."""
    hosted: Any = [
        {"type": kind}
        for kind in ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")
    ]
    assert "42" in ask(gpt, ADD, tools=hosted).output_text
    for forced in ("required", {"type": "web_search"}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(gpt, ADD, tools=hosted, tool_choice=forced)
        assert str(caught.value.param).startswith("tool_choice")
    with pytest.raises(openai.BadRequestError) as unknown:
        ask(gpt, ADD, tools=[{"type": "telepathy"}])
    assert unknown.value.param == "tools[0].type"
