"""Interleaved timings: every candidate once per round, A B A B, so that a disturbance hits all of them alike."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from headrace.back.kernels.native.library import NativeLibrary, load


def setup(description: str) -> tuple[NativeLibrary, argparse.Namespace]:
    """The command line every script shares, and the library with torch at the same width."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="per row of the table")
    parser.add_argument(
        "--only", default="", help="part of a name, where a script has several parts"
    )
    parser.add_argument(
        "--processor", action="store_true", help="processor time, for a machine that others use"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    library = load()
    if isinstance(library, str):
        raise SystemExit(library)
    library.set_threads(arguments.threads)
    print(
        f"instruction set {library.isa}, {arguments.threads} thread(s), torch {torch.__version__}"
    )
    return library, arguments


def interleaved(
    candidates: dict[str, Callable[[], object]], *, seconds: float, processor: bool = False
) -> dict[str, tuple[float, float]]:
    """name -> (median, minimum) microseconds, `processor`: of processor time; at least 5 rounds."""
    clock = time.process_time if processor else time.perf_counter
    for call in candidates.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in candidates.items():
            start = clock()
            call()
            times[name].append((clock() - start) * 1e6)
    return {name: (statistics.median(taken), min(taken)) for name, taken in times.items()}


def row(*cells: object) -> None:
    """One line of a Markdown table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def cell(timing: tuple[float, float]) -> str:
    """`median (minimum)` in microseconds."""
    return f"{timing[0]:,.0f} ({timing[1]:,.0f})"
