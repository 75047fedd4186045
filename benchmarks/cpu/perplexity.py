"""What lossy weights, files and KV caches cost the bundled model in perplexity, over held-out conversations.

    python -m benchmarks.cpu.perplexity --each 12 --write [--only "int4 KV,int4-g128 by GPTQ"]

Scored are the tokens the model was trained to write, each after the true text before it (prompt log-probabilities, so
the KV cache is read as in serving). "by GPTQ", "by AWQ" and "to nearest" are checkpoints that `headrace quantize`
writes, calibrated with 16,384 tokens of training conversations. The difference to bf16 is paired by token; beside it
stands its standard error.
--only measures some kinds and keeps the other figures.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from benchmarks.cpu.quality import FILES, write
from demo.packing import Document, documents
from demo.tasks.draw import TASKS, held_out_conversations, training_conversation
from headrace import LLM, SamplingParams
from headrace.back.quant.scheme import ONLINE_SCHEMES
from headrace.base.config.tree import ModelOptions, Options
from headrace.bench.report import markdown_table
from headrace.launch.facts import resolve_options
from headrace.launch.locate import bundled_model
from headrace.launch.quantize import quantize_checkpoint

OUT = Path(__file__).resolve().parent / "perplexity.json"
KINDS: dict[str, dict[str, str]] = {
    "bf16": {},
    **{f"{name} weights": {"quantization": name} for name in ONLINE_SCHEMES},
    "int8 KV": {"kv_dtype": "int8"},
    "fp8 KV": {"kv_dtype": "fp8"},
    "fp8_e5m2 KV": {"kv_dtype": "fp8_e5m2"},
    "int4 KV": {"kv_dtype": "int4"},
    "nvfp4 KV": {"kv_dtype": "nvfp4"},
    "int4-rotated KV": {"kv_dtype": "int4-rotated"},
    "int3-rotated KV": {"kv_dtype": "int3-rotated"},
    "turboquant-4bit KV": {"kv_dtype": "turboquant-4bit"},
    "turboquant-3bit KV": {"kv_dtype": "turboquant-3bit"},
    "int8 weights, int8 KV": {"quantization": "int8", "kv_dtype": "int8"},
    "int4 weights, fp8 KV": {"quantization": "int4", "kv_dtype": "fp8"},
}


WRITTEN = {
    **{
        f"{name} by GPTQ": (name, "gptq")
        for name in ("int4", "int4-g128", "int4-asym-g128", "int8", "fp8")
    },
    **{f"{name} by AWQ": (name, "awq") for name in ("int4", "int4-g128", "int4-asym-g128")},
    **{f"{name} to nearest": (name, "") for name in ("int4-g128", "int4-asym-g128")},
}
"""What `headrace quantize` writes: scheme and method."""


def calibration(tokenizer: Tokenizer) -> list[list[int]]:
    """16,384 tokens of training conversations, in texts of 512."""
    rng, ids = Random("calibration"), []
    while len(ids) < 16384:
        ((document, _),) = documents(tokenizer, [training_conversation(rng)])
        ids += document.tolist()
    return [ids[start : start + 512] for start in range(0, 16384, 512)]


def written(folder: Path, name: str, tokenizer: Tokenizer) -> Path:
    """The bundled model, as a kind of WRITTEN."""
    scheme, method = WRITTEN[name]
    texts = calibration(tokenizer) if method else []
    resolved = resolve_options(
        Options(model=ModelOptions(model=str(bundled_model()), dtype="bfloat16"))
    )
    out = folder / name.replace(" ", "-")
    quantize_checkpoint(resolved.engine.model, out, scheme, texts=texts, method=method or "gptq")
    return out


def losses(found: list[Document], model: Path, options: dict[str, str]) -> np.ndarray:
    """Negative log-probability of every learnt token, in order."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(model), dtype="bfloat16", prefix_caching=False, **options) as llm:
        outputs = llm.generate([ids.tolist() for ids, _ in found], params, progress=False)
    values = []
    for output, (_, learnt) in zip(outputs, found, strict=True):
        assert output.prompt_logprobs is not None
        for scored, wanted in zip(output.prompt_logprobs, learnt, strict=True):
            if scored is not None and wanted:
                values.append(-scored.token.logprob)
    return np.array(values)


def main() -> None:
    """Prints the table, and stores it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=12, help="conversations per task")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="kinds, separated by commas")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(Path(bundled_model()) / "tokenizer.json"))
    chats = [c for task in TASKS for c in held_out_conversations(task, given.each, seed=1)]
    found = [document for document in documents(tokenizer, chats) if len(document[0]) <= 4096]
    plain, results, rows = np.zeros(0), {}, []
    names = [name for name in given.only.split(",") if name]
    if names and given.write:
        kept = json.loads(OUT.read_text())
        assert kept["each"] == given.each, (kept["each"], given.each)
        results = kept["kinds"]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("bf16", *names) if names else (*KINDS, *FILES, *WRITTEN):
            model = bundled_model()
            if name in FILES:
                model = write(Path(folder), name)
            elif name in WRITTEN:
                model = written(Path(folder), name, tokenizer)
            values = losses(found, model, KINDS.get(name, {}))
            plain = values if name == "bf16" else plain
            change = values - plain
            results[name] = figures = {
                "perplexity": math.exp(values.mean()),
                "loss_change": float(change.mean()),
                "standard_error": float(change.std() / math.sqrt(len(change))),
            }
            rows.append([name, f"{figures['perplexity']:.4f}", f"{figures['loss_change']:+.5f}",
                         f"{figures['standard_error']:.5f}"])  # fmt: skip
            print(rows[-1], flush=True)
    about = {
        "conversations": len(found),
        "tokens": len(plain),
        "each": given.each,
        "kinds": results,
    }
    print(markdown_table(["kind", "perplexity", "change of the loss", "standard error"], rows))
    if given.write:
        OUT.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
