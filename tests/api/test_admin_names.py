"""Administration under the names that scripts for vLLM use, on the API's own port (contract 9)."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.front.server.administration.named import REFUSED
from tests.api.serving import NO_TLS, Served, eventually, serving
from tests.stopwatch import Stopwatch

KEY, ADMIN = "client-key-1", "admin-key-1"


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Served]:
    with serving(model, "--api-keys", KEY, "--admin-key", ADMIN) as served:
        yield served
        assert served.stop() == 0


@pytest.fixture
def admin(running: Served) -> Iterator[httpx.Client]:
    headers = {"x-api-key": ADMIN}
    with httpx.Client(base_url=running.url, headers=headers, timeout=300, verify=NO_TLS) as client:
        yield client


def said(served: Served) -> int:
    asked = {"prompt": "Once", "max_tokens": 2}
    return served.post("/v1/completions", asked, **{"x-api-key": KEY}).status_code


@pytest.mark.serial
@pytest.mark.parametrize("level", [0, 1, 2])
def test_asleep_requests_wait_until_it_wakes(
    running: Served, admin: httpx.Client, level: int
) -> None:
    told = admin.post(f"/sleep?level={level}&mode=wait").json()
    assert told == {"status": "sleeping", "level": level}
    assert admin.get("/is_sleeping").json() == {"is_sleeping": level > 0}
    assert admin.get("/is_paused").json() == {"is_paused": True}
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(said(running)))
    waiting.start()

    def num_waiting() -> Any:
        found = running.get("/v1/requests", **{"x-api-key": KEY}).json()
        return found["engines"][0]["waiting"]

    eventually(lambda: num_waiting() == 1, within_s=10)
    assert not answers
    watch = Stopwatch()
    probed = running.get("/health/generate", **{"x-api-key": KEY})
    assert probed.status_code == 503 and watch.undisturbed_s < 5
    assert probed.json() == {"status": "asleep" if level else "paused"}
    told = admin.post("/wake_up?tags=weights&tags=kv_cache").json()
    assert told["status"] == "awake"
    waiting.join(300)
    assert answers == [200]
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}


def test_waking_what_is_awake_changes_nothing(running: Served, admin: httpx.Client) -> None:
    """A script that wakes twice is not refused: it was told to pause an engine that served."""
    told = admin.post("/wake_up")
    assert told.status_code == 200, told.text
    assert told.json() == {"status": "awake", "tags": ["weights", "kv_cache"]}
    assert said(running) == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?mode=nap", "mode"),
        ("/wake_up?tags=brain", "tags"),
        ("/reset_prefix_cache?reset_running_requests=maybe", "reset_running_requests"),
    ],
)
def test_what_cannot_be_done_is_named_and_changes_nothing(
    running: Served, admin: httpx.Client, path: str, field: str
) -> None:
    answer = admin.post(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert said(running) == 200


def test_resets_and_facts(running: Served, admin: httpx.Client) -> None:
    for path in ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"):
        assert admin.post(path).json() == {"success": True}
    info = admin.get("/server_info")
    assert info.json()["version"] and "engine" in info.json()["config"]
    assert KEY not in info.text and ADMIN not in info.text, "P29"


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profiling_is_off_unless_a_folder_is_named(admin: httpx.Client, path: str) -> None:
    refused = admin.post(path)
    assert refused.status_code == 403 and "--profile-dir" in refused.text


@pytest.fixture(scope="module")
def slow(model: Path) -> Iterator[Served]:
    """Steps of 20 ms, two API processes."""
    keys = ("--api-keys", f"{KEY},other-key-1", "--admin-key", ADMIN, "--api-servers", "2")
    with serving(model, *keys, step_s=0.02) as served:
        yield served
        assert served.stop() == 0


def asked(served: Served, tokens: int, key: str = KEY) -> dict[str, Any]:
    body = {"prompt": "Once", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = served.post("/v1/completions", body, **{"x-api-key": key})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def figures(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = served.get("/v1/requests", **{"x-api-key": KEY}).json()["engines"][0]
    return found


def as_admin(served: Served, path: str, document: object = None) -> httpx.Response:
    return served.post(path, document, **{"x-api-key": ADMIN})


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/sleep?level=1&mode=keep", "/pause?mode=keep"])
def test_what_is_frozen_goes_on_with_the_same_tokens(slow: Served, path: str) -> None:
    """A request that had begun outlives the loss of its KV blocks; its answer is that of one which kept them."""
    undisturbed = asked(slow, 150)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        frozen = pool.submit(asked, slow, 150)
        eventually(lambda: figures(slow)["running"] == 1, within_s=10)
        time.sleep(0.2)
        assert as_admin(slow, path).status_code == 200
        held = figures(slow)["held_blocks"]
        assert (held == 0) is ("sleep" in path) and not frozen.done()
        if "sleep" in path:
            first = as_admin(slow, "/wake_up?tags=weights").json()
            assert first == {"status": "sleeping", "tags": ["weights"]}
            assert slow.get("/is_sleeping", **{"x-api-key": ADMIN}).json() == {"is_sleeping": True}
            second = as_admin(slow, "/wake_up?tags=kv_cache").json()
            assert second == {"status": "awake", "tags": ["kv_cache"]}
        else:
            assert as_admin(slow, "/resume").status_code == 200
        assert frozen.result(300)["text"] == undisturbed["text"]


def test_asleep_with_begun_requests_a_pause_that_waits_for_them_is_a_conflict(slow: Served) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        frozen = pool.submit(asked, slow, 150)
        eventually(lambda: figures(slow)["running"] == 1, within_s=10)
        assert as_admin(slow, "/sleep?mode=keep").status_code == 200
        refused = as_admin(slow, "/pause?mode=wait")
        assert refused.status_code == 409 and "wake" in refused.text
        assert as_admin(slow, "/wake_up").json()["status"] == "awake"
        assert frozen.result(300)["finish_reason"] == "length"


@pytest.mark.slow
def test_running_requests_give_their_blocks_up_to_a_reset_and_say_the_same(slow: Served) -> None:
    undisturbed = asked(slow, 150)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(asked, slow, 150)
        eventually(lambda: figures(slow)["running"] == 1, within_s=10)
        before = figures(slow)["preemptions"]
        done = as_admin(slow, "/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        assert done.json() == {"success": True}
        assert running.result(300)["text"] == undisturbed["text"]
    assert figures(slow)["preemptions"] == before + 1


def test_requests_are_aborted_by_id_and_only_by_their_own_key(slow: Served) -> None:
    """P6: whoever rendered a request can end it; another key cannot, an administrator can end all."""
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 400, "ignore_eos": True}}
    ids = ["gen-" + digit * 32 for digit in "ab"]

    def generate(ident: str) -> str:
        found = slow.post(
            "/inference/v1/generate", {**body, "request_id": ident}, **{"x-api-key": KEY}
        )
        reason: str = found.json()["choices"][0]["finish_reason"]
        return reason

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(generate, ident) for ident in ids]
        eventually(lambda: figures(slow)["running"] == 2, within_s=10)
        path, scoring_input = "/inference/v1/abort_requests", {"request_ids": [ids[0]]}
        for _ in range(4):
            strange = slow.post(path, scoring_input, **{"x-api-key": "other-key-1"})
            assert strange.json() == {"status": "aborted", "aborted": 0}
        assert slow.post(path, scoring_input, **{"x-api-key": KEY}).json()["aborted"] == 1
        assert first.result(300) == "abort" and not second.done()
        assert as_admin(slow, "/abort_requests", {"all": True}).json()["aborted"] == 1
        assert second.result(300) == "abort"
    for wrong in (
        {},
        {"all": True, "request_ids": ["x"]},
        {"request_ids": "x"},
        {"request_ids": []},
    ):
        assert as_admin(slow, "/abort_requests", wrong).status_code == 400
    assert slow.post(path, {"all": True}, **{"x-api-key": KEY}).status_code == 400


@pytest.mark.parametrize("path", REFUSED)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_built_is_refused_in_words_by_admin_key_only(
    running: Served, admin: httpx.Client, path: str, method: str
) -> None:
    refused = admin.request(method, path)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "unsupported_feature")
    assert (
        error["message"].startswith(path.lstrip("/"))
        and refused.headers["x-should-retry"] == "false"
    )
    assert running.get(path).status_code == 401
    assert running.get(path, **{"x-api-key": KEY}).status_code == 403


def test_only_named_calls_reach_the_cores(running: Served, admin: httpx.Client) -> None:
    """P3, P28: nothing that a client names is looked up anywhere but in the list."""
    done = admin.post("/collective_rpc", json={"method": "reset_prefix_cache"})
    assert done.json() == {"results": [{"reset": True}]}
    for strange in ("reload", "drain", "os.system", "__class__", "sleep"):
        refused = admin.post("/collective_rpc", json={"method": strange})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "method"
    wrong = admin.post("/collective_rpc", json={"method": "status", "args": [1]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "args"
    assert admin.get("/get_world_size").json() == {"world_size": 1}
    assert admin.post("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": False}
    assert admin.get("/kv_event_sources").json() == {"sources": []}
    assert said(running) == 200
