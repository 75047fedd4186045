"""Writes the table of formats, kernels, speeds and losses into docs/QUANTIZATION.md, from figures that other scripts
have measured and stored.

    python -m benchmarks.cpu.quality_page

Loss: perplexity.json (the bundled model), tasks_mixture.json (the bundled mixture, with the tasks of quality.py), right
answers of quality.json. Speed: engines.json (Qwen3-0.6B's shape on two CPU cores), ../h200/results/offline-qwen3-8b*
(decode steps on one H200, 128 tokens in).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.cpu.quality import PERPLEXITY

FOLDER = Path(__file__).resolve().parent
DOCS = FOLDER.parents[1] / "docs" / "QUANTIZATION.md"
RESULTS = FOLDER.parent / "h200" / "results"
BEGIN, END = "<!-- benchmarks/cpu/quality_page.py -->\n", "<!-- end of its table -->\n"
H200 = {
    "bf16": "offline-qwen3-8b.json",
    "fp8": "offline-qwen3-8b-fp8-weights.json",
    "int4-g128": "offline-qwen3-8b-int4-rows.json",
}
AS_FP8 = "as fp8, by groups"
KERNELS = {
    "bf16": ("panels of bfloat16", "ours by rows, the library's"),
    "int8": (
        "int8 by int8, a scale per token",
        "streamed; int8 by int8 from 65 tokens, where asked for",
    ),
    "int8-g32": ("the same, by groups", "streamed; experts by tiles"),
    "fp8": ("e4m3 to bfloat16 in registers", "e4m3 by e4m3 from 2 tokens"),
    "fp8-tensor": ("as fp8", "as fp8"),
    "fp8-block": (AS_FP8, "as fp8, by groups"),
    "mxfp8": (AS_FP8, "streamed; from 65 tokens dequantized; experts by tiles"),
    "int4": ("int8 by integers, by groups", "streamed up to 256 tokens"),
    "int4-g128": ("int8 by integers, by groups", "streamed up to 256 tokens"),
    "mxfp4": ("int8 by integers, by groups", "streamed up to 256 tokens"),
    "nvfp4": ("int8 by integers, by groups", "streamed up to 256 tokens"),
}
"""Scheme -> kernels of CPUs and of CUDA."""
CPU_ROWS = {"bf16": "bf16", "int8": "int8", "int4": "int4"}


def read(path: Path) -> Any:
    """A file of figures."""
    return json.loads(path.read_text())


def cpu_speed(engines: Any, precision: str) -> str:
    """Tokens per second: one stream, 32 streams, a prompt of 512."""
    decode = {
        row["streams"]: row["engines"]["headrace"]
        for row in engines["decode"]["rows"]
        if row["precision"] == precision
    }
    (prefill,) = (
        row["engines"]["headrace"]
        for row in engines["prefill"]["rows"]
        if row["precision"] == precision and row["prompt"] == 512
    )
    return f"{decode[1]:.0f} / {decode[32]:.0f} / {prefill:,.0f}"


def gpu_speed(file: str) -> str:
    """Milliseconds of a decode step of one row and of 32."""
    steps = {step["batch"]: step["step_ms"] for step in read(RESULTS / file)["steps"]}
    return f"{steps[1]:.2f} / {steps[32]:.2f}"


def gpu_ratios(scheme: str) -> str:
    """How many times as quick as bfloat16 in the newest run that has the scheme: decode steps of one row and of 32,
    prompts of 16 x 1024."""
    runs = (read(RESULTS / f"schemes{run}.json")["rows"] for run in ("-3", "-2", ""))
    tables = ({row["case"]: row for row in reversed(run)} for run in runs)
    rows = next((table for table in tables if scheme in table), None)
    if rows is None or scheme == "bf16":
        return ""
    own, plain = rows[scheme], rows["bf16"]
    steps = [plain[name] / own[name] for name in ("decode b1, ms", "decode b32, ms")]
    prefill = "prefill 16 x 1024, tok/s"
    return " / ".join(f"{one:.2f}" for one in (*steps, own[prefill] / plain[prefill]))


def right_answers(shares: dict[str, float] | None) -> str:
    """The mean over the tasks."""
    if shares is None:
        return ""
    tasks = [share for task, share in shares.items() if task != PERPLEXITY]
    return f"{100 * sum(tasks) / len(tasks):.1f} %"


def main() -> None:
    """Writes the table between its marks."""
    losses = read(FOLDER / "perplexity.json")
    text, mixture = read(FOLDER / "quality.json"), read(FOLDER / "tasks_mixture.json")
    engines = read(FOLDER / "engines.json")["qwen3-0.6b"]
    plain, plain_mixture = losses["kinds"]["bf16"], mixture["shares"]["bf16"]
    lines = [
        "| scheme | CPU | tok/s | CUDA | ms | x bf16 | perplexity | right | mixture's perplexity | right |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (cpu, cuda) in KERNELS.items():
        kind = losses["kinds"].get("bf16" if name == "bf16" else f"{name} weights")
        own = mixture["shares"].get(name)
        cells = [
            name, cpu, cpu_speed(engines, CPU_ROWS[name]) if name in CPU_ROWS else "", cuda,
            gpu_speed(H200[name]) if name in H200 else "", gpu_ratios(name),
            _change(kind and kind["perplexity"], plain["perplexity"]),
            right_answers(text["shares"].get(name)),
            _change(own and own[PERPLEXITY], plain_mixture[PERPLEXITY]), right_answers(own),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    head = (
        "tok/s: Qwen3-0.6B's shape on two cores, one stream / 32 streams / a prompt of 512\n"
        "([engines.md](../benchmarks/cpu/engines.md)); ms: decode steps of Qwen3-8B of 1 / 32 rows on one H200\n"
        "([quantized.md](../benchmarks/h200/quantized.md)); x bf16: how many times as quick decode steps of 1 / 32\n"
        "rows and prompts of 16 x 1024 are there, in one run (blocks of 32 rows before they were mended).\n"
        "Perplexity: of the bundled model over "
        f"{losses['tokens']:,} tokens, of the\nbundled mixture over the true answers; beside bf16's. Right: of "
        f"{len(plain_mixture) - 1} tasks, {text['count']} held-out items each,\n{mixture['count']} of the mixture. "
        "Empty: not measured.\n\n"
    )
    before, _, rest = DOCS.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(before + BEGIN + head + "\n".join(lines) + "\n" + END + after)


def _change(perplexity: float | None, plain: float) -> str:
    if perplexity is None:
        return ""
    return f"{plain:.4f}" if perplexity == plain else f"{100 * (perplexity / plain - 1):+.2f} %"


if __name__ == "__main__":
    main()
