"""The CPU path beside other engines, in turn (A B A B), medians: every row of the table that has a bar.

    GGUF=PREFIX ONNX=FOLDER PEER_PYTHON=PYTHON LLAMA_SERVER=FILE python -m benchmarks.cpu.run --write [--only decode]

PREFIX-BF16.gguf, -Q8_0.gguf, -Q4_0.gguf: the same shape for the other engines (make_gguf.py), FOLDER: for
onnxruntime-genai (onnx_peer.py); PYTHON: an interpreter that has llama-cpp-python and perhaps openvino-genai and
onnxruntime-genai. Engines that are not there are left out and the page says so.
Sections: decode, prefill, server, start (with memory), plan. What is measured goes into engines.json, section by
section, and engines.md is made of all of it (page.py): sections may be measured apart. `--quick` tries the script, it
measures nothing worth keeping.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu import limits, planned, starts
from benchmarks.cpu.page import page
from benchmarks.cpu.servers import compare as compare_servers
from benchmarks.cpu.sessions import HERE, SHAPE, Peers, Session, commands
from headrace.back.platforms.cpu import usable_cores
from headrace.bench.report import versions

STORED, PAGE = HERE / "engines.json", HERE / "engines.md"
WEIGHT_BYTES = {"bf16": 1.192e9, "int8": 0.597e9, "int4": 0.335e9}
"""Read once per step, the head included."""
LOADS = {1: (32, 32), 8: (32, 24), 32: (32, 16)}  # streams -> tokens in, out
PROMPTS = (512, 2048)
Rows = list[dict[str, Any]]


def in_turn(
    sessions: dict[str, Session], figure: str, load: tuple[int, int, int], rounds: int
) -> dict[str, float | str]:
    """Engine -> median of a figure over the rounds, or why there is none."""
    seen: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, session in sessions.items():
            found = session.run(*load)
            if not isinstance(found, str):
                seen[name].append(found[figure])
    return {n: statistics.median(v) if v else sessions[n].failed for n, v in seen.items()}


def engines(peers: Peers, given: argparse.Namespace, kinds: set[str]) -> dict[str, Rows]:
    """Decode and prefill: sessions are loaded once per precision."""
    library = limits.pool(peers.threads)
    found: dict[str, Rows] = {kind: [] for kind in ("decode", "prefill") if kind in kinds}
    for precision in given.precisions.split(","):
        sessions = {n: Session(c) for n, c in commands(peers, precision).items()}
        for session in sessions.values():
            session.run(1, 8, 4)
        if "decode" in kinds:
            for streams, load in LOADS.items():
                read = [limits.reading(library, int(WEIGHT_BYTES[precision]))]
                figures = in_turn(sessions, "decode_tok_s", (streams, *load), given.rounds)
                read.append(limits.reading(library, int(WEIGHT_BYTES[precision])))
                row = {"precision": precision, "streams": streams, "engines": figures}
                found["decode"].append(
                    row | {"read_gb_s": max(read), "bytes": WEIGHT_BYTES[precision]}
                )
                say(found["decode"][-1])
        if "prefill" in kinds:
            for length in PROMPTS[: 1 if given.quick else None]:
                peak = limits.peaks()
                figures = in_turn(sessions, "prefill_tok_s", (1, length, 3), given.rounds)
                row = {"precision": precision, "prompt": length, "engines": figures}
                found["prefill"].append(
                    row | {"peak_gflops": peak["bf16" if precision == "bf16" else "int8"]}
                )
                say(found["prefill"][-1])
        for session in sessions.values():
            session.close()
    return found


def say(row: dict[str, Any]) -> None:
    """Progress, so that whoever waits sees which row is being made."""
    print(f"{time.strftime('%H:%M:%S')} {json.dumps(row)}", flush=True)


def store(found: dict[str, Rows], given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The stored results with the sections that were measured now in place of their earlier ones."""
    kept = json.loads(STORED.read_text()) if STORED.exists() else {}
    for kind, rows in found.items():
        kept[kind] = {
            "rows": rows, "rounds": given.rounds, "load": os.getloadavg()[0], "seconds": seconds,
            "when": time.strftime("%Y-%m-%d %H:%M"), "threads": usable_cores(), "versions": versions(),
            "quick": given.quick,
        }  # fmt: skip
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="decode,prefill,server,start,plan")
    parser.add_argument("--precisions", default="bf16,int8,int4")
    parser.add_argument("--gguf", default=os.environ.get("GGUF", ""))
    parser.add_argument("--peer-python", default=os.environ.get("PEER_PYTHON", ""))
    parser.add_argument("--onnx", default=os.environ.get("ONNX", ""))
    parser.add_argument("--llama-server", default=os.environ.get("LLAMA_SERVER", ""))
    parser.add_argument("--checkpoint", type=Path, default=starts.CHECKPOINT)
    parser.add_argument("--quick", action="store_true", help="one round of tiny loads")
    parser.add_argument("--write", action="store_true", help="store the results and the page")
    given = parser.parse_args()
    if given.quick:
        given.rounds = 1
        LOADS.update({1: (8, 6), 8: (8, 5), 32: (4, 4)})
    peers = Peers(
        gguf=given.gguf, python=given.peer_python or "python3", llama_server=given.llama_server,
        onnx=given.onnx,
        threads=usable_cores(),
    )  # fmt: skip
    kinds, merged = set(given.only.split(",")), {}
    sections: list[tuple[set[str], Callable[[], dict[str, Rows]]]] = [
        ({"decode", "prefill"}, lambda: engines(peers, given, kinds)),
        ({"server"}, lambda: {"server": compare_servers(peers, rounds=given.rounds, quick=given.quick)}),
        ({"plan"}, lambda: {"plan": planned.measure(peers, rounds=given.rounds)}),
        ({"start"}, lambda: starts.measure(SHAPE, given.checkpoint, rounds=given.rounds)),
    ]  # fmt: skip
    for wanted, measure in sections:
        if not wanted & kinds:
            continue
        begin = time.perf_counter()
        merged = store(measure(), given, time.perf_counter() - begin)
        if given.write:
            STORED.write_text(json.dumps(merged, indent=1) + "\n")
            PAGE.write_text(page(merged))
    print(page(merged))


if __name__ == "__main__":
    main()
