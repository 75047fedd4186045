"""Who works while many stream: processor time of every thread of the server, and of the client, in a closed loop.

    python -m benchmarks.host_threads [--users 256] [--step-ms 13]      null executor: no device is needed
    python -m benchmarks.host_threads --device                          on one H200, dummy weights

The load is that of benchmarks/h200/server.py on the 0.6B shape. A thread that is near a whole core holds the tokens
up. Of the core process the first thread is the step loop, `worker` launches the steps, `frontend-io` reads requests.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import psutil
import uvloop

from benchmarks.h200.server import start, stop
from benchmarks.h200.shapes import write_model
from headrace.bench.report import markdown_table
from headrace.bench.serve import LoadClient, LoadSpec, run_load

SHAPE = "qwen3-0.6b"
TICKS = os.sysconf("SC_CLK_TCK")
ROLES = {"core_process": "core", "server.process": "api", "headrace serve": "supervisor"}


def threads(root: psutil.Process) -> dict[tuple[str, int], float]:
    """(process, its thread by age) -> processor seconds so far, of `root`, its children and this process."""
    found = {}
    for process in (root, *root.children(recursive=True), psutil.Process()):
        line = " ".join(process.cmdline())
        role = next((role for part, role in ROLES.items() if part in line), "other")
        role = "client" if process.pid == os.getpid() else role
        for number, task in enumerate(sorted(Path(f"/proc/{process.pid}/task").iterdir(), key=_id)):
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / TICKS
            found[role, number] = found.get((role, number), 0.0) + seconds
    return found


def _id(path: Path) -> int:
    return int(path.name)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=13.0)
    parser.add_argument("--device", action="store_true", help="dummy weights on a GPU")
    parser.add_argument("--serve", default="", help="further options of the server")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), SHAPE)
        options = given.serve.split()
        if not given.device:
            config = json.loads((folder / "config.json").read_text())
            step_s = given.step_ms / 1e3
            (folder / "config.json").write_text(json.dumps(config | {"null_step_s": step_s}))
            options += ["--executor", "null", "--kv-blocks", "32768"]
        process, base, _ = start(folder, options)
        try:
            load = {"base_url": base, "endpoint": "completions", "token_ids": 150_000}
            load |= {"input_words": 1024, "spread": 0.5, "concurrency": given.users}
            run_load(LoadSpec(**load, num_requests=given.users, output_tokens=128))
            root = psutil.Process(process.pid)
            before = threads(root)
            client = LoadClient(
                LoadSpec(
                    **load, num_requests=given.users * given.rounds, output_tokens=128, seed=256
                )
            )
            found = uvloop.run(client.run())
            after = threads(root)
        finally:
            stop(process)
    wall_s, tokens = found["wall_s"], found["output_tok_s"] * found["wall_s"]
    chunks = sum(len(series) for name, series in client.series().items() if name != "end to end")
    spent = {key: end - before.get(key, 0.0) for key, end in sorted(after.items())}
    rows = [
        [role, number, f"{100 * used / wall_s:.0f} %", f"{1e6 * used / chunks:.1f}"]
        for (role, number), used in spent.items()
        if used >= 0.005 * wall_s
    ]
    print(markdown_table(["process", "thread", "of a core", "us a chunk"], rows))
    print(f"{tokens / chunks:.2f} tokens a chunk")
    print({key: found[key] for key in ("wall_s", "output_tok_s", "ttft_ms", "itl_ms", "ledger")})


if __name__ == "__main__":
    main()
