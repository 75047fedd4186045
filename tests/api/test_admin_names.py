"""Administration under the names that scripts for vLLM use, on the API's own port (contract 9)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import NO_TLS, Served, eventually, serving

KEY, ADMIN = "client-key-1", "admin-key-1"


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Served]:
    with serving(model, "--api-keys", KEY, "--admin-key", ADMIN) as served:
        yield served
        assert served.stop() == 0


@pytest.fixture
def admin(running: Served) -> Iterator[httpx.Client]:
    headers = {"x-api-key": ADMIN}
    with httpx.Client(base_url=running.url, headers=headers, timeout=20, verify=NO_TLS) as client:
        yield client


def said(served: Served) -> int:
    asked = {"prompt": "Once", "max_tokens": 2}
    return served.post("/v1/completions", asked, **{"x-api-key": KEY}).status_code


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
    told = admin.post("/wake_up?tags=weights&tags=kv_cache").json()
    assert told["status"] == "awake"
    waiting.join(20)
    assert answers == [200]
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?mode=nap", "mode"),
        ("/sleep?level=1&mode=keep", "mode"),
        ("/wake_up?tags=weights", "tags"),
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
