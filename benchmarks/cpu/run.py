"""The CPU path beside other engines, in turn (A B A B), medians: every row of the table that has a bar.

    PEERS=FOLDER PEER_PYTHON=PYTHON LLAMA_SERVER=FILE python -m benchmarks.cpu.run --write
        [--shape bundled] [--only decode,server]

FOLDER: the same shapes for the other engines (sessions.Peers says under which names); PYTHON: an interpreter that has
llama-cpp-python and perhaps openvino-genai and onnxruntime-genai. Engines that are not there are left out.
Sections of each shape: decode, prefill, server, start (with memory), plan. What is measured goes into engines.json
(of CPUs without matrix tiles into engines-vectors.json), section by section, and engines.md is made of all of it
(page.py): shapes and sections may be measured apart. `--quick`
tries the script, it measures nothing worth keeping; `--only none --write` makes the page anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.cpu import limits, planned, starts
from benchmarks.cpu.page import page, tables
from benchmarks.cpu.servers import compare as compare_servers
from benchmarks.cpu.sessions import Peers, Session, commands
from benchmarks.cpu.shapes import SHAPES, Shape
from headrace.back.platforms.cpu import cpu_facts, usable_cores
from headrace.bench.report import versions

STORED, PAGE = tables(cpu_facts().features)
Rows = list[dict[str, Any]]
QUICK_LOADS = {1: (8, 6), 8: (8, 5), 32: (4, 4)}


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


def engines(
    peers: Peers,
    shape: Shape,
    given: argparse.Namespace,
    kinds: set[str],
    keep: Callable[[dict[str, Rows]], None],
) -> dict[str, Rows]:
    """Decode and prefill: sessions are loaded once per precision. `keep` has the rows so far after each: a run that
    is cut short leaves what it measured."""
    library = limits.pool(peers.threads)
    found: dict[str, Rows] = {kind: [] for kind in ("decode", "prefill") if kind in kinds}
    for precision in given.precisions.split(","):
        sessions = {n: Session(c) for n, c in commands(peers, shape, precision).items()}
        for session in sessions.values():
            session.run(1, 8, 4)
        if "decode" in kinds:
            for streams, load in shape.loads.items():
                num_bytes = int(shape.read_bytes(precision))
                read = [limits.reading(library, num_bytes)]
                figures = in_turn(sessions, "decode_tok_s", (streams, *load), given.rounds)
                read.append(limits.reading(library, num_bytes))
                row = {"precision": precision, "streams": streams, "engines": figures}
                found["decode"].append(row | {"read_gb_s": max(read), "bytes": num_bytes})
                say(found["decode"][-1])
        if "prefill" in kinds:
            for length in shape.prompts[: 1 if given.quick or given.short else None]:
                peak = limits.peaks()
                figures = in_turn(sessions, "prefill_tok_s", (1, length, 3), given.rounds)
                row = {"precision": precision, "prompt": length, "engines": figures}
                row["operations"] = shape.prefill_operations(length)
                row["peak_gflops"] = peak["bf16" if precision == "bf16" else "int8"]
                found["prefill"].append(row)
                say(found["prefill"][-1])
        for session in sessions.values():
            session.close()
        keep(found)
    return found


def say(row: dict[str, Any]) -> None:
    """Progress, so that whoever waits sees which row is being made."""
    print(f"{time.strftime('%H:%M:%S')} {json.dumps(row)}", flush=True)


def store(
    shape: Shape, found: dict[str, Rows], given: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    """The stored results with the sections that were measured now in place of their earlier ones."""
    kept = json.loads(STORED.read_text()) if STORED.exists() else {}
    for kind, rows in found.items():
        kept.setdefault(shape.name, {})[kind] = {
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
    parser.add_argument("--shape", default=",".join(SHAPES))
    parser.add_argument("--peers", default=os.environ.get("PEERS", ""))
    parser.add_argument("--peer-python", default=os.environ.get("PEER_PYTHON", ""))
    parser.add_argument("--llama-server", default=os.environ.get("LLAMA_SERVER", ""))
    parser.add_argument("--short", action="store_true", help="the shortest prompt alone")
    parser.add_argument("--quick", action="store_true", help="one round of tiny loads")
    parser.add_argument("--write", action="store_true", help="store the results and the page")
    given = parser.parse_args()
    if given.quick:
        given.rounds = 1
    peers = Peers(
        files=given.peers, python=given.peer_python or "python3", llama_server=given.llama_server,
        threads=usable_cores(),
    )  # fmt: skip
    for name in given.shape.split(","):
        shape = replace(SHAPES[name], loads=QUICK_LOADS) if given.quick else SHAPES[name]
        measure(peers, shape, given)
    if given.write:
        PAGE.write_text(page(json.loads(STORED.read_text())))


def measure(peers: Peers, shape: Shape, given: argparse.Namespace) -> None:
    """All sections of a shape that were asked for, stored one by one."""
    kinds = set(given.only.split(","))
    begin = time.perf_counter()

    def keep(found: dict[str, Rows]) -> None:
        if given.write:
            merged = store(shape, found, given, time.perf_counter() - begin)
            STORED.write_text(json.dumps(merged, indent=1) + "\n")
            PAGE.write_text(page(merged))

    sections: list[tuple[set[str], Callable[[], dict[str, Rows]]]] = [
        ({"decode", "prefill"}, lambda: engines(peers, shape, given, kinds, keep)),
        ({"server"}, lambda: {"server": compare_servers(peers, shape, rounds=given.rounds, quick=given.quick)}),
        ({"plan"}, lambda: {"plan": planned.measure(peers, shape, rounds=given.rounds)}),
        ({"start"}, lambda: starts.measure(shape, rounds=given.rounds)),
    ]  # fmt: skip
    for wanted, section in sections:
        if not wanted & kinds:
            continue
        begin = time.perf_counter()
        merged = store(shape, section(), given, time.perf_counter() - begin)
        if given.write:
            STORED.write_text(json.dumps(merged, indent=1) + "\n")
        else:
            print(page(merged))


if __name__ == "__main__":
    main()
