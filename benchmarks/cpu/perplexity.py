"""What lossy weights, files and KV caches cost the bundled model in perplexity, over held-out conversations.

    python -m benchmarks.cpu.perplexity --each 12 --write

Scored are the tokens the model was trained to write, each after the true text before it (prompt log-probabilities, so
the KV cache is read as in serving). The difference to bf16 is paired by token; beside it stands its standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.cpu.quality import FILES, write
from demo.packing import Document, documents
from demo.tasks.draw import TASKS, held_out_conversations
from headrace import LLM, SamplingParams
from headrace.back.quant.scheme import SCHEMES
from headrace.bench.report import markdown_table
from headrace.launch.locate import bundled_model

OUT = Path(__file__).resolve().parent / "perplexity.json"
KINDS: dict[str, dict[str, str]] = {
    "bf16": {},
    **{f"{name} weights": {"quantization": name} for name in SCHEMES},
    "int8 KV": {"kv_dtype": "int8"},
    "fp8 KV": {"kv_dtype": "fp8"},
    "fp8_e5m2 KV": {"kv_dtype": "fp8_e5m2"},
    "int4 KV": {"kv_dtype": "int4"},
    "int8 weights, int8 KV": {"quantization": "int8", "kv_dtype": "int8"},
    "int4 weights, fp8 KV": {"quantization": "int4", "kv_dtype": "fp8"},
}


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
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(Path(bundled_model()) / "tokenizer.json"))
    chats = [c for task in TASKS for c in held_out_conversations(task, given.each, seed=1)]
    found = [document for document in documents(tokenizer, chats) if len(document[0]) <= 4096]
    plain, results, rows = np.zeros(0), {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in (*KINDS, *FILES):
            model = write(Path(folder), name) if name in FILES else bundled_model()
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
