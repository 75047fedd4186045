"""Writes benchmarks/h200/README.md from the results beside it: `python -m benchmarks.h200.report`.

Results are what `benchmarks.h200.offline --out` and `benchmarks.h200.server --out` wrote on the machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.h200.server import PEER
from headrace.bench.report import markdown_table

HERE = Path(__file__).resolve().parent
MARK = "<!-- made by benchmarks.h200.report -->"
END = "<!-- end of what benchmarks.h200.report made -->"
SHAPES = ("qwen3-8b", "qwen3-0.6b")
# decode step ms, prefill tok/s, 512 requests output tok/s: vLLM 0.26, the same loads on the same machine
PEER_STEPS = {
    ("qwen3-8b", 1, 128): 5.21,
    ("qwen3-8b", 8, 128): 5.51,
    ("qwen3-8b", 32, 128): 5.76,
    ("qwen3-8b", 128, 128): 7.74,
    ("qwen3-8b", 256, 128): 11.63,
    ("qwen3-8b", 256, 1024): 19.35,
    ("qwen3-0.6b", 1, 128): 1.63,
    ("qwen3-0.6b", 32, 128): 1.90,
    ("qwen3-0.6b", 256, 128): 4.69,
}
PEER_PREFILL = {
    ("qwen3-8b", 1, 8192): 37_368,
    ("qwen3-8b", 16, 1024): 43_436,
    ("qwen3-0.6b", 1, 8192): 243_707,
    ("qwen3-0.6b", 16, 1024): 380_052,
}
PEER_OFFLINE = {"qwen3-8b": 6_612, "qwen3-0.6b": 20_781}


def load(kind: str, shape: str) -> dict[str, Any]:
    """One result file."""
    return dict(json.loads((HERE / "results" / f"{kind}-{shape}.json").read_text()))


def verdict(figure: float, bar: float | None, *, lower: bool) -> str:
    """Whether a bar is met."""
    if bar is None:
        return ""
    met = figure <= bar if lower else figure >= bar
    return f"{bar:g} {'met' if met else 'missed'}"


def steps_table() -> str:
    """Decode steps."""
    rows = []
    for shape in SHAPES:
        for row in load("offline", shape)["steps"]:
            peer = PEER_STEPS.get((shape, row["batch"], row["prompt"]), "")
            rows.append(
                (
                    shape,
                    f"{row['batch']} x {row['prompt']}",
                    row["step_ms"],
                    peer,
                    row["floor_ms"],
                    f"{100 * row['of_floor']:.0f} %",
                    verdict(row["step_ms"], row["bar_ms"], lower=True),
                )
            )
    header = ("shape", "batch x prompt", "step ms", "vLLM 0.26", "floor ms", "of the floor", "bar")
    return markdown_table(header, rows)


def devices_table() -> str:
    """Tensor parallelism: a column per result that is there; those of two devices are of one machine."""
    columns = {"one H200": "", "two, NCCL": "-tp2-nccl", "two, own sums": "-tp2"}
    names = {header: f"{SHAPES[0]}{end}" for header, end in columns.items()}
    found = {
        header: load("offline", name)
        for header, name in names.items()
        if (HERE / "results" / f"offline-{name}.json").exists()
    }
    rows: list[tuple[object, ...]] = []
    for part, figure, form, label in (
        ("steps", "step_ms", ".3g", "decode step {batch} x {prompt}, ms"),
        ("prefill", "tok_s", ",.0f", "prefill {batch} x {prompt}, tok/s"),
        ("offline", "output_tok_s", ",.0f", "512 requests, output tok/s"),
    ):
        for i, load_of in enumerate(found["one H200"].get(part, ())):
            cells = [result.get(part, [])[i : i + 1] for result in found.values()]
            values = [f"{cell[0][figure]:{form}}" if cell else "" for cell in cells]
            rows.append((label.format(**load_of), *values))
    return markdown_table((SHAPES[0], *found), rows)


def quantized_table() -> str:
    """A quantized KV cache (fp8)."""
    plain, quantized = load("offline", SHAPES[0]), load("offline", f"{SHAPES[0]}-fp8")
    rows: list[tuple[object, ...]] = [
        (f"decode step {a['batch']} x {a['prompt']}, ms", a["step_ms"], b["step_ms"])
        for a, b in zip(plain["steps"], quantized["steps"], strict=True)
    ]
    rows += [
        (f"prefill {a['batch']} x {a['prompt']}, tok/s", f"{a['tok_s']:,.0f}", f"{b['tok_s']:,.0f}")
        for a, b in zip(plain["prefill"], quantized["prefill"], strict=True)
    ]
    return markdown_table((SHAPES[0], "bfloat16", "--kv-dtype fp8"), rows)


def rates_table() -> str:
    """Prefill and throughput, tokens per second."""
    rows: list[tuple[object, ...]] = []
    for shape in SHAPES:
        found = load("offline", shape)
        for row in found["prefill"]:
            peer = PEER_PREFILL[shape, row["batch"], row["prompt"]]
            load_name = f"prefill {row['batch']} x {row['prompt']}"
            met = verdict(row["tok_s"], row["bar"], lower=False)
            rows.append((shape, load_name, f"{row['tok_s']:,.0f}", f"{peer:,}", met))
        for row in found["offline"]:
            rate = row["output_tok_s"]
            met = verdict(rate, row["bar"], lower=False)
            rows.append((shape, "512 requests, output", f"{rate:,.0f}", PEER_OFFLINE[shape], met))
    return markdown_table(("shape", "load", "tok/s", "vLLM 0.26", "bar"), rows)


def server_table() -> str:
    """Closed loops."""
    rows = []
    for shape in SHAPES:
        for row in load("server", shape)["loads"]:
            rate, first, p99 = PEER[shape][row["users"]]
            met = verdict(row["out_tok_s"], round(1.15 * rate), lower=False)
            rows.append(
                (
                    shape,
                    row["users"],
                    f"{row['out_tok_s']:,.0f}",
                    f"{row['ttft_p50_ms']:.0f}",
                    f"{row['itl_p50_ms']:.1f} / {row['itl_p99_ms']:.1f}",
                    f"{rate:,}; {first}; {p99}",
                    met,
                )
            )
    names = ("out tok/s", "TTFT p50 ms", "ITL p50 / p99 ms", "vLLM 0.26: tok/s; TTFT p50; ITL p99")
    return markdown_table(("shape", "users", *names, "1.15 x"), rows)


def verify_table() -> str:
    """Steps that verify drafts, beside plain ones."""
    lines = load("verify", SHAPES[0])["lines"]
    drafts = [key.removesuffix("_times") for key in lines[0] if key.endswith("_times")]
    keys = [f"{count}_{kind}" for count in drafts for kind in ("ms", "times")]
    names = [name for count in drafts for name in (f"drafts {count}: ms", "times")]
    rows = [
        (row["rows"], row["context"], *(f"{row[key]:.2f}" for key in ("plain_ms", *keys)))
        for row in lines
    ]
    return markdown_table(("rows", "context", "plain ms", *names), rows)


def sampled_table() -> str:
    """Decode steps by sampling, where measured."""
    rows = [
        (shape, row["batch"], row["sampling"], row["step_ms"])
        for shape in SHAPES
        for row in load("offline", shape).get("drawn", ())
    ]
    return (
        markdown_table(("shape", "batch", "sampling", "step ms"), rows) if rows else "Not measured."
    )


def start_lines() -> str:
    """Start and gaps."""
    lines = []
    for shape in SHAPES:
        ready = ", ".join(f"{s:.1f}" for s in load("server", shape)["ready_s"])
        lines.append(f"- {shape}: `headrace serve` ready after {ready} s (dummy weights).")
        if (cold := load("server", shape).get("cold_ready_s")) is not None:
            lines.append(f"- {shape}: with an empty cache of kernels after {cold:.1f} s.")
        for row in load("offline", shape).get("gap", []):
            lines.append(
                f"- {shape}, batch {row['batch']}: the device idles {row['gap_us_p50']:.0f} us (p90 "
                f"{row['gap_us_p90']:.0f}) between steps, under the profiler."
            )
    return "\n".join(lines)


def main() -> None:
    readme = HERE / "README.md"
    head, rest = readme.read_text().split(MARK)
    notes = rest.split(END)[1]
    versions = load("offline", SHAPES[0])["versions"]
    parts = [
        head.rstrip(),
        MARK,
        f"One NVIDIA H200; {', '.join(f'{k} {v}' for k, v in versions.items())}; bfloat16.",
        "## Decode steps",
        steps_table(),
        "## Prefill and throughput",
        rates_table(),
        "## Several devices",
        devices_table(),
        "The sums alone: [all_reduce.md](all_reduce.md). Four devices: [four.md](four.md).",
        "## Quantized KV cache",
        quantized_table(),
        "## Server",
        "1024 random tokens in (+-50 %), 128 out, after one uncounted request per user.",
        server_table(),
        "## Steps that verify drafts",
        f"{SHAPES[0]}, with so many drafts of each row. Bar: 1.06 times a step for 3 drafts of one row. With more rows "
        "the GEMMs are no longer bound by the weights that they read: drafts cost time, and only what pays is drafted.",
        verify_table(),
        "## Random rows",
        sampled_table(),
        "## Start and idle time",
        start_lines(),
    ]
    readme.write_text("\n\n".join([*parts, END]) + notes)


if __name__ == "__main__":
    main()
