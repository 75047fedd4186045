"""headrace and llama.cpp on the same GGUF files, in turn (A B A B): medians of rates and of processor seconds,
which count on a machine that others use.

    PEER_PYTHON=PYTHON python -m benchmarks.cpu.same_gguf FILE.gguf ... [--threads 2] [--rounds 3]

PYTHON: an interpreter that has llama-cpp-python. Files of random weights: make_gguf.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

import psutil

from benchmarks.cpu.sessions import Session
from benchmarks.cpu.shapes import HERE

LOADS = {"1 stream": (1, 32, 33), "8 streams": (8, 32, 17), "prompt of 512": (1, 512, 2)}


def processor_s(session: Session) -> float:
    """What the session's process and its children have used."""
    root = psutil.Process(session.pid)
    times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


def turn(session: Session, load: tuple[int, int, int]) -> dict[str, Any]:
    """The figures of one load, and its processor seconds."""
    before = processor_s(session)
    figures = session.run(*load)
    assert not isinstance(figures, str), figures
    return figures | {"processor_s": processor_s(session) - before}


def main() -> None:
    """Prints a table of each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    for model in asked.models:
        compare(model, threads=asked.threads, rounds=asked.rounds)


def compare(model: str, *, threads: int, rounds: int) -> None:
    """Prints the table of one file."""
    facts = ["--threads", str(threads)]
    ours = [sys.executable, "-m", "benchmarks.cpu.headrace_session", model, *facts]
    sessions = {"headrace": Session([*ours, "--load-format", "auto"])}
    peer = [os.environ["PEER_PYTHON"], str(HERE / "llama_peer.py"), model, *facts]
    sessions["llama.cpp"] = Session(peer)
    for session in sessions.values():
        turn(session, (1, 8, 4))
    print(f"\n{model}\n")
    print(
        "| load | headrace | llama.cpp | ratio | headrace processor s | llama.cpp processor s | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, load in LOADS.items():
        figure = "prefill_tok_s" if load[1] > load[2] * 8 else "decode_tok_s"
        found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in sessions}
        for _ in range(rounds):
            for engine, session in sessions.items():
                found[engine].append(turn(session, load))
        rate = {e: statistics.median(row[figure] for row in rows) for e, rows in found.items()}
        used = {e: statistics.median(r["processor_s"] for r in rows) for e, rows in found.items()}
        a, b = "headrace", "llama.cpp"
        print(
            f"| {name} | {rate[a]:,.1f} tok/s | {rate[b]:,.1f} tok/s | {rate[a] / rate[b]:.2f} |"
            f" {used[a]:.2f} | {used[b]:.2f} | {used[b] / used[a]:.2f} |",
            flush=True,
        )
    for session in sessions.values():
        session.close()


if __name__ == "__main__":
    main()
