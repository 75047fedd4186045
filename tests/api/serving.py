"""A real `headrace serve` process tree for tests: started, asked over sockets, stopped; every process accounted for."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from headrace.launch.topology import PR_SET_PDEATHSIG
from tests.stopwatch import Stopwatch

READY = re.compile(r"headrace is ready: (https?://\S+)")
LIBC = ctypes.CDLL(None)
START_S = 600.0
PATIENCE_S = 240.0
"""How much longer a machine that is busy with other work may take before a test gives up."""
# Nothing here speaks TLS. Without this each request of httpx reads all root certificates: 45 ms of CPU time, which
# would be most of what a test of waiting times measures.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Served:
    """A running server. `lines` collects what it printed, both streams."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := READY.search(line):
                self._found.put(found[1])
        self._found.put(None)

    def wait_ready(self) -> None:
        """Returns when the server has said that it is ready, and knows its address."""
        url = self._found.get(timeout=START_S)
        assert url is not None, f"the server ended: {''.join(self.lines)}"
        self.url = url
        self.port = int(url.rpartition(":")[2])

    @property
    def children(self) -> list[psutil.Process]:
        """The processes below the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def named(self, module: str) -> list[psutil.Process]:
        """Children that run this module."""
        found = []
        for child in self.children:
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(module in word for word in child.cmdline()):
                    found.append(child)
        return found

    @property
    def cores(self) -> list[psutil.Process]:
        """The engine cores."""
        return self.named("headrace.launch.core_process")

    @property
    def api_processes(self) -> list[psutil.Process]:
        """The API processes."""
        return self.named("headrace.front.server.process")

    def get(self, path: str, **headers: str) -> httpx.Response:
        """A GET on a connection of its own."""
        return httpx.get(self.url + path, headers=headers, timeout=300, verify=NO_TLS)

    def post(self, path: str, document: object, **headers: str) -> httpx.Response:
        """A POST on a connection of its own; what is refused for the machine's load alone is asked again."""
        url = self.url + path
        while True:
            answer = httpx.post(url, json=document, headers=headers, timeout=300, verify=NO_TLS)
            if answer.status_code != 503 or "the machine is too busy" not in answer.text:
                return answer
            time.sleep(1)

    def ledger(self) -> dict[str, Any]:
        """GET /v1/requests."""
        found: dict[str, Any] = self.get("/v1/requests").json()
        return found

    def at_rest(self) -> bool:
        """Whether the first core holds nothing. An API process that has just begun may not have heard of it yet."""
        if not (engines := self.ledger().get("engines")):
            return False
        core = engines[0]
        return (
            core["running"] == 0
            and core["waiting"] == 0
            and core["held_blocks"] == 0
            and core["refcount_sum"] == 0
            and core["held_by_hooks"] == 0
        )

    def stop(self, number: int = signal.SIGTERM, *, timeout_s: float = 300) -> int:
        """Signals the supervisor and waits; the exit status. No child may be left."""
        children = self.children if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        alive = still_alive(children, within_s=5)
        assert not alive, f"orphans: {alive}"
        self.close()
        return status

    def close(self) -> None:
        """Ends everything, whatever state it is in."""
        if self.process.poll() is None:
            children = self.children
            self.process.kill()
            self.process.wait()
            still_alive(children, within_s=5)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def end_with_tests() -> None:
    """For a process that begins: it ends when the thread that starts it does, so with tests that are killed."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def launch(model: Path, *options: str, step_s: float = 0.0, **environment: str) -> Served:
    """Starts a server over the null executor; `step_s` is the simulated time of a step."""
    if step_s:
        model = slowed(model, step_s)
    null = ("--load-format", "dummy", "--executor", "null")
    return _started(str(model), *null, *options, **environment)


def _started(*words: str, **more: str) -> Served:
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "--port", "0", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **more}
    return Served(
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_tests,
        )
    )


@contextlib.contextmanager
def serving(
    model: Path | None, *options: str, step_s: float = 0.0, **environment: str
) -> Iterator[Served]:
    """A ready server for the length of the context: over the null executor, or (None) with the bundled model."""
    if model is None:
        served = _started(*options, **environment)
    else:
        served = launch(model, *options, step_s=step_s, **environment)
    try:
        served.wait_ready()
        yield served
    finally:
        served.close()


def slowed(model: Path, step_s: float) -> Path:
    """A copy of the model folder whose steps take `step_s` on the null executor."""
    copy = model.parent / f"{model.name}-{step_s:g}"
    copy.mkdir(exist_ok=True)
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "null_step_s": step_s}))
    return copy


def still_alive(processes: list[psutil.Process], *, within_s: float) -> list[psutil.Process]:
    """Those that have not ended by then. One that has, and only waits for its status to be read, has ended: once its
    parent is gone, that is the business of the machine's first process, which may take seconds or never do it."""
    watch = Stopwatch()
    alive = [process for process in processes if _runs(process)]
    while alive and watch.undisturbed_s < within_s and watch.wall_s < within_s + PATIENCE_S:
        time.sleep(0.01)
        alive = [process for process in alive if _runs(process)]
    return alive


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def eventually(check: Callable[[], bool], *, within_s: float) -> float:
    """Waits until `check` holds; the seconds it took on a machine that does nothing else. Fails when they are over."""
    watch = Stopwatch()
    while not check():
        late = watch.undisturbed_s >= within_s or watch.wall_s >= within_s + PATIENCE_S
        assert not late, f"not within {within_s} s"
        time.sleep(0.005)
    return watch.undisturbed_s
