"""Requests that wait: comments that keep the connection, deadlines, full queues (reliability 1.2, 1.7)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.clients import openai_client
from tests.api.serving import NO_TLS, Served, eventually, serving
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.serial

PATH = "/v1/completions"
LONG = {"prompt": "fox", "max_tokens": 1500, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "fox", "max_tokens": 1, "stream": True}
LATE = {504: "deadline_exceeded", 503: "server_overloaded"}
"""A request that would not be done in its time is refused at once: how long a step takes here decides that."""


@pytest.fixture(scope="module")
def narrow(model: Path) -> Iterator[Served]:
    """One request runs, two may wait."""
    limits = ("--max-running", "1", "--max-queued-requests", "2", "--ping-interval-s", "0.1")
    with serving(model, *limits, step_s=0.01) as served:
        yield served
        assert served.at_rest() and served.stop() == 0


@contextmanager
def held(served: Served, count: int = 1) -> Iterator[None]:
    """`count` requests that run or wait, until the context ends."""
    with ExitStack() as stack:
        for number in range(count):
            client = stack.enter_context(
                httpx.Client(base_url=served.url, timeout=300, verify=NO_TLS)
            )
            stack.enter_context(client.stream("POST", PATH, json=LONG))
            core = {"running": 1, "waiting": number}
            eventually(
                lambda core=core: core.items() <= served.ledger()["engines"][0].items(),
                within_s=5,
            )
        yield
    eventually(served.at_rest, within_s=5)


def test_a_waiting_stream_gets_its_headers_and_comments_and_then_its_events(narrow: Served) -> None:
    with ExitStack() as busy:
        busy.enter_context(held(narrow))
        with httpx.stream(
            "POST", narrow.url + PATH, json=SHORT, timeout=300, verify=NO_TLS
        ) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
            busy.close()
            rest = [line for line in lines if line and line != ": ping"]
    assert rest[0].startswith("data: {") and rest[-1] == "data: [DONE]"


def test_the_client_sees_the_events_behind_comments_and_a_late_failure(narrow: Served) -> None:
    with openai_client(narrow.url) as client:
        with ExitStack() as busy:
            busy.enter_context(held(narrow))
            stream = client.completions.create(
                model="tiny-0.01", prompt="fox", max_tokens=2, stream=True
            )
            busy.close()
            assert [part.choices[0].finish_reason for part in stream][-1] == "length"
        with held(narrow):
            with pytest.raises(
                openai.APIError
            ) as caught:  # before its headers where they took as long
                list(
                    client.completions.create(
                        model="tiny-0.01", prompt="fox", stream=True, extra_body={"timeout_s": 0.5}
                    )
                )
            assert caught.value.code in LATE.values()


@pytest.mark.parametrize("by", ["field", "header", "both"])
def test_a_deadline_ends_a_waiting_request_in_its_time(narrow: Served, by: str) -> None:
    body: dict[str, Any] = {**SHORT, "stream": False}
    body |= {} if by == "header" else {"timeout_s": 0.4 if by == "field" else 30}
    headers = {} if by == "field" else {"X-Request-Timeout-S": "0.4"}
    with held(narrow):
        watch = Stopwatch()
        answer = narrow.post(PATH, body, **headers)
        undisturbed_s = watch.undisturbed_s
    assert answer.json()["error"]["code"] == LATE[answer.status_code]
    assert answer.headers["x-should-retry"] == ("false" if answer.status_code == 504 else "true")
    # As soon as it can no longer be done in time: its own steps before the deadline, however long those take here.
    assert undisturbed_s < 1.5


def test_a_deadline_ends_a_beam_search_in_its_time(narrow: Served) -> None:
    beams = {"use_beam_search": True, "n": 1, "temperature": 0, "max_tokens": 500}
    watch = Stopwatch()
    answer = narrow.post(PATH, {"prompt": "fox", "timeout_s": 0.4, **beams})
    assert watch.undisturbed_s < 3
    assert answer.json()["error"]["code"] == LATE[answer.status_code]


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf", "1e9"])
def test_a_deadline_header_that_is_none_is_refused_by_name(narrow: Served, given: str) -> None:
    refused = narrow.post(PATH, SHORT, **{"X-Request-Timeout-S": given})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-request-timeout-s"


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_more_than_may_wait_is_refused_at_once_with_retry_after(
    narrow: Served, stream: bool
) -> None:
    with held(narrow, 3):
        watch = Stopwatch()
        refused = narrow.post(PATH, {**SHORT, "stream": stream})
        assert watch.undisturbed_s < 1
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "server_overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-should-retry"] == "true"


def test_prompt_tokens_that_wait_are_bounded_too(model: Path) -> None:
    limits = (
        *("--max-running", "1", "--max-queued-tokens", "100"),
        *("--ping-interval-s", "0.1"),
    )
    sixty = {**SHORT, "prompt": [5] * 60}
    with (
        serving(model, *limits, step_s=0.01) as served,
        held(served),
        httpx.stream("POST", served.url + PATH, json=sixty, timeout=300, verify=NO_TLS) as first,
    ):
        assert first.status_code == 200  # from its API process; the core has it a moment later
        eventually(lambda: served.ledger()["engines"][0]["waiting"] == 1, within_s=5)
        refused = served.post(PATH, sixty)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert "100" in refused.json()["error"]["message"]


def test_every_unready_probe_says_when_to_come_back(model: Path) -> None:
    with (
        serving(model, step_s=0.01) as served,
        httpx.stream("POST", served.url + PATH, json=LONG, timeout=300, verify=NO_TLS),
    ):
        served.process.terminate()
        eventually(lambda: served.get("/health/ready").status_code == 503, within_s=5)
        assert served.get("/health/ready").headers["retry-after"] == "1"
        refused = served.post(PATH, SHORT)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        served.process.terminate()
        served.process.wait(300)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions/batch"])
def test_many_prompts_wait_for_room_between_their_waves(narrow: Served, path: str) -> None:
    """Others fill the queue meanwhile: what was done for the first prompts is not thrown away."""
    some = 12
    body: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    if path == "/v1/completions":
        body["prompt"] = ["fox"] * some
    else:
        body["messages"] = [[{"role": "user", "content": "fox"}]] * some
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(narrow.post(path, body)))
    refused: list[int] = []

    def crowd() -> None:
        """Takes every place in the queue as it comes free."""
        while asking.is_alive():
            other = narrow.post("/v1/completions", {"prompt": "fox", "max_tokens": 3})
            refused.extend([1] if other.status_code == 503 else [])

    asking.start()
    eventually(lambda: narrow.ledger()["engines"][0]["running"] == 1, within_s=5)
    others = [threading.Thread(target=crowd) for _ in range(6)]
    for other in others:
        other.start()
    for thread in (*others, asking):
        thread.join()
    assert refused, "the queue was never full"
    assert answers[0].status_code == 200, answers[0].text
    assert len(answers[0].json()["choices"]) == some


def test_the_wait_between_waves_is_part_of_the_deadline(narrow: Served) -> None:
    body = {"prompt": ["fox"] * 3, "max_tokens": 1500, "ignore_eos": True, "timeout_s": 0.5}
    watch = Stopwatch()
    answer = narrow.post(PATH, body)
    assert answer.status_code in LATE and watch.undisturbed_s < 3
    eventually(narrow.at_rest, within_s=5)


@pytest.mark.slow
def test_streams_go_on_beside_256_prompts_of_1500_tokens(model: Path) -> None:
    """Reliability 1.17: what is wide has two steps of tokens with the engine, so that who comes meanwhile waits for
    these and not for all of it (such a request starved streams for a minute)."""
    prompts = [[5 + number % 200] * 1500 for number in range(256)]
    wide = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 0}
    answers: list[httpx.Response] = []
    most, finished = 0, 0

    with serving(model, "--max-running", "8", step_s=0.02) as served:

        def score() -> None:
            answers.append(httpx.post(served.url + PATH, json=wide, timeout=120, verify=NO_TLS))

        scoring = threading.Thread(target=score)
        scoring.start()
        eventually(lambda: served.ledger()["engines"][0]["running"] > 0, within_s=20)
        while scoring.is_alive():
            core = served.ledger()["engines"][0]
            most = max(most, core["running"] + core["waiting"])
            done = served.post(PATH, {**SHORT, "stream": False}).status_code == 200
            finished += done and scoring.is_alive()
        scoring.join()
        assert served.at_rest()
    (answer,) = answers
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 256
    assert most <= 2 * 8, "parts of one request with the engine"
    assert finished, "short ones that were answered before it"
