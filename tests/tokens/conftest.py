from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.api.serving import Served, serving
from tests.stopwatch import Stopwatch

_READY = re.compile(r"headrace is ready: (\S+) ")
_GRPC = re.compile(r"headrace serves gRPC: (\S+)")


@pytest.fixture(scope="session")
def bundled() -> Iterator[Served]:
    """The real server with the bundled model."""
    with serving(None, "--tokenizer-info") as served:
        yield served
        assert served.at_rest()
        assert served.stop() == 0


@dataclass
class Renderer:
    """A running `headrace render`."""

    process: subprocess.Popen[str]
    url: str
    grpc: str
    ready_s: float


@pytest.fixture(scope="session")
def renderer() -> Iterator[Renderer]:
    command = [*(sys.executable, "-m", "headrace", "render"), *("--port", "0", "--grpc-port", "0")]
    watch = Stopwatch()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert process.stdout is not None
    with process.stdout as lines:
        grpc = _GRPC.match(lines.readline())
        ready = _READY.match(lines.readline())
        assert grpc and ready
        yield Renderer(process, ready[1], grpc[1], watch.undisturbed_s)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
