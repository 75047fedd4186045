"""What `--quantization`, block-quantized files and the int8 KV cache cost in answers: `headrace eval` of the
bundled model, beside bf16.

    python -m benchmarks.cpu.quality --count 100 --out benchmarks/cpu/quality.json [--types= to leave files out]

What --out holds for the same count already is not run again, so that it can be made in pieces. `--demo mixture` asks
the bundled mixture instead (tasks_mixture.json); `--kv` the bundled model with every KV cache type too. The table of
docs/QUANTIZATION.md: quality_page.py.

The bundled model is written as GGUF by the `gguf` library; Q4_K where rows have 256-input blocks, Q5_0 elsewhere, as
converters do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import gguf
import msgspec
import torch
import transformers

from headrace.back.quant.scheme import ONLINE_SCHEMES
from headrace.base.config.tree import Options
from headrace.bench.held_out import OF_DEMO, read_items
from headrace.cli.eval import chosen_items, score_model
from headrace.cli.model_argument import with_model
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


PERPLEXITY = "perplexity"
KV = ("int8", "fp8", "fp8_e5m2", "int4")
MODELS = {"text": "bundled model", "mixture": "bundled mixture"}


def evaluate(model: Path, demo: str, *, count: int, **options: str) -> dict[str, float]:
    """Share of right answers by task; `PERPLEXITY`: that of the right answers."""
    changes = {"model": {}, "kv": {"kv_dtype": options.get("kv_dtype", "auto")}}
    changes["model"] = {"quantization": options.get("quantization", "none")}
    tree = with_model(msgspec.convert(changes, Options), str(model))
    items = chosen_items(read_items(OF_DEMO[demo]), "", count)
    scores, answers = asyncio.run(score_model(tree, items, 4, read=True))
    logprobs = [one.token.logprob for task in answers for answer in task for one in answer.scores]
    found = {score.task: score.share for score in scores}
    return found | {PERPLEXITY: math.exp(-sum(logprobs) / len(logprobs))}


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
    parser.add_argument("--schemes", default=",".join(ONLINE_SCHEMES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--demo", default="text", choices=tuple(MODELS))
    parser.add_argument("--kv", action="store_true", help="every KV cache type too")
    own = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    results = stored(own.out, own.count)
    options: dict[str, dict[str, str]] = {"bf16": {}}
    options |= {name: {"quantization": name} for name in filter(None, own.schemes.split(","))}
    if own.demo == "text":  # the mixture's latents have no quantized cache
        kinds = KV if own.kv else ("int8",)
        options |= {f"bf16, {kind} KV": {"kv_dtype": kind} for kind in kinds}
    for name, words in options.items():
        if name not in results:
            results[name] = evaluate(bundled_model(own.demo), own.demo, count=own.count, **words)
            keep(own.out, own.count, results)
    with tempfile.TemporaryDirectory() as folder:
        for kind in filter(None, own.types.split(",")):
            if kind not in results:
                results[kind] = evaluate(write(Path(folder), kind), "text", count=own.count)
                keep(own.out, own.count, results)
    for name, shares in results.items():
        mean = _mean(shares)
        cells = " | ".join(f"{share:.2f}" for share in shares.values())
        print(f"| {name} | {mean:.3f} | {cells} |")


def _mean(shares: dict[str, float]) -> float:
    tasks = [share for task, share in shares.items() if task != PERPLEXITY]
    return sum(tasks) / len(tasks)


if __name__ == "__main__":
    main()
