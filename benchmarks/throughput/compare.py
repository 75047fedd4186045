"""headrace beside transformers in the same run, interleaved A B A B, medians; writes benchmarks/throughput/README.md.

python benchmarks/throughput/compare.py --rounds 2 --write
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from headrace.bench.report import markdown_table, versions

HERE = Path(__file__).resolve().parent
MODELS = {
    "bundled model": (HERE.parents[1] / "demo" / "model", "safetensors"),
    "Qwen3-0.6B shape": (HERE.parent / "models" / "qwen3-0.6b", "dummy"),
}
NUM_INPUT, NUM_OUTPUT = 64, 32
FIGURES = ("prefill_tok_s", "decode_tok_s", "decode_step_ms", "start_s")


def run(command: list[str]) -> dict[str, float]:
    """The JSON object a command prints last."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def once(
    engine: str, folder: Path, load_format: str, batch: int, num_input: int, num_output: int
) -> dict[str, float]:
    """One measurement by one engine in a process of its own."""
    shape = [
        "--batch-size",
        str(batch),
        "--input-len",
        str(num_input),
        "--output-len",
        str(num_output),
    ]
    if engine == "transformers":
        return run([sys.executable, str(HERE / "transformers_peer.py"), str(folder), *shape])
    options = [
        "--load-format",
        load_format,
        "--dtype",
        "bfloat16",
        "--iterations",
        "2",
        "--max-model-len",
        "2048",
    ]
    return run(
        [
            sys.executable,
            "-m",
            "headrace",
            "bench",
            "latency",
            "--json",
            "--model",
            str(folder),
            *options,
            *shape,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = []
    for name in given.models.split(","):
        folder, load_format = MODELS[name]
        for batch in map(int, given.batches.split(",")):
            seen: dict[str, list[dict[str, float]]] = {"headrace": [], "transformers": []}
            for _ in range(given.rounds):
                for engine, runs in seen.items():
                    runs.append(once(engine, folder, load_format, batch, NUM_INPUT, NUM_OUTPUT))
            ours, theirs = (
                {f: statistics.median(r[f] for r in seen[engine]) for f in FIGURES}
                for engine in seen
            )
            rows.append(
                [name, batch]
                + [f"{ours[f]:.4g} / {theirs[f]:.4g}" for f in FIGURES]
                + [
                    f"{ours['decode_tok_s'] / theirs['decode_tok_s']:.2f}",
                    f"{ours['prefill_tok_s'] / theirs['prefill_tok_s']:.2f}",
                ]
            )
            print(rows[-1], flush=True)
    header = [
        "model",
        "streams",
        *(f"{f} (headrace / transformers)" for f in FIGURES),
        "decode ratio",
        "prefill ratio",
    ]
    table = markdown_table(header, rows)
    print(table)
    if given.write:
        facts = ", ".join(f"{k} {v}" for k, v in versions().items())
        (HERE / "README.md").write_text(
            "# Throughput on a CPU beside transformers\n\n"
            "Made by `python benchmarks/throughput/compare.py --write`: bf16, 64 tokens in, 32 out, greedy,\n"
            f"both engines in processes of their own, in turn, medians of {given.rounds} rounds.\n"
            "Compare within a row: the machine is shared.\n"
            f"{facts}.\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
