"""PAR-06, PAR-07: engine cores come and go while a server runs; requests are answered alike meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import NO_TLS, Served, eventually, serving

pytestmark = pytest.mark.slow
ADMIN = "admin-key-1"
ASKED = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Served]:
    bounds = ("--replicas", "2", "--max-replicas", "4")
    with serving(model, *bounds, "--admin-key", ADMIN, step_s=0.01) as served:
        yield served
        assert served.stop() == 0


@pytest.fixture
def admin(running: Served) -> Iterator[httpx.Client]:
    headers = {"x-api-key": ADMIN}
    with httpx.Client(base_url=running.url, headers=headers, timeout=300, verify=NO_TLS) as client:
        yield client


def scaled(admin: httpx.Client, count: Any, **more: Any) -> httpx.Response:
    return admin.post("/scale_elastic_ep", json={"new_data_parallel_size": count, **more})


def text_of(served: Served, **more: Any) -> str:
    answer = served.post("/v1/completions", {**ASKED, **more})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def has_cores(served: Served, count: int) -> bool:
    return len(served.cores) == count


def test_cores_come_and_go_under_traffic(running: Served, admin: httpx.Client) -> None:
    """2, 3, 2, 4, 2; nothing that was sent meanwhile is lost."""
    expected, stop = text_of(running), threading.Event()
    texts: list[str] = []

    def traffic() -> None:
        while not stop.is_set():
            texts.append(text_of(running))

    clients = [threading.Thread(target=traffic) for _ in range(3)]
    for client in clients:
        client.start()
    first = {core.pid for core in running.cores}
    for count in (3, 2, 4, 2):
        done = scaled(admin, count)
        assert done.json() == {"message": f"Scaled to {count} data parallel engines"}, done.text
        assert admin.get("/get_world_size").json() == {"world_size": count}
        assert running.get("/health").status_code == 200
        eventually(partial(has_cores, running, count), within_s=20)
    stop.set()
    for client in clients:
        client.join()
    assert len(texts) > 10 and set(texts) == {expected}
    assert {core.pid for core in running.cores} == first
    ended = [line for line in running.lines if "has ended (exit status" in line]
    assert len(ended) == 3 and all("exit status 0" in line for line in ended)


def test_what_cannot_be_asked_for(running: Served, admin: httpx.Client) -> None:
    for count in (1, 5):
        refused = scaled(admin, count)
        assert refused.status_code == 400, refused.text
        assert "2 (--replicas) to 4 (--max-replicas)" in refused.json()["error"]["message"]
    assert scaled(admin, "many").status_code == 400
    assert scaled(admin, 3, drain_timeout=-1).status_code == 400
    assert running.post("/scale_elastic_ep", {"new_data_parallel_size": 3}).status_code in (
        401,
        403,
    )
    assert admin.post("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": False}


def test_a_drain_that_takes_too_long_is_undone(running: Served, admin: httpx.Client) -> None:
    assert scaled(admin, 3).status_code == 200
    long: list[str] = []
    clients = [
        threading.Thread(
            target=lambda: long.append(text_of(running, max_tokens=200, ignore_eos=True))
        )
        for _ in range(6)
    ]
    for client in clients:
        client.start()

    def busy() -> bool:
        engines = admin.get("/v1/requests").json()["engines"]
        return len(engines) == 3 and all(engine["running"] for engine in engines)

    eventually(busy, within_s=20)
    late = scaled(admin, 2, drain_timeout=0.05)
    assert late.status_code == 408 and "nothing was changed" in late.json()["error"]["message"]
    assert len(running.cores) == 3
    assert scaled(admin, 2).status_code == 200, "it waits for what runs"
    for client in clients:
        client.join()
    assert len(long) == 6 and len(set(long)) == 1


def test_a_core_that_is_killed_is_there_again(running: Served, admin: httpx.Client) -> None:
    assert scaled(admin, 3).status_code == 200
    before = {core.pid for core in running.cores}
    newest = max(running.cores, key=lambda core: core.create_time())
    newest.kill()
    assert text_of(running)

    def there() -> bool:
        new = {core.pid for core in running.cores} - before
        return len(new) == 1 and admin.get("/get_world_size").json() == {"world_size": 3}

    eventually(there, within_s=20)
    assert scaled(admin, 2).status_code == 200
