"""Ollama's routes over real sockets, against the bundled model (BEY-43). Its official client (0.6.3) was tried by hand:
docs/CLIENTS.md."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.serving import NO_TLS, Served
from tests.dialects import agent
from tests.dialects.conftest import KEY, OTHER

ADD: Any = [{"role": "user", "content": "What is 17 + 25?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: Any = [{"type": "function", "function": f} for f in agent.functions()]
GREEDY = {"temperature": 0}


def ask(served: Served, path: str, *, key: str = KEY, method: str = "POST", **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(
        method, served.url + path, json=body, headers=headers, verify=NO_TLS, timeout=300
    )


def chat(served: Served, **body: Any) -> Any:
    answer = ask(
        served, "/api/chat", **{"model": "demo", "stream": False, "options": GREEDY, **body}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def models(served: Served, key: str = KEY) -> Any:
    return ask(served, "/v1/models", method="GET", key=key).json()["data"]


@pytest.mark.slow
def test_a_stream_folds_to_the_full_answer(bundled: Served) -> None:
    for asked in (
        {"messages": ADD},
        {"messages": ADD, "think": True},
        {"messages": WEATHER, "tools": TOOLS},
    ):
        full = chat(bundled, **asked)
        answer = ask(bundled, "/api/chat", model="demo", options=GREEDY, **asked)
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        text = "".join(line["message"]["content"] for line in lines)
        assert text == full["message"]["content"]
        calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
        whole = full["message"].get("tool_calls", [])
        assert [c["function"] for c in calls] == [c["function"] for c in whole]
        assert lines[-1]["eval_count"] == full["eval_count"] > 0
        assert 0 < full["eval_duration"] <= full["total_duration"]


@pytest.mark.slow
def test_an_agent_answers_with_what_its_tool_said(bundled: Served) -> None:
    message = chat(bundled, messages=WEATHER, tools=TOOLS)["message"]
    (call,) = message["tool_calls"]
    result = agent.carry_out("get_weather", call["function"]["arguments"])
    del call["id"]
    answered = {"role": "tool", "tool_name": "get_weather", "content": result}
    second = chat(bundled, messages=[*WEATHER, message, answered], tools=TOOLS)
    assert str(json.loads(result)["temperature"]) in second["message"]["content"]


@pytest.mark.slow
def test_a_named_model_is_its_keys_own(bundled: Served) -> None:
    modelfile = 'FROM demo:latest\nPARAMETER temperature 0\nPARAMETER stop "2"\nSYSTEM Be short.'
    made = ask(bundled, "/api/create", model="short", modelfile=modelfile)
    assert [json.loads(line)["status"] for line in made.text.splitlines()][-1] == "success"
    assert chat(bundled, model="short", messages=ADD, options={})["message"]["content"] == "4"
    assert ask(bundled, "/api/copy", source="short", destination="brief").status_code == 200
    chats = "/v1/chat/completions"
    answer = ask(bundled, chats, model="brief:latest", messages=ADD)
    assert answer.json()["choices"][0]["message"]["content"] == "4", answer.text
    assert ask(bundled, chats, key=OTHER, model="brief", messages=ADD).status_code == 404
    for path, body in (
        ("/v1/messages", {"messages": ADD, "max_tokens": 9}),
        ("/v2/chat", {"messages": ADD}),
        ("/v1/responses", {"input": ADD}),
        ("/v1/completions", {"prompt": "1, ", "max_tokens": 4}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        assert ask(bundled, path, model="brief", **body).status_code == 200, path
        assert ask(bundled, path, model="demo:latest", **body).status_code == 200, path
        assert ask(bundled, path, key=OTHER, model="brief", **body).status_code == 404, path
    cards = {card["id"]: card["parent"] for card in models(bundled)}
    assert cards == {"demo": None, "short": "demo", "brief": "demo"}
    assert [card["id"] for card in models(bundled, key=OTHER)] == ["demo"]
    assert ask(bundled, "/v1/models/brief", method="GET").json()["root"] == "demo"
    shown = ask(bundled, "/api/show", model="brief").json()
    assert shown["system"] == "Be short." and shown["details"]["parent_model"] == "demo"
    assert 'stop """2"""' in shown["parameters"] and "completion" in shown["capabilities"]
    names = [one["name"] for one in ask(bundled, "/api/tags", method="GET").json()["models"]]
    assert names[0] == "demo" and set(names) == {"demo", "short", "brief"}
    assert ask(bundled, "/api/show", key=OTHER, model="brief").status_code == 404
    for name in ("short", "brief"):
        assert ask(bundled, "/api/delete", method="DELETE", model=name).status_code == 200
        assert ask(bundled, "/api/delete", method="DELETE", model=name).status_code == 404


@pytest.mark.slow
def test_what_is_refused_says_so_in_one_text(bundled: Served) -> None:
    for path, body, status, said in (
        ("/api/chat", {"model": "nobody", "messages": ADD}, 404, "model: 'nobody' is not served"),
        ("/api/chat", {"messages": ADD, "options": {"warmth": 1}}, 400, "unknown field `warmth`"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "no tokens for insertion"),
        ("/api/create", {"model": "x", "from": "demo", "files": {"a": "b"}}, 400, "files: "),
        ("/api/create", {"model": "demo", "from": "demo"}, 409, "a model of this server"),
        ("/api/pull", {"model": "org/name"}, 403, "--allow-pull is off"),
        ("/api/push", {"model": "demo"}, 400, "neither uploaded"),
    ):
        answer = ask(bundled, path, **body)
        assert answer.status_code == status and said in answer.json()["error"], answer.text
    assert ask(bundled, "/api/chat", key="wrong", messages=ADD).status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "origin", "status"),
    [
        ("/api/generate", {}, 200),
        ("/api/generate", {"origin": "http://page.example"}, 415),
        ("/v1/completions", {}, 415),
    ],
)
def test_curl_without_a_header_is_understood_and_a_page_is_not(
    bundled: Served, path: str, origin: dict[str, str], status: int
) -> None:
    form = {"content-type": "application/x-www-form-urlencoded", "authorization": f"Bearer {KEY}"}
    body = json.dumps({"prompt": "hi", "options": {"num_predict": 1}})
    answer = httpx.post(
        bundled.url + path, content=body, headers=form | origin, verify=NO_TLS, timeout=300
    )
    assert answer.status_code == status, answer.text


@pytest.mark.slow
def test_prompts_embeddings_and_what_is_loaded(bundled: Served) -> None:
    plain = ask(
        bundled, "/api/generate", prompt="What is 2 + 2?", stream=False, options=GREEDY
    ).json()
    assert plain["response"] == "4" and plain["done_reason"] == "stop"
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}
    held = chat(bundled, messages=ADD, format={**schema, "additionalProperties": False})
    assert json.loads(held["message"]["content"]) == {"n": 7}
    assert ask(bundled, "/api/generate").json()["done_reason"] == "load"
    rows = ask(bundled, "/api/embed", input=["fox", "dog"]).json()["embeddings"]
    assert len(rows) == 2 and abs(sum(x * x for x in rows[0]) - 1) < 1e-3
    assert ask(bundled, "/api/embeddings", prompt="fox").json()["embedding"] == rows[0]
    (row,) = ask(bundled, "/api/ps", method="GET").json()["models"]
    assert row["name"] == "demo" and row["size"] > 0 and row["size_vram"] == 0
    assert ask(bundled, "/api/version", method="GET").json()["version"]
