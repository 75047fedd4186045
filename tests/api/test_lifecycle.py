"""Start, drain, crash and restart of the real process tree (reliability 1.3-1.6, ENG-15, ENG-16, REG-111, BEY-11)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.api.serving import (
    NO_TLS,
    Served,
    eventually,
    launch,
    serving,
    slowed,
    still_alive,
)
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.serial

STREAM = {"prompt": "fox", "stream": True, "max_tokens": 60, "min_tokens": 60}


class Reader:
    """A stream read in a thread; `done` once it has ended, on whatever path."""

    def __init__(self, served: Served, **changes: object) -> None:
        self.text = ""
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.done = threading.Event()
        self._ask = (served.url + "/v1/completions", {**STREAM, **changes})
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        url, body = self._ask
        try:
            with httpx.stream("POST", url, json=body, timeout=300, verify=NO_TLS) as response:
                for text in response.iter_text():
                    self.text += text
                    self.begun.set()
        except httpx.HTTPError as error:
            self.error = error
        self.done.set()

    def join(self) -> None:
        self._thread.join(300)
        assert self.done.is_set(), "the stream hangs"

    @property
    def events(self) -> list[dict[str, Any]]:
        found = [e.removeprefix("data: ") for e in self.text.split("\n\n") if e]
        return [json.loads(event) for event in found if event != "[DONE]"]

    @property
    def whole(self) -> bool:
        """A normal end with a finish reason."""
        last = self.events[-1]
        return "error" not in last and last["choices"][0]["finish_reason"] == "length"

    @property
    def failed_cleanly(self) -> bool:
        """An explicit error event, then the end mark."""
        return "error" in self.events[-1] and self.text.endswith("data: [DONE]\n\n")


def begun(served: Served, count: int, **changes: object) -> list[Reader]:
    readers = [Reader(served, **changes) for _ in range(count)]
    for reader in readers:
        assert reader.begun.wait(300)
    return readers


def test_a_drain_lets_running_requests_finish_and_refuses_new_ones(model: Path) -> None:
    """REG-020."""
    with serving(model, "--shutdown-timeout-s", "60", step_s=0.02) as served:
        readers = begun(served, 8, max_tokens=200, min_tokens=200)
        with httpx.Client(base_url=served.url, timeout=300, verify=NO_TLS) as kept:
            assert kept.get("/health/ready").status_code == 200
            served.process.send_signal(signal.SIGTERM)
            eventually(lambda: kept.get("/health/ready").status_code == 503, within_s=1)
            refused = served.post("/v1/completions", {"prompt": "x"})
            assert refused.status_code == 503
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-should-retry"] == "true"
            assert served.get("/health/live").status_code == 200
        for reader in readers:
            reader.join()
        assert all(reader.whole for reader in readers)
        assert served.stop() == 0


@pytest.mark.slow
def test_before_the_drain_new_requests_are_still_taken(model: Path) -> None:
    """1.3: load balancers notice first."""
    with serving(model, "--pre-drain-s", "3", step_s=0.005) as served:
        served.process.send_signal(signal.SIGTERM)
        eventually(lambda: served.get("/health/ready").status_code == 503, within_s=1)
        taken = served.post("/v1/completions", {"prompt": "x", "max_tokens": 4})
        assert taken.status_code == 200 and taken.json()["usage"]["completion_tokens"] == 4
        assert served.process.wait(300) == 0


@pytest.mark.parametrize("timeout_s", [pytest.param("0", marks=pytest.mark.slow), "0.5"])
def test_what_does_not_finish_in_time_ends_with_an_error_event(model: Path, timeout_s: str) -> None:
    with serving(model, "--shutdown-timeout-s", timeout_s, step_s=0.05) as served:
        readers = begun(served, 3, max_tokens=1000)
        assert served.stop() == 0
        for reader in readers:
            reader.join()
        assert all(reader.failed_cleanly for reader in readers)
        assert readers[0].events[-1]["error"]["type"] == "service_unavailable"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="drain"),
        pytest.param(("--pre-drain-s", "60"), id="before it", marks=pytest.mark.slow),
    ],
)
def test_a_second_signal_ends_every_stream_with_an_error_event(
    model: Path, options: tuple[str, ...]
) -> None:
    """REG-020: at once, and no connection is reset."""
    more = ("--shutdown-timeout-s", "60", "--api-servers", "2", *options)
    with serving(model, *more, step_s=0.05) as served:
        readers = begun(served, 6, max_tokens=1500)
        served.process.send_signal(signal.SIGINT)
        eventually(lambda: served.get("/health/ready").status_code == 503, within_s=2)
        watch = Stopwatch()
        assert served.stop(signal.SIGINT) == 0
        assert watch.undisturbed_s < 3
        for reader in readers:
            reader.join()
        assert all(reader.error is None and reader.failed_cleanly for reader in readers)


@pytest.mark.slow
def test_a_stopped_api_process_is_replaced_within_a_second(model: Path) -> None:
    """What it served ends with an error event, what the other serves goes on."""
    with serving(model, "--api-servers", "2", step_s=0.02) as served:
        readers = begun(served, 8, max_tokens=250, min_tokens=250)
        victim = max(served.api_processes, key=lambda p: len(p.net_connections("inet")))
        since_stop = Stopwatch()
        victim.suspend()
        eventually(lambda: not victim.is_running(), within_s=1)
        assert since_stop.undisturbed_s < 1
        for reader in readers:
            reader.join()
        assert all(reader.error is None for reader in readers)
        assert all(reader.whole or reader.failed_cleanly for reader in readers)
        assert any(reader.failed_cleanly for reader in readers)
        eventually(lambda: len(served.api_processes) == 2, within_s=3)
        eventually(served.at_rest, within_s=1)
        assert served.stop() == 0


@pytest.mark.slow
def test_what_a_stopped_core_ran_ends_with_an_error_event_within_a_second(model: Path) -> None:
    with serving(model, step_s=0.02) as served:
        readers = begun(served, 3, max_tokens=1000)
        (core,) = served.cores
        since_stop = Stopwatch()
        core.suspend()
        for reader in readers:
            reader.join()
        assert since_stop.undisturbed_s < 1
        assert all(reader.failed_cleanly for reader in readers)
        eventually(lambda: served.get("/health/ready").status_code == 200, within_s=5)
        assert served.stop() == 0


@pytest.mark.slow
def test_an_emptied_runtime_folder_is_filled_again(model: Path) -> None:
    """By those who clean temporary folders: what runs goes on, and what dies later is replaced."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # as sockets need
        check_emptied(model, Path(short) / "r")


def check_emptied(model: Path, runtime: Path) -> None:
    with serving(
        model, "--api-servers", "2", step_s=0.02, HEADRACE_RUNTIME_DIR=str(runtime)
    ) as served:
        (folder,) = runtime.iterdir()
        names = {path.name for path in folder.iterdir()}
        readers = begun(served, 4, max_tokens=100, min_tokens=100)
        shutil.rmtree(folder)
        expected = names - {"sealing-secret"}
        eventually(lambda: expected <= {path.name for path in folder.glob("*")}, within_s=3)
        assert folder.stat().st_mode & 0o077 == 0
        for reader in readers:
            reader.join()
        assert all(reader.whole for reader in readers)
        for victim in (*served.api_processes, *served.cores):
            victim.kill()
        eventually(lambda: len(served.api_processes) == 2, within_s=5)

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return served.post("/v1/completions", {"prompt": "x"}).status_code == 200
            return False

        eventually(answers, within_s=10)
        assert served.stop() == 0
    assert not list(runtime.iterdir())


@pytest.mark.slow
def test_a_signal_to_the_whole_group_drains_too(model: Path) -> None:
    with serving(model, "--shutdown-timeout-s", "20", step_s=0.02) as served:
        readers = begun(served, 2)
        os.killpg(served.process.pid, signal.SIGTERM)
        for reader in readers:
            reader.join()
        assert all(reader.whole for reader in readers)
        assert served.process.wait(300) == 0


def test_a_killed_core_fails_its_requests_at_once_and_is_restarted(model: Path) -> None:
    with serving(model, step_s=0.05) as served:
        readers = begun(served, 4, max_tokens=1000)
        plain: list[httpx.Response] = []
        body = {"prompt": "x", "max_tokens": 1000, "min_tokens": 1000}
        waiting = threading.Thread(
            target=lambda: plain.append(served.post("/v1/completions", body))
        )
        waiting.start()
        eventually(lambda: served.ledger()["engines"][0]["running"] == 5, within_s=5)
        (core,) = served.cores
        since_kill = Stopwatch()
        core.kill()
        for reader in readers:
            reader.join()
        waiting.join()
        assert since_kill.undisturbed_s < 1
        assert all(reader.failed_cleanly for reader in readers)
        assert readers[0].events[-1]["error"]["code"] == "engine_dead"
        assert plain[0].status_code == 500 and plain[0].headers["x-should-retry"] == "true"
        eventually(lambda: served.get("/health/ready").status_code == 200, within_s=5)
        assert served.post("/v1/completions", {"prompt": "x"}).status_code == 200
        assert served.cores[0].pid != core.pid
        assert served.stop() == 0


@pytest.mark.slow
def test_a_killed_api_process_takes_only_its_own_requests_along(model: Path) -> None:
    with serving(model, "--api-servers", "2", step_s=0.02) as served:
        readers = begun(served, 8, max_tokens=150, min_tokens=150)
        victim = max(served.api_processes, key=lambda p: len(p.net_connections("inet")))
        others = [p for p in served.api_processes if p.pid != victim.pid]
        since_kill = Stopwatch()
        victim.kill()
        eventually(lambda: any(reader.done.is_set() for reader in readers), within_s=1)
        ended_after_s = since_kill.undisturbed_s
        for reader in readers:
            reader.join()
        assert ended_after_s < 1
        assert all(reader.whole or reader.failed_cleanly for reader in readers)
        assert any(reader.failed_cleanly for reader in readers)
        eventually(served.at_rest, within_s=1)
        eventually(lambda: len(served.api_processes) == 2, within_s=3)
        assert others[0].is_running()
        lines = served.get("/metrics").text.splitlines()
        (gauge,) = [line for line in lines if line.startswith("headrace_http_requests_in_flight")]
        assert float(gauge.split()[-1]) == 1, "only the scrape itself is in flight"
        assert served.stop() == 0


@pytest.mark.slow
def test_a_crash_loop_ends_the_server_with_a_failure(model: Path) -> None:
    """REG-110."""
    with serving(model) as served:
        seen: set[int] = set()

        def kill_the_next() -> bool:
            for core in served.cores:
                if core.pid not in seen:
                    seen.add(core.pid)
                    core.kill()
            return served.process.poll() is not None

        eventually(kill_the_next, within_s=25)
        assert served.process.returncode == 1
        assert len(seen) == 6
        eventually(lambda: any("giving up" in line for line in served.lines), within_s=2)


def test_children_die_with_a_killed_supervisor(model: Path) -> None:
    """The last to go is the one that ends the streams with an error event."""
    with serving(model, step_s=0.02) as served:
        readers = begun(served, 2, max_tokens=1000)
        children = served.children
        assert len(children) >= 3
        served.process.kill()
        served.process.wait()
        assert not still_alive(children, within_s=3)
        for reader in readers:
            reader.join()
        assert all(reader.failed_cleanly for reader in readers)


@pytest.mark.slow
def test_a_stopped_core_turns_health_red_and_is_replaced(model: Path) -> None:
    with serving(model) as served:
        assert served.get("/health").status_code == 200
        (core,) = served.cores
        core.suspend()
        eventually(lambda: served.get("/health").status_code == 503, within_s=8)
        assert served.get("/health/live").status_code == 200
        assert served.get("/metrics").status_code == 200
        eventually(lambda: served.get("/health").status_code == 200, within_s=12)
        assert served.cores[0].pid != core.pid
        assert served.stop() == 0


@pytest.mark.slow
def test_a_long_step_keeps_health_green_and_is_not_disturbed(model: Path) -> None:
    with serving(model, step_s=6.0) as served:  # longer than a silence that kills
        (core,) = served.cores
        answers: list[int] = []
        asked = {"prompt": "x", "max_tokens": 1}
        asking = threading.Thread(
            target=lambda: answers.append(served.post("/v1/completions", asked).status_code)
        )
        asking.start()
        while asking.is_alive():
            asking.join(0.2)
            assert served.get("/health").status_code == 200
        assert answers == [200] and served.cores == [core]


@pytest.mark.slow
def test_a_hung_step_is_dumped_and_the_core_restarted(model: Path) -> None:
    with serving(model, "--step-timeout-s", "0.5", step_s=3.0) as served:
        answer = served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_dead"
        eventually(lambda: served.get("/health").status_code == 200, within_s=5)
        eventually(lambda: any("thread 0x" in line.lower() for line in served.lines), within_s=2)
        assert served.stop() == 0


@pytest.fixture(scope="module")
def twice(model: Path) -> Iterator[Served]:
    """Two API processes before two cores."""
    options = ("--api-servers", "2", "--admin-key", "root", "--replicas", "2")
    with serving(model, *options, step_s=0.01) as served:
        yield served
        assert served.stop() == 0


@pytest.mark.slow
def test_a_pause_through_one_api_process_is_seen_through_the_other(twice: Served) -> None:
    served, admin = twice, {"x-api-key": "root"}

    def ask(method: str, path: str) -> tuple[str, Any]:
        with httpx.Client(base_url=served.url, headers=admin, timeout=300, verify=NO_TLS) as client:
            return str(client.get("/v1/requests").status_code), client.request(method, path).json()

    assert served.post("/pause?mode=keep", {}, **admin).json() == {
        "status": "paused",
        "mode": "keep",
    }
    answers = {json.dumps(ask("GET", "/is_paused")[1]) for _ in range(12)}
    assert answers == {'{"is_paused": true}'}
    held = Reader(served, max_tokens=5, min_tokens=5)
    assert not held.begun.wait(0.3), "a request during a pause is held"
    assert served.post("/resume", {}, **admin).status_code == 200
    held.join()
    assert held.whole
    assert ask("GET", "/is_paused")[1] == {"is_paused": False}
    assert served.post("/pause?mode=nap", {}, **admin).status_code == 400
    assert served.post("/reset_prefix_cache", {}, **admin).json() == {"success": True}


@pytest.mark.slow
def test_metrics_of_several_api_processes_are_merged(twice: Served) -> None:
    def generated() -> float:
        lines = twice.get("/metrics").text.splitlines()
        total = [line for line in lines if line.startswith("headrace_generation_tokens_total")]
        return sum(float(line.split()[-1]) for line in total)

    before = generated()
    for _ in range(10):
        twice.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert generated() == before + 30.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "--api-keys"),
        (("--kv-blocks", "10", "--max-model-len", "1024"), "65 blocks"),
        pytest.param(("--max-model-len", "5000"), "2048", marks=pytest.mark.slow),
        pytest.param(("--device", "cuda"), "CUDA", marks=pytest.mark.slow),
        pytest.param(("--admin-key", "k", "--api-keys", "k"), "differ", marks=pytest.mark.slow),
        pytest.param(
            ("--tensor-parallel", "2", "--executor", "inline"), "inline", marks=pytest.mark.slow
        ),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(
    model: Path, options: tuple[str, ...], said: str
) -> None:
    served = launch(model, *options)
    try:
        assert served.process.wait(300) == 2
    finally:
        served.close()
    (line,) = [line for line in served.lines if line.startswith("headrace: ")]
    assert said in line and not any("Traceback" in line for line in served.lines)


def test_a_taken_port_is_said_so(model: Path, server: Served) -> None:
    served = launch(model, "--port", str(server.port))
    try:
        assert served.process.wait(300) == 2
    finally:
        served.close()
    assert any("cannot listen" in line for line in served.lines)


def test_a_core_that_dies_while_starting_ends_the_server(model: Path) -> None:
    broken = slowed(model, 0.5)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "null_step_s": "soon"}))
    served = launch(broken)
    try:
        assert served.process.wait(300) == 1
    finally:
        served.close()
    (line,) = [line for line in served.lines if line.startswith("headrace: ")]
    assert "engine core 0 died while starting" in line


def test_start_prints_decisions_memory_and_time_once(server: Served) -> None:
    eventually(lambda: any("is ready" in line for line in server.lines), within_s=1)
    for start in ("Decisions", "memory: ", "start: "):
        assert sum(line.startswith(start) for line in server.lines) == 1


def test_the_supervisor_and_the_api_processes_never_load_torch(server: Served) -> None:
    for process in [psutil.Process(server.process.pid), *server.api_processes]:
        assert not any("libtorch" in entry.path for entry in process.memory_maps())
