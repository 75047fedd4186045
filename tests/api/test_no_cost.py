"""What is switched off costs nothing: a plain request runs the same lines of code as if the feature were not there.

Lines that run and not time: they are the same on every machine, and a feature that leaves a trace on the path of those
who do not use it is seen at once (OBS-01: no cost when off; API-21: off is free).
"""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMERS = ("front/client/connection.py", "launch/core_process.py")
"""Heartbeats and watchdogs go off when they want."""
Lines = dict[str, set[int]]


def lines_of(**options: dict[str, Any]) -> Lines:
    """File -> lines that a plain streamed chat runs on a server with these options."""
    words = ["-m", "benchmarks.path_lines", "--lines", "--options", json.dumps(options)]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: set(lines) for name, lines in found.items() if name not in TIMERS}


@pytest.fixture(scope="module")
def plain() -> Lines:
    return lines_of()


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes every span."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def traced() -> Iterator[Lines]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield lines_of(server={"otlp_endpoint": f"http://127.0.0.1:{server.server_port}/v1/traces"})
        server.shutdown()
        thread.join()


def test_without_tracing_no_line_of_it_runs(plain: Lines, traced: Lines) -> None:
    assert "front/server/tracing.py" in traced, "the measure sees it where it is on"
    assert "front/server/tracing.py" not in plain


def test_tracing_is_a_matter_of_requests_and_never_of_tokens_or_steps(
    plain: Lines, traced: Lines
) -> None:
    """On, it adds a few lines of the front where a request begins and ends. (The core knows nothing of it; which of its
    lines run depends on the moment.)"""
    more = {name: lines - plain.get(name, set()) for name, lines in traced.items()}
    more = {name: lines for name, lines in more.items() if lines and name.startswith("front/")}
    own = more.pop("front/server/tracing.py")
    allowed = {f"front/server/{name}.py" for name in ("app", "exchange", "measure", "process")}
    assert own and more.keys() <= allowed
    assert sum(map(len, more.values())) <= 10, more


def test_attention_capture_that_nobody_asks_for_runs_the_same_lines(plain: Lines) -> None:
    """API-21: a server that could capture does for a plain request what one that cannot does."""
    able = lines_of(model={"attention_capture": True})
    # Which lines overlap in time differs from run to run; what no plain run does would be in none of two of them.
    again = lines_of()
    more = {name: able[name] - plain.get(name, set()) - again.get(name, set()) for name in able}
    steps = {name: lines for name, lines in more.items() if name.startswith(("back/", "core/"))}
    assert len(steps) > 20 and not any(steps.values()), steps
    assert "back/runner/capture.py" not in plain.keys() | able.keys()
