"""Percentiles, tables and plots of measurements; one JSON object per run, so that runs can be
compared by machine."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace import __version__
from headrace.base.optional import require

PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")


def percentiles(values: Sequence[float], *, scale: float = 1.0) -> dict[str, float]:
    """mean, p50, p90, p95, p99 and max of `values * scale`; empty for no values."""
    if not len(values):
        return {}
    array = np.asarray(values, dtype=np.float64) * scale
    quantiles = {f"p{q}": float(np.percentile(array, q)) for q in (50, 90, 95, 99)}
    return {"mean": float(array.mean()), **quantiles, "max": float(array.max())}


def versions() -> dict[str, str]:
    """headrace, Python, torch and the processor: what a figure depends on."""
    return {
        "headrace": __version__,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "processor": processor_name(),
    }


def processor_name() -> str:
    """The CPU's name as the kernel shows it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def emit(result: Mapping[str, Any], *, as_json: bool, title: str) -> None:
    """Prints a result as one JSON object on one line, or as a table for people."""
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    table = Table(title=title, show_header=False)
    spread = Table("", *PERCENTILES)
    for key, value in _flat(result):
        if isinstance(value, Mapping):
            spread.add_row(key, *(f"{value[name]:,.2f}" for name in PERCENTILES))
        else:
            table.add_row(key, f"{value:,.3f}" if isinstance(value, float) else str(value))
    console = Console()
    console.print(table)
    if spread.rows:
        console.print(spread)


def _flat(result: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested keys joined by dots; a set of percentiles stays together."""
    rows: list[tuple[str, Any]] = []
    for key, value in result.items():
        if isinstance(value, Mapping) and value.keys() != set(PERCENTILES):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, value))
    return rows


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table for benchmarks/*.md; floats get three significant digits."""
    shown = [[f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in shown])


def plot_latencies(path: Path, series: Mapping[str, Sequence[float]]) -> None:
    """Cumulative distributions of latencies (seconds), one curve each, as a PNG or SVG file."""
    matplotlib = require("matplotlib", extra="plot", purpose="--plot")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", extra="plot", purpose="--plot")
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, values in series.items():
        if len(values):
            ordered = np.sort(np.asarray(values)) * 1000
            axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=name)
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_ylabel("share of samples")
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
