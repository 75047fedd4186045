"""`bench startup`: a fresh server each time; seconds until it is ready and until the first token
has arrived."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from headrace.base import env
from headrace.base.errors import StartError


def free_port() -> int:
    """A port nobody listens on at this moment, of those that the system gives nobody who lets it
    choose."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def wait_ready(base: str, process: subprocess.Popen[bytes], end: float) -> None:
    """Returns once /health/ready answers 200; StartError if the process ends or `end`
    (perf_counter) passes before."""
    while time.perf_counter() < end:
        if process.poll() is not None:
            raise StartError(
                f"headrace serve ended with status {process.returncode} before it was ready"
            )
        try:
            with urllib.request.urlopen(base + "/health/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.01)
    raise StartError("headrace serve was not ready in time")


def _first_token(base: str) -> None:
    body = json.dumps(
        {"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    ).encode()
    request = urllib.request.Request(
        base + "/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        json.load(response)


def start_once(arguments: Sequence[str], *, timeout_s: float) -> tuple[float, float]:
    """Starts `headrace serve ARGUMENTS`; seconds until ready and until the first token, both since
    the start."""
    port = free_port()
    command = [
        *env.python_command(),
        "-m",
        "headrace",
        "serve",
        *arguments,
        "--port",
        str(port),
        "--log-level",
        "error",
    ]
    begin = time.perf_counter()
    # Its table of decisions is not what was asked for; why it failed to start is.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    stderr_chunks: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(process.stderr, stderr_chunks), daemon=True)
    reader.start()
    try:
        base = f"http://127.0.0.1:{port}"
        wait_ready(base, process, begin + timeout_s)
        ready = time.perf_counter() - begin
        _first_token(base)
        return ready, time.perf_counter() - begin
    except StartError:
        reader.join(1)
        sys.stderr.write(b"".join(stderr_chunks).decode(errors="replace"))
        raise
    finally:
        process.terminate()
        process.wait(30)


def _drain(stream: IO[bytes] | None, stderr_chunks: list[bytes]) -> None:
    assert stream is not None
    with stream:
        stderr_chunks.extend(stream)


def startup(
    arguments: Sequence[str], *, iterations: int, timeout_s: float = 600.0
) -> dict[str, Any]:
    """Starts the server `iterations` times; the first is shown apart, since it may read from a cold
    disk."""
    runs = [start_once(arguments, timeout_s=timeout_s) for _ in range(iterations)]
    ready, first = np.array([r[0] for r in runs]), np.array([r[1] for r in runs])
    warm = slice(1, None) if iterations > 1 else slice(None)
    return {
        "iterations": iterations,
        "first_run_ready_s": float(ready[0]),
        "ready_s": float(np.median(ready[warm])),
        "first_token_s": float(np.median(first[warm])),
    }
