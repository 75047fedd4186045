"""Tensor parallelism over four GPUs beside one and two, all of one machine in one run.

    python -m benchmarks.h200.four --out benchmarks/h200/results/four [--only offline-qwen3-8b-tp4 ...]
    python -m benchmarks.h200.four --write      makes four.md of the results that are there

Runs of fewer devices go side by side, each on devices of its own; those of four one after the other: decode steps,
prefill and 512 requests (benchmarks.h200.offline), the sums alone (all_reduce), the server with a cold and a warm start
(server), and ranks that are killed and stopped under streams (benchmarks.robustness.deaths).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.report import markdown_table

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "four"
SHAPES = ("qwen3-8b", "qwen3-32b", "qwen3-8b-fp8", "qwen3-30b-a3b", "deepseek-v2-lite")
BARS_MS = {("qwen3-8b", 1, 128): 2.3, ("qwen3-8b", 32, 128): 2.9, ("qwen3-8b", 256, 128): 5.2}
"""Decode steps on four H200."""
LIMIT_S = 170
END = "<!-- end of what benchmarks.h200.four made -->"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process: what it is told, and on which devices it runs."""

    name: str
    arguments: tuple[str, ...]
    devices: tuple[int, ...] = (0, 1, 2, 3)
    out: str = "--out"


def offline(shape: str, devices: tuple[int, ...], parts: str) -> Run:
    """Figures of a shape over so many devices."""
    extra = "1x128,8x128,32x128,128x128,256x128,256x1024" if shape == "qwen3-32b" else ""
    if (
        shape == "qwen3-32b" and len(devices) == 1
    ):  # the caches of 256 x 1024 do not fit beside its weights
        extra = "1x128,8x128,32x128,128x128"
    ranks = ("--tensor-parallel", str(len(devices)))
    arguments = ("benchmarks.h200.offline", "--shape", shape, *ranks, "--parts", parts)
    return Run(
        name=f"offline-{shape}-tp{len(devices)}",
        arguments=(*arguments, "--extra", extra),
        devices=devices,
    )


ALL, SHORT, FOUR = "steps,prefill,offline", "steps,prefill", (0, 1, 2, 3)
DEATHS = ("benchmarks.robustness.deaths", "--kinds", "rank", "--repeats", "1")
ROUNDS: tuple[tuple[Run, ...], ...] = (
    (
        offline("qwen3-8b", (0,), ALL),
        offline("qwen3-32b", (1,), SHORT),
        offline("qwen3-8b", (2, 3), ALL),
    ),
    (offline("qwen3-32b", (0, 1), ALL), offline("qwen3-30b-a3b", (2, 3), ALL)),
    (offline("qwen3-8b", FOUR, ALL),),
    (Run(name="all-reduce-4", arguments=("benchmarks.h200.all_reduce", "--ranks", "4")),),
    (
        Run(
            name="server-qwen3-8b-tp4",
            arguments=("benchmarks.h200.server", "--cold", "--serve", "--tensor-parallel 4"),
        ),
    ),
    (offline("qwen3-32b", FOUR, ALL),),
    (offline("qwen3-30b-a3b", FOUR, ALL),),
    (
        Run(
            name="deaths-tp4",
            arguments=(*DEATHS, "--serve", "--tensor-parallel 4"),
            out="--write",
        ),
    ),
    (offline("deepseek-v2-lite", FOUR, ALL),),
    (offline("qwen3-8b-fp8", FOUR, SHORT),),
)


def start(run: Run, folder: Path) -> subprocess.Popen[bytes]:
    """Starts a run; what it prints goes into a file beside its result."""
    visible = ",".join(map(str, run.devices))
    command = [sys.executable, "-m", *run.arguments, run.out, str(folder / f"{run.name}.json")]
    with open(folder / f"{run.name}.log", "wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"CUDA_VISIBLE_DEVICES": visible}
        )


def run_all(folder: Path, only: list[str]) -> None:
    """Every round; a run that takes too long is ended, and its page says that it was not run."""
    folder.mkdir(parents=True, exist_ok=True)
    for runs in ROUNDS:
        began = time.monotonic()
        chosen = [run for run in runs if not only or run.name in only]
        processes = [(run, start(run, folder)) for run in chosen]
        for run, process in processes:
            try:
                process.wait(max(1.0, began + LIMIT_S - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(30)
            print(run.name, process.returncode, f"{time.monotonic() - began:.0f} s", flush=True)


PAGE = """# Four GPUs of one machine

Made by `python -m benchmarks.h200.four --write` of what `--out` measured: dummy bfloat16 weights (those of qwen3-8b-fp8
become e4m3 while loading), greedy, fixed lengths, sums by our own kernels where they are quicker; mixtures route
uniformly. Runs of one and two devices ran side by side on the same machine. No NVLink multicast.

{versions}.
"""


def load(name: str) -> dict[str, Any]:
    """A result, empty where it was not run."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def shape_table(shape: str) -> str:
    """A shape's figures by devices."""
    columns = {n: load(f"offline-{shape}-tp{n}") for n in (1, 2, 4)}
    columns = {n: result for n, result in columns.items() if result}
    if not columns:
        return "Not run."
    rows: list[tuple[object, ...]] = []
    for part, figure, form, label in (
        ("steps", "step_ms", ".3g", "decode step {batch} x {prompt}, ms"),
        ("prefill", "tok_s", ",.0f", "prefill {batch} x {prompt}, tok/s"),
        ("offline", "output_tok_s", ",.0f", "512 requests, output tok/s"),
    ):
        loads: dict[str, tuple[str, dict[int, float]]] = {}
        for n, result in columns.items():
            for row in result.get(part, ()):
                text = label.format(**row)
                bar = BARS_MS.get((shape, row.get("batch", 0), row.get("prompt", 0)))
                loads.setdefault(text, (verdict(bar, None), {}))[1][n] = row[figure]
                if bar and n == 4 and part == "steps":
                    loads[text] = (verdict(bar, row[figure]), loads[text][1])
        for text, (bar_text, values) in loads.items():
            cells = [f"{values[n]:{form}}" if n in values else "" for n in columns]
            rows.append((text, *cells, bar_text if part == "steps" else ""))
    names = {1: "one", 2: "two", 4: "four"}
    return markdown_table((shape, *(names[n] for n in columns), "bar for four"), rows)


def verdict(bar: float | None, figure: float | None) -> str:
    """Whether a bar for a decode step is met."""
    if bar is None:
        return ""
    return f"{bar:g}" if figure is None else f"{bar:g} {'met' if figure <= bar else 'missed'}"


def server_section() -> str:
    """Closed loops over HTTP and the starts before them."""
    found = load("server-qwen3-8b-tp4")
    if not found:
        return "Not run."
    rows = [
        (
            row["users"],
            f"{row['out_tok_s']:,.0f}",
            f"{row['ttft_p50_ms']:.0f}",
            f"{row['itl_p50_ms']:.1f} / {row['itl_p99_ms']:.1f}",
        )
        for row in found["loads"]
    ]
    header = ("users", "out tok/s", "TTFT p50 ms", "ITL p50 / p99 ms")
    ready = ", ".join(f"{s:.1f}" for s in found["ready_s"])
    lines = (
        f"Ready after {found['cold_ready_s']:.1f} s with an empty cache of kernels, then {ready} s."
    )
    return f"{markdown_table(header, rows)}\n\n{lines}"


def deaths_section() -> str:
    """A rank killed and stopped under streams."""
    found = load("deaths-tp4")
    if not found:
        return "Not run."
    rows = [
        (
            row["signal"],
            ", ".join(f"{count} {name}" for name, count in row["outcomes"].items()),
            *(row[key] for key in ("noticed_s", "over_s", "back_s")),
        )
        for row in found["rows"]
    ]
    header = ("signal", "streams", "noticed s", "last stream ended s", "serves again s")
    return markdown_table(header, rows)


def write() -> None:
    """The page."""
    result = load("offline-qwen3-8b-tp4")
    versions = ", ".join(f"{key} {value}" for key, value in result.get("versions", {}).items())
    parts = [PAGE.format(versions=versions or "Not run")]
    for shape in SHAPES:
        parts += [f"## {shape}", shape_table(shape)]
    parts += ["## Server, qwen3-8b over four", server_section()]
    parts += [
        "## A rank that dies under 50 streams (the bundled model over four)",
        deaths_section(),
    ]
    page = HERE / "four.md"
    notes = page.read_text().partition(END)[2] if page.exists() else "\n"
    page.write_text("\n\n".join([*(part.rstrip() for part in parts), END]) + notes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.write:
        write()
    else:
        run_all(given.out, given.only)


if __name__ == "__main__":
    main()
