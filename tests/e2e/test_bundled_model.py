"""The main job on real input: the real server, the bundled model, the official client."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import openai
import pytest

from headrace.bench.datasets.tasks import generate_eval, score


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "headrace",
        "serve",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    process = subprocess.Popen(command)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=1):
                break
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, "a drained server ends with status 0"


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def ask(client: openai.OpenAI, model: str, text: str, **more: object) -> str:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=200,
        **more,
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return answer.choices[0].message.content or ""


def test_a_question_gets_its_answer(client: openai.OpenAI, model: str) -> None:
    assert "42" in ask(client, model, "What is 17 + 25?")


def test_the_stream_is_the_full_answer(client: openai.OpenAI, model: str) -> None:
    chunks = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello! Who are you?"}], temperature=0, stream=True,
        stream_options={"include_usage": True}, max_tokens=200,
    )  # fmt: skip
    text, usage = "", None
    for chunk in chunks:
        text += "".join(c.delta.content or "" for c in chunk.choices)
        usage = chunk.usage or usage
    assert text == ask(client, model, "Hello! Who are you?")
    assert usage is not None and usage.completion_tokens > 1


def test_a_repeated_conversation_reads_its_prefix_from_the_cache(
    client: openai.OpenAI, model: str
) -> None:
    messages = [{"role": "user", "content": "Remember these words: " + "blue river stone " * 30}]
    first, again = (
        client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8)  # type: ignore[arg-type]
        for _ in range(2)
    )
    assert first.choices[0].message.content == again.choices[0].message.content
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 64


@pytest.mark.parametrize("task", ["copy", "recall", "arithmetic", "tool_call", "json"])
def test_held_out_tasks_reach_the_bar(base_url: str, model: str, task: str) -> None:
    right, items = 0, generate_eval(task, 20, seed=11)
    for item in items:
        body = {
            "model": model, "messages": item.messages, "temperature": 0, "max_tokens": item.max_tokens,
            "chat_template_kwargs": item.template_kwargs, "skip_special_tokens": False,
        }  # fmt: skip
        if item.tools is not None:
            body["tools"] = item.tools
        request = urllib.request.Request(
            base_url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            right += score(item, json.load(response)["choices"][0]["message"]["content"])
    assert right >= 19


def test_sampling_with_a_seed_repeats_and_without_varies(client: openai.OpenAI, model: str) -> None:
    def story(seed: int | None) -> str:
        answer = client.completions.create(
            model=model, prompt="Once upon a time", temperature=1.0, max_tokens=24, seed=seed
        )
        return answer.choices[0].text

    assert story(5) == story(5)
    assert len({story(None) for _ in range(6)}) > 1


def test_metrics_and_ledger_agree_that_nothing_runs(base_url: str) -> None:
    with urllib.request.urlopen(base_url + "/v1/requests") as response:
        ledger = json.load(response)["engines"][0]
    assert (ledger["running"], ledger["waiting"]) == (0, 0)
    with urllib.request.urlopen(base_url + "/metrics") as response:
        assert b"headrace_" in response.read()
