"""Servers under the same load: 16 users, each one request of 256 tokens in and 128 out, greedy, streamed.

Both serve the same bf16 GGUF file, or headrace the shape with dummy weights where there is no file. Where there is no
llama-server (llama-cpp-python brings none, and its own server answers one request at a time), llama.cpp's engine alone
does the work of one: all prompts, then one batch per step, without HTTP and text, which flatters it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.cpu.sessions import Peers, Session
from benchmarks.cpu.sessions import commands as session_commands
from benchmarks.cpu.shapes import BUNDLED, Shape
from headrace.bench.serve import LoadSpec, run_load
from headrace.bench.startup import free_port

USERS, NUM_INPUT, NUM_OUTPUT = 16, 256, 128
LENGTH = 512
ALONE = "llama.cpp, engine alone"


def commands(peers: Peers, shape: Shape, port: int) -> dict[str, list[str]]:
    """Engine -> the command of its server."""
    file = peers.gguf(shape, "bf16")
    model = [str(shape.folder), "--load-format", "dummy"] if file is None else [str(file)]
    tokenizer = ["--tokenizer", str(BUNDLED)] if file is None else []
    ours = [sys.executable, "-m", "headrace", "serve", "--model", *model, *tokenizer]
    ours += ["--dtype", "bfloat16", "--max-model-len", str(LENGTH), "--no-prefix-caching"]
    ours += ["--threads", str(peers.threads), "--log-level", "error", "--port", str(port)]
    found = {"headrace": ours}
    if file is not None and peers.llama_server:
        found["llama-server"] = [
            peers.llama_server, "-m", str(file), "--threads", str(peers.threads), "--parallel", str(USERS),
            "--ctx-size", str(USERS * LENGTH), "--port", str(port), "--host", "127.0.0.1",
            "--cache-ram", "0", "--no-webui", "--flash-attn", "auto",
        ]  # fmt: skip
    return found


def once(
    command: list[str], port: int, *, users: int, quick: bool, seed: int
) -> dict[str, Any] | str:
    """The report of one load on a fresh server, or why there is none."""
    base = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            if (refusal := _wait(base, process)) is not None:
                return refusal
            load = LoadSpec(
                base_url=base, token_ids=1000, timeout_s=300.0, concurrency=users, num_requests=users,
                input_words=16 if quick else NUM_INPUT, output_tokens=8 if quick else NUM_OUTPUT,
                seed=seed,
            )  # fmt: skip
            run_load(_small(load))
            return run_load(load)
        finally:
            process.terminate()
            process.wait(30)


def _small(load: LoadSpec) -> LoadSpec:
    """What warms the server up."""
    import msgspec

    return msgspec.structs.replace(load, input_words=8, output_tokens=4, seed=load.seed + 1000)


def _wait(base: str, process: subprocess.Popen[bytes], timeout_s: float = 120) -> str | None:
    """Until /v1/models and a completion are answered; both servers know them."""
    import urllib.error
    import urllib.request

    end = time.perf_counter() + timeout_s
    body = b'{"prompt": [1, 2], "max_tokens": 1}'
    headers = {"Content-Type": "application/json"}
    while time.perf_counter() < end:
        if process.poll() is not None:
            return f"ended with status {process.returncode}"
        try:
            request = urllib.request.Request(base + "/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=60):
                return None
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return "not ready in time"


def engine_alone(peers: Peers, shape: Shape, *, users: int, quick: bool) -> dict[str, Any] | str:
    """The same figures of llama.cpp's engine without a server."""
    command = session_commands(peers, shape, "bf16").get("llama.cpp")
    if command is None:
        return "not installed"
    session = Session(command)
    found = session.run(users, *((16, 8) if quick else (NUM_INPUT, NUM_OUTPUT)))
    session.close()
    if isinstance(found, str):
        return found
    return {
        "ledger": {"sent": users, "ok": users},
        "output_tok_s": found["output_tok_s"],
        "itl_ms": {"p50": found["decode_step_ms"], "p99": found["decode_p99_ms"]},
        "ttft_ms": {"p50": found["prefill_ms"]},
    }


def compare(peers: Peers, shape: Shape, *, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """One row per engine, the engines in turn; at most two rounds, each is most of a minute."""
    port = free_port()
    seen: dict[str, list[dict[str, Any]]] = {}
    refused: dict[str, str] = {}
    for number in range(min(rounds, 2)):
        users, here = 4 if quick else USERS, commands(peers, shape, port)
        for name in (*here, *([] if "llama-server" in here else [ALONE])):
            if name == ALONE:
                found = engine_alone(peers, shape, users=users, quick=quick)
            else:
                found = once(here[name], port, users=users, quick=quick, seed=number)
            if isinstance(found, str):
                refused[name] = found
            elif found["ledger"]["ok"] < found["ledger"]["sent"]:
                refused[name] = f"{found['ledger']}: {found['first_problem']}"[:120]
            else:
                seen.setdefault(name, []).append(found)
            print(name, refused.get(name) or found, flush=True)
    rows = [
        {
            "engine": name,
            "output_tok_s": statistics.median(f["output_tok_s"] for f in reports),
            "itl_p50_ms": statistics.median(f["itl_ms"]["p50"] for f in reports),
            "itl_p99_ms": statistics.median(f["itl_ms"]["p99"] for f in reports),
            "ttft_p50_ms": statistics.median(f["ttft_ms"]["p50"] for f in reports),
        }
        for name, reports in seen.items()
    ]
    return rows + [{"engine": n, "refused": why} for n, why in refused.items() if n not in seen]
