"""What `--quantization`, block-quantized files and the int8 KV cache cost in answers: `headrace eval` of the
bundled model, beside bf16.

    python -m benchmarks.cpu.quality --count 100 --out benchmarks/cpu/quality.json [--types= to leave files out]

What --out holds for the same count already is not run again, so that it can be made in pieces.

The bundled model is written as GGUF by the `gguf` library; Q4_K where rows have 256-input blocks, Q5_0 elsewhere, as
converters do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

from headrace.back.quant.scheme import SCHEMES
from headrace.launch.locate import bundled_model
from tests.back.models.load.checkpoints import write_gguf
from tests.e2e.test_gguf_model import add_tokenizer
from tests.kernels.native.blocks import encode

FILES = {"Q8_0": "Q8_0", "Q5_1": "Q5_1", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q4_K": "Q5_0"}
"""Type of a file -> the type of its rows that have no whole number of blocks of 256."""


Results = dict[str, dict[str, float]]
"""What is lossy -> task -> share of right answers."""


def write(folder: Path, kind: str) -> Path:
    """The bundled model in one block type."""

    def quantize(name: str, values: Any) -> tuple[Any, Any]:
        chosen = kind if values.shape[1] % 256 == 0 or not kind.endswith("_K") else FILES[kind]
        return encode(chosen, values), gguf.GGMLQuantizationType[chosen]

    model = transformers.AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)
    return write_gguf(
        folder / f"{kind}.gguf", "qwen3", model, quantize=quantize, extra=add_tokenizer
    )


def evaluate(model: Path, *options: str, count: int) -> dict[str, float]:
    """Share of right answers by task."""
    command = [
        sys.executable,
        "-m",
        "headrace",
        "eval",
        str(model),
        "--json",
        "--count",
        str(count),
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return {task: score["share"] for task, score in json.loads(line).items()}


def stored(out: Path | None, count: int) -> Results:
    """What was found before, over as many answers."""
    if out is None or not out.exists():
        return {}
    found = json.loads(out.read_text())
    return dict(found["shares"]) if found["count"] == count else {}


def keep(out: Path | None, count: int, results: Results) -> None:
    """Stores what is there so far."""
    print(list(results.items())[-1], flush=True)
    if out is not None:
        out.write_text(json.dumps({"count": count, "shares": results}, indent=2) + "\n")


def main() -> None:
    """Prints a table; a cell is the share of right answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--types", default=",".join(FILES))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--out", type=Path)
    own = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    results = stored(own.out, own.count)
    options: dict[str, tuple[str, ...]] = {"bf16": ()}
    options |= {name: ("--quantization", name) for name in filter(None, own.schemes.split(","))}
    options["bf16, int8 KV"] = ("--kv-dtype", "int8")
    for name, words in options.items():
        if name not in results:
            results[name] = evaluate(bundled_model(), *words, count=own.count)
            keep(own.out, own.count, results)
    with tempfile.TemporaryDirectory() as folder:
        for kind in filter(None, own.types.split(",")):
            if kind not in results:
                results[kind] = evaluate(write(Path(folder), kind), count=own.count)
                keep(own.out, own.count, results)
    for name, shares in results.items():
        mean = sum(shares.values()) / len(shares)
        cells = " | ".join(f"{share:.2f}" for share in shares.values())
        print(f"| {name} | {mean:.3f} | {cells} |")


if __name__ == "__main__":
    main()
