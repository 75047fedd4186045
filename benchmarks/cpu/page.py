"""engines.md from the stored results: every row with its bar, whether it is met, and the reason where it is not."""

from __future__ import annotations

from typing import Any

from headrace.bench.report import markdown_table

PARAMETERS = (
    440.5e6  # multiplied per prompt token: all but the head, of which a prompt needs one row
)
LAYERS, HEADS, HEAD_DIM = 28, 16, 128
MIB = 1 << 20
NOT_COMPARED = {
    "onnxruntime-genai at bf16 and int8": "its builder makes neither for a CPU; int4 (groups of 32) is in the tables",
    "llama_cpp.server": "answers one request at a time; llama-server does not",
}
"""Peers that are not in the tables, and why."""
_GROUPS = (
    "each 32 inputs end a tile's sum: its store, and per row a conversion, a product of scales and a fused sum (1.2 "
    "ns, see the README), beside 5.9 ns of the tile for 16 rows; groups of 128 pay a quarter of that"
)
REASONS: dict[str, str] = {
    "decode bf16 1": "the shared host's memory: seven minutes later the same step was at 18.3 tok/s (last section), "
    "93 % of this row's reading",
    "decode int4 1": "the shared host's memory, in part: a step of 18.7 ms here, of 14.2 when it was profiled, 12.7 of "
    "them products at 26 GB/s, 0.9 attention, 0.3 norms, rotation and choice, 0.3 between steps",
    "decode int4 8": "within the spread: 1.59 in the run before, 1.49 in this one",
    "prefill int8 2048": "attention is a fifth of the operations and computes in bf16, at some 900 GFLOP/s: 87 % at "
    "most; of the rest no more is known than that the same prompt of 512 ran at 860 and at 1,244 tok/s (last section)",
    "prefill int4 512": _GROUPS,
    "prefill int4 2048": _GROUPS,
    "start": "torch alone takes more than a second to import: 1,123 Python modules, the collector already off; those "
    "it does not need import each other in a circle and cannot be put off",
}
"""Row -> why its bar is missed: what counters, bytes or cycles say."""


def page(stored: dict[str, Any]) -> str:
    """The whole page."""
    parts = [
        "# The CPU path beside other engines",
        "",
        "Made by `python -m benchmarks.cpu.run --write`: Qwen3-0.6B shape, random weights, greedy, engines in turn",
        "(A B A B), each loaded once per precision in a process of its own; medians. Compare within a row.",
        "",
    ]
    for kind, (title, make) in SECTIONS.items():
        if kind in stored:
            parts += [f"## {title}", "", _facts(stored[kind]), "", *make(stored[kind]["rows"]), ""]
    parts += ["## Not compared", "", *(f"- {name}: {why}." for name, why in NOT_COMPARED.items())]
    return "\n".join(parts) + "\n"


def _facts(section: dict[str, Any]) -> str:
    if section.get("quick"):
        return "**A try of the script with tiny loads: no figure here means anything.**"
    facts = ", ".join(f"{name} {value}" for name, value in section["versions"].items())
    return (
        f"{section['when']}, {section['rounds']} rounds, {section['threads']} threads, load average at the end "
        f"{section['load']:.1f}; {facts}."
    )


def _verdict(row: str, *met: bool | None) -> str:
    """met, missed with its reason, or that nothing was there to compare with."""
    if None in met:
        return "nothing to compare with" if False not in met else _missed(row)
    return "met" if all(met) else _missed(row)


def _missed(row: str) -> str:
    return f"missed: {REASONS.get(row, 'reason not found yet')}"


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


def _decode(rows: list[dict[str, Any]]) -> list[str]:
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
                      f"{row['read_gb_s']:.1f}", f"{share:.0%}" if share else "-", _verdict(key, *met)])  # fmt: skip
    header = ["precision", "streams", *names, "ours / fastest other", "ours / llama.cpp", "read GB/s",
              "share of reading", "bar"]  # fmt: skip
    bars = (
        "Bars: one stream 1.05 x the fastest other and 85 % of reading; 8 and 32 streams 1.5 x llama.cpp and 1.2 x the "
        "fastest."
    )
    return [f"Tokens per second. {bars}", "", markdown_table(header, shown)]


def prefill_operations(length: int) -> float:
    """Operations per token of a prompt: products, and attention over half of it on average."""
    return 2 * PARAMETERS + 4 * LAYERS * HEADS * HEAD_DIM * length / 2


def _prefill(rows: list[dict[str, Any]]) -> list[str]:
    names, shown = _names(rows), []
    for row in rows:
        fastest, ours = _ratio(row["engines"]), row["engines"]["headrace"]
        share = (
            ours * prefill_operations(row["prompt"]) / 1e9 / row["peak_gflops"]
            if isinstance(ours, float)
            else None
        )
        key = f"prefill {row['precision']} {row['prompt']}"
        shown.append([row["precision"], row["prompt"], *_cells(row["engines"], names), _show(fastest),
                      f"{row['peak_gflops']:,.0f}", f"{share:.0%}" if share else "-",
                      _verdict(key, _at_least(fastest, 1.1), _at_least(share, 0.6))])  # fmt: skip
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


def _server(rows: list[dict[str, Any]]) -> list[str]:
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
    verdict = _verdict("server", _at_least(rate, 1.5), _at_least(itl, 1.5))
    return [
        markdown_table(header, shown),
        "",
        f"Bar: 1.5 x {name} in output tok/s ({_show(rate)}) and in p99 ITL ({_show(itl)}): {verdict}.",
    ]


def _start(rows: list[dict[str, Any]]) -> list[str]:
    shown = []
    for row in rows:
        verdict, imports = "-", "-"
        if "imports_s" in row:
            verdict = _verdict("start", row["first_token_s"] <= 2.5, row["imports_s"] <= 1.0)
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


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    shown = []
    for row in rows:
        over = (row["held_bytes"] - row["weight_bytes"] - row["kv_bytes"]) / MIB
        peak = (row["peak_bytes"] - row["weight_bytes"] - row["kv_bytes"]) / MIB
        sizes = (f"{row[k] / MIB:,.0f}" for k in ("weight_bytes", "kv_bytes", "held_bytes"))
        shown.append([row["precision"], *sizes,
                      f"{over:,.0f}", f"{peak:,.0f}",
                      _verdict(f"memory {row['precision']}", over * MIB <= 300e6)])  # fmt: skip
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


def _plan(rows: list[dict[str, Any]]) -> list[str]:
    shown = [
        [row["precision"], row["load"], f"{row['foretold']:,.0f}", f"{row['measured']:,.0f}",
         f"{row['measured'] / row['foretold']:.0%}", f"{row['probe_s']:.2f}",
         _verdict("plan", row["probe_s"] < 0.5)]
        for row in rows if row["measured"] is not None
    ]  # fmt: skip
    header = ["precision", "load", "foretold tok/s", "measured tok/s", "measured / foretold",
              "slowest probe s", "bar: 0.5 s"]  # fmt: skip
    return ["`headrace plan` before, the engine after it.", "", markdown_table(header, shown)]


SECTIONS = {
    "decode": ("Decode", _decode),
    "prefill": ("Prefill of one prompt", _prefill),
    "server": ("Server, bf16, 16 streams of 256 tokens in and 128 out", _server),
    "start": ("Start of a server from a safetensors checkpoint in the file cache", _start),
    "memory": ("Memory", _memory),
    "plan": ("What plan foretells", _plan),
}
