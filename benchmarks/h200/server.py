"""The server on one H200: start to ready, then closed loops of 1024 random tokens (+-50 %) in and 128 out.

    python -m benchmarks.h200.server --shape qwen3-8b --out server.json [--concurrency 16,64,256]

The client is `headrace bench serve`'s, in this process; the server is `headrace serve` with dummy weights.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.h200.shapes import SHAPES, device_name, write_model
from headrace.bench.report import markdown_table, versions
from headrace.bench.serve import LoadSpec, run_load
from headrace.bench.startup import free_port, wait_ready

# out tok/s, TTFT p50 ms, ITL p99 ms: vLLM 0.26 with the same load
PEER: dict[str, dict[int, tuple[float | None, ...]]] = {
    "qwen3-8b": {16: (1800, 257, 7.7), 64: (3278, 759, 190), 256: (3818, 812, 209)},
    "deepseek-v2-lite": {64: (5619, None, None), 256: (7515, None, None)},
    "qwen3-0.6b": {16: (5728, 72, 3.7), 64: (11273, 194, 24), 256: (15408, 474, 37)},
}
ROUNDS = 5


def start(folder: Path, arguments: list[str]) -> tuple[subprocess.Popen[bytes], str, float]:
    """A ready server: its process, its address, and the seconds it took."""
    port, begin = free_port(), time.perf_counter()
    command = [sys.executable, "-m", "headrace", "serve", "--model", str(folder)]
    command += ["--load-format", "dummy", "--max-model-len", "8448", "--no-prefix-caching"]
    process = subprocess.Popen([*command, "--port", str(port), *arguments])
    base = f"http://127.0.0.1:{port}"
    wait_ready(base, process, begin + 120)
    return process, base, time.perf_counter() - begin


def cold_start(folder: Path, arguments: list[str]) -> float:
    """Seconds to readiness when every kernel is still to be compiled."""
    kept = os.environ.get("HEADRACE_CACHE_DIR")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HEADRACE_CACHE_DIR"] = cache
        try:
            process, _, ready_s = start(folder, arguments)
            stop(process)
        finally:
            del os.environ["HEADRACE_CACHE_DIR"]
            if kept is not None:
                os.environ["HEADRACE_CACHE_DIR"] = kept
    return ready_s


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a server."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


def measure(base: str, shape: str, users: int) -> dict[str, Any]:
    """One closed loop, after one that is not counted with one request per user."""
    load = {"base_url": base, "endpoint": "completions", "output_tokens": 128}
    load |= {"token_ids": SHAPES[shape]["vocab_size"] - 2000}
    load |= {"input_words": 1024, "spread": 0.5, "concurrency": users, "timeout_s": 120.0}
    run_load(LoadSpec(**load, num_requests=users, seed=0))
    found = run_load(LoadSpec(**load, num_requests=users * ROUNDS, seed=users))
    peer = PEER.get(shape, {}).get(users, (None, None, None))
    return {
        "shape": shape,
        "users": users,
        "out_tok_s": found["output_tok_s"],
        "ttft_p50_ms": found["ttft_ms"]["p50"],
        "ttft_p99_ms": found["ttft_ms"]["p99"],
        "itl_p50_ms": found["itl_ms"]["p50"],
        "itl_p99_ms": found["itl_ms"]["p99"],
        "peer": peer,
        "ledger": found["ledger"],
        "problem": found["first_problem"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--concurrency", default="16,64,256")
    parser.add_argument("--starts", type=int, default=1, help="starts before the measured server")
    parser.add_argument(
        "--cold", action="store_true", help="one start before with an empty cache of kernels"
    )
    parser.add_argument("--serve", default="", help="further options of the server")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {"versions": versions() | device_name(), "ready_s": [], "loads": []}
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), given.shape)
        if given.cold:
            result["cold_ready_s"] = cold_start(folder, given.serve.split())
            print("cold_ready_s", result["cold_ready_s"], flush=True)
        for _ in range(given.starts):
            process, _, ready_s = start(folder, given.serve.split())
            result["ready_s"].append(ready_s)
            stop(process)
        process, base, ready_s = start(folder, given.serve.split())
        result["ready_s"].append(ready_s)
        print("ready_s", result["ready_s"], flush=True)
        try:
            for users in [int(one) for one in given.concurrency.split(",") if one]:
                result["loads"].append(measure(base, given.shape, users))
                print(json.dumps(result["loads"][-1]), flush=True)
        finally:
            stop(process)
            if given.out:
                given.out.write_text(json.dumps(result, indent=1))
    if not result["loads"]:
        return
    header = [name for name in result["loads"][0] if name not in ("ledger", "problem")]
    print(markdown_table(header, [[row[name] for name in header] for row in result["loads"]]))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
