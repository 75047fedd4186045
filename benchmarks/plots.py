"""Draws what the tables say, from the stored results, as small SVG files in benchmarks/plots.

    python -m benchmarks.plots          (make plots)

`figures.json` holds the headline figures beside vLLM and llama.cpp, each with the file it is taken
from; `python -m benchmarks.plots --figures` writes it anew from those results.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIGURES = HERE / "figures.json"
PLOTS = HERE / "plots"
AHEAD, BEHIND = "#0b6e99", "#c2571a"
H200 = HERE / "h200" / "README.md"
CPU = HERE / "cpu" / "engines.json"


def _table(text: str, title: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    body = text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in body.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _figure(
    what: str, unit: str, ours: float, peer: str, theirs: float, *, lower: bool, source: str
) -> dict[str, Any]:
    """One row: a ratio above 1 means that headrace is ahead."""
    ratio = theirs / ours if lower else ours / theirs
    return {
        "what": what,
        "unit": unit,
        "headrace": ours,
        "peer": peer,
        "theirs": theirs,
        "lower_is_better": lower,
        "ratio": round(ratio, 3),
        "source": source,
    }


def h200_figures(page: str) -> list[dict[str, Any]]:
    """Decode steps, prefill, throughput and the server beside vLLM on one H200."""
    source, peer = "benchmarks/h200/README.md", "vLLM 0.26"
    rows = []
    for shape, load, ours, theirs, *_ in _table(page, "Decode steps"):
        what = f"{shape}, decode step {load}"
        rows.append(
            _figure(what, "ms", _number(ours), peer, _number(theirs), lower=True, source=source)
        )
    for shape, load, ours, theirs, _ in _table(page, "Prefill and throughput"):
        what = f"{shape}, {load}"
        rows.append(
            _figure(what, "tok/s", _number(ours), peer, _number(theirs), lower=False, source=source)
        )
    for shape, users, rate, ttft, itl, beside, _ in _table(page, "Server"):
        peers = [_number(part) for part in beside.split(";")]
        ours = [_number(rate), _number(ttft), _number(itl.split("/")[1])]
        names = ("output", "TTFT p50", "ITL p99")
        for name, one, other in zip(names, ours, peers, strict=True):
            unit = "tok/s" if name == "output" else "ms"
            what = f"{shape}, server, {users} users, {name}"
            lower = unit == "ms"
            rows.append(_figure(what, unit, one, peer, other, lower=lower, source=source))
    return rows


def cpu_figures(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Decode and prefill beside llama.cpp on two CPU cores; rows that it does not run are left out."""
    rows = []
    for shape, sections in stored.items():
        for kind, key in (("decode", "streams"), ("prefill", "prompt")):
            for row in sections[kind]["rows"]:
                ours, theirs = row["engines"]["headrace"], row["engines"].get("llama.cpp")
                if isinstance(ours, float) and isinstance(theirs, float):
                    what = f"{shape}, {kind} {row['precision']}, {row[key]} {key}"
                    source = "benchmarks/cpu/engines.json"
                    rows.append(
                        _figure(
                            what, "tok/s", ours, "llama.cpp", theirs, lower=False, source=source
                        )
                    )
    return rows


def figures() -> dict[str, Any]:
    """All headline figures, misses included."""
    return {
        "h200": h200_figures(H200.read_text()),
        "cpu": cpu_figures(json.loads(CPU.read_text())),
    }


def draw(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    """Bars of the ratio to the peer, the peer itself being the line at 1."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "headrace"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    height = 0.8 + 0.24 * len(rows)
    chart, axes = pyplot.subplots(figsize=(8, height))
    ratios = [row["ratio"] for row in rows]
    colours = [AHEAD if ratio >= 1 else BEHIND for ratio in ratios]
    axes.barh(range(len(rows)), ratios, color=colours, height=0.7)
    axes.set_yticks(range(len(rows)), [row["what"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="#555555", linewidth=1)
    for at, ratio in enumerate(ratios):
        axes.text(ratio, at, f" {ratio:.2f}", va="center", fontsize=7)
    axes.set_xlabel(f"times {rows[0]['peer']} (its figure is 1; more is better)", fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    chart.tight_layout()
    chart.savefig(path, metadata={"Date": None})
    pyplot.close(chart)


def draw_all(stored: dict[str, Any]) -> list[Path]:
    """Draws every picture; the files."""
    PLOTS.mkdir(exist_ok=True)
    offline = [row for row in stored["h200"] if ", server, " not in row["what"]]
    server = [row for row in stored["h200"] if ", server, " in row["what"]]
    pictures = {"h200-offline": ("One H200, offline, beside vLLM 0.26", offline)}
    pictures["h200-server"] = ("One H200, server, beside vLLM 0.26", server)
    for shape in dict.fromkeys(re.split(", ", row["what"])[0] for row in stored["cpu"]):
        rows = [row for row in stored["cpu"] if row["what"].startswith(f"{shape}, ")]
        pictures[f"cpu-{shape}"] = (f"Two CPU cores, {shape}, beside llama.cpp", rows)
    paths = []
    for name, (title, rows) in pictures.items():
        paths.append(PLOTS / f"{name}.svg")
        draw(paths[-1], title, rows)
    return paths


def main() -> None:
    """Writes the figures or draws them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", action="store_true", help="write figures.json from the tables")
    arguments = parser.parse_args()
    if arguments.figures:
        FIGURES.write_text(json.dumps(figures(), indent=1) + "\n")
    for path in draw_all(json.loads(FIGURES.read_text())):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
