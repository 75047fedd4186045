"""engines.md from the stored results: every row with its bar, whether it is met, and the reason where it is not."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.cpu.shapes import HERE, SHAPES, Shape
from headrace.bench.report import markdown_table

MIB = 1 << 20
NOT_COMPARED = {
    "onnxruntime-genai at bf16": "its builder makes no such model for a CPU",
    "OpenVINO GenAI from GGUF": "reads none of our files (bf16: Unsupported quantization type; Q8_0 and Q4_0: Check "
    "'edge' failed); the tables have its own format, made by optimum-intel",
    "llama_cpp.server": "answers one request at a time; llama-server does not",
}
"""Peers that are not in the tables, and why."""


def tables(features: Collection[str]) -> tuple[Path, Path]:
    """The stored results and the page of CPUs with such instruction sets: those with matrix tiles and those with
    vectors alone each have theirs, as bars are judged on both."""
    results = HERE / ("engines.json" if "amx_bf16" in features else "engines-vectors.json")
    return results, results.with_suffix(".md")


def page(stored: dict[str, Any]) -> str:
    """The whole page."""
    parts = [
        "# The CPU path beside other engines",
        "",
        "Made by `python -m benchmarks.cpu.run --write`: greedy, engines in turn (A B A B), each loaded once per",
        "precision in a process of its own; medians. Compare within a row.",
        "",
    ]
    for shape in SHAPES.values():
        if shape.name in stored:
            parts += _tables(shape, stored[shape.name])
    parts += ["## Not compared", "", *(f"- {name}: {why}." for name, why in NOT_COMPARED.items())]
    return "\n".join(parts) + "\n"


def _tables(shape: Shape, stored: dict[str, Any]) -> list[str]:
    """All sections of a shape."""
    parts = [f"## {shape.title}", ""]
    for kind, (title, make) in SECTIONS.items():
        if kind in stored:
            rows, why = stored[kind]["rows"], stored[kind].get("reasons", {})
            parts += [f"### {title}", "", _facts(stored[kind]), "", *make(rows, why), ""]
    return parts


def _facts(section: dict[str, Any]) -> str:
    if section.get("quick"):
        return "**A try of the script with tiny loads: no figure here means anything.**"
    facts = ", ".join(f"{name} {value}" for name, value in section["versions"].items())
    return (
        f"{section['when']}, {section['rounds']} rounds, {section['threads']} threads, load average at the end "
        f"{section['load']:.1f}; {facts}."
    )


def _verdict(why: str | None, *met: bool | None) -> str:
    """met, missed with its reason, or that nothing was there to compare with."""
    if None in met:
        return "nothing to compare with" if False not in met else _missed(why)
    return "met" if all(met) else _missed(why)


def _missed(why: str | None) -> str:
    return f"missed: {why or 'reason not found yet'}"


def _cells(engines: dict[str, float | str], names: list[str]) -> list[str]:
    return [
        f"{found:,.1f}" if isinstance(found := engines.get(name, "-"), float) else str(found)
        for name in names
    ]


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["engines"]))


def _ratio(engines: dict[str, float | str], *others: str) -> float | None:
    """Ours over the fastest of the others (all, if none is named)."""
    ours = engines["headrace"]
    theirs = [
        v for n, v in engines.items() if n != "headrace" and (not others or n in others) and isinstance(v, float)
    ]  # fmt: skip
    return ours / max(theirs) if theirs and isinstance(ours, float) else None


def _at_least(value: float | None, bar: float) -> bool | None:
    return None if value is None else value >= bar


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _decode(rows: list[dict[str, Any]], why: dict[str, str]) -> list[str]:
    names, shown = _names(rows), []
    for row in rows:
        engines, streams = row["engines"], row["streams"]
        fastest, llama = _ratio(engines), _ratio(engines, "llama.cpp")
        ours = engines["headrace"]
        share = (
            ours / streams * row["bytes"] / 1e9 / row["read_gb_s"]
            if isinstance(ours, float)
            else None
        )
        key = f"decode {row['precision']} {streams}"
        met = (
            (_at_least(fastest, 1.05), _at_least(share, 0.85))
            if streams == 1
            else (_at_least(llama, 1.5), _at_least(fastest, 1.2))
        )
        shown.append([row["precision"], streams, *_cells(engines, names), _show(fastest), _show(llama),
                      f"{row['read_gb_s']:.1f}", f"{share:.0%}" if share else "-",
                      _verdict(why.get(key), *met)])  # fmt: skip
    header = ["precision", "streams", *names, "ours / fastest other", "ours / llama.cpp", "read GB/s",
              "share of reading", "bar"]  # fmt: skip
    bars = (
        "Bars: one stream 1.05 x the fastest other and 85 % of reading; 8 and 32 streams 1.5 x llama.cpp and 1.2 x the "
        "fastest."
    )
    return [f"Tokens per second. {bars}", "", markdown_table(header, shown)]


def _prefill(rows: list[dict[str, Any]], why: dict[str, str]) -> list[str]:
    names, shown = _names(rows), []
    for row in rows:
        fastest, ours = _ratio(row["engines"]), row["engines"]["headrace"]
        share = (
            ours * row["operations"] / 1e9 / row["peak_gflops"] if isinstance(ours, float) else None
        )
        key = f"prefill {row['precision']} {row['prompt']}"
        shown.append([row["precision"], row["prompt"], *_cells(row["engines"], names), _show(fastest),
                      f"{row['peak_gflops']:,.0f}", f"{share:.0%}" if share else "-",
                      _verdict(why.get(key), _at_least(fastest, 1.1), _at_least(share, 0.6))])  # fmt: skip
    header = [
        "precision",
        "prompt",
        *names,
        "ours / fastest other",
        "peak GFLOP/s",
        "share of peak",
        "bar",
    ]
    bars = "Bars: 1.1 x the fastest other, 60 % of the peak of a large product (int8's for int8 and int4)."
    return [f"Tokens per second. {bars}", "", markdown_table(header, shown)]


def _server(rows: list[dict[str, Any]], why: dict[str, str]) -> list[str]:
    found = {row["engine"]: row for row in rows}
    shown = []
    for name, row in found.items():
        if "refused" in row:
            shown.append([name, row["refused"], "-", "-", "-"])
        else:
            shown.append([name, f"{row['output_tok_s']:,.1f}", f"{row['itl_p50_ms']:.0f}", f"{row['itl_p99_ms']:.0f}",
                          f"{row['ttft_p50_ms']:,.0f}"])  # fmt: skip
    ours = found.get("headrace", {})
    name = next((name for name in found if name.startswith("llama")), "llama-server")
    theirs = found.get(name, {})
    rate = itl = None
    if "output_tok_s" in ours and "output_tok_s" in theirs:
        rate = ours["output_tok_s"] / theirs["output_tok_s"]
        itl = theirs["itl_p99_ms"] / ours["itl_p99_ms"]
    header = ["server", "output tok/s", "ITL p50 ms", "ITL p99 ms", "TTFT p50 ms"]
    verdict = _verdict(why.get("server"), _at_least(rate, 1.5), _at_least(itl, 1.5))
    return [
        markdown_table(header, shown),
        "",
        f"Bar: 1.5 x {name} in output tok/s ({_show(rate)}) and in p99 ITL ({_show(itl)}): {verdict}.",
    ]


def _start(rows: list[dict[str, Any]], why: dict[str, str]) -> list[str]:
    shown = []
    for row in rows:
        verdict, imports = "-", "-"
        if "imports_s" in row:
            verdict = _verdict(
                why.get("start"), row["first_token_s"] <= 2.5, row["imports_s"] <= 1.0
            )
            beside = f"torch {row['torch_s']:.2f}; API process, beside, {row['api_imports_s']:.2f}"
            imports = f"{row['imports_s']:.2f} ({beside})"
        shown.append(
            [
                row["precision"],
                f"{row['ready_s']:.2f}",
                f"{row['first_token_s']:.2f}",
                imports,
                verdict,
            ]
        )
    header = ["precision", "ready s", "first token s", "imports s", "bar: 2.5 s, imports 1 s"]
    return [markdown_table(header, shown)]


def _memory(rows: list[dict[str, Any]], why: dict[str, str]) -> list[str]:
    shown = []
    for row in rows:
        over = (row["held_bytes"] - row["weight_bytes"] - row["kv_bytes"]) / MIB
        peak = (row["peak_bytes"] - row["weight_bytes"] - row["kv_bytes"]) / MIB
        sizes = (f"{row[k] / MIB:,.0f}" for k in ("weight_bytes", "kv_bytes", "held_bytes"))
        shown.append([row["precision"], *sizes,
                      f"{over:,.0f}", f"{peak:,.0f}",
                      _verdict(why.get(f"memory {row['precision']}"), over * MIB <= 300e6)])  # fmt: skip
    header = [
        "precision",
        "weights MiB",
        "KV MiB",
        "held MiB",
        "beyond MiB",
        "beyond at the peak MiB",
        "bar: 300 MB",
    ]
    return [
        "Held: PSS of all processes of the server after the first token; the peak sums resident sets.",
        "",
        markdown_table(header, shown),
    ]


def _plan(rows: list[dict[str, Any]], why: dict[str, str]) -> list[str]:
    shown = [
        [row["precision"], row["load"], f"{row['estimated']:,.0f}", f"{row['measured']:,.0f}",
         f"{row['measured'] / row['estimated']:.0%}", f"{row['probe_s']:.2f}",
         _verdict(why.get("plan"), row["probe_s"] < 0.5)]
        for row in rows if row["measured"] is not None
    ]  # fmt: skip
    header = ["precision", "load", "estimated tok/s", "measured tok/s", "measured / estimated",
              "slowest probe s", "bar: 0.5 s"]  # fmt: skip
    return ["`headrace plan` before, the engine after it.", "", markdown_table(header, shown)]


SECTIONS = {
    "decode": ("Decode", _decode),
    "prefill": ("Prefill of one prompt", _prefill),
    "server": ("Server, bf16, 16 streams of 256 tokens in and 128 out", _server),
    "start": ("Start of a server from a safetensors checkpoint in the file cache", _start),
    "memory": ("Memory", _memory),
    "plan": ("What plan estimates", _plan),
}
