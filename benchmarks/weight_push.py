"""How fast new weights come into a running engine through shared memory: bytes a second of whole pushes, and what
running requests wait for.

    python -m benchmarks.weight_push [--shape qwen3-0.6b | --model M] [--pushes 5] [--rows 4]

The checkpoint lies in /dev/shm, as a trainer's safetensors would. Rows decode all the time; each push freezes them
(mode keep), replaces all weights in place, and lets them go on: no request is lost, and each answer names its
versions. Processor seconds of all processes stand beside the wall's, as shared machines have other work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.h200.shapes import write_model
from headrace import LLM, SamplingParams


def spent() -> float:
    """Processor seconds of this process and all below it."""
    own = psutil.Process()
    every = [own, *own.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in every)


def measured(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Pushes while rows decode."""
    model = Path(asked.model) if asked.model else write_model(folder, asked.shape)
    if not any(model.glob("*.safetensors")):
        fill(model)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    llm = LLM(str(model), kv_memory="512MiB", max_model_len=2048, device="cpu")
    ends, outputs = threading.Event(), list[Any]()
    params = SamplingParams(temperature=0.0, max_tokens=asked.tokens, ignore_eos=True)

    def decode() -> None:
        while not ends.is_set():
            prompts = [{"prompt_token_ids": [10 + row] * 8} for row in range(asked.rows)]
            outputs.extend(llm.generate(prompts, params))

    rows = threading.Thread(target=decode)
    rows.start()
    time.sleep(2.0)
    walls, cpus = [], []
    for number in range(asked.pushes + 1):
        began, used = time.perf_counter(), spent()
        version = llm.update_weights(str(model), mode="keep", version=f"push-{number}")
        assert version == f"push-{number}", version
        if number:  # the first brings pages and code into memory
            walls.append(time.perf_counter() - began)
            cpus.append(spent() - used)
        time.sleep(1.0)
    ends.set()
    rows.join()
    whole = [len(output.outputs[0].token_ids) == asked.tokens for output in outputs]
    mixed = sum("," in output.weights_version for output in outputs)
    llm.close()
    return {
        "model": asked.model or asked.shape,
        "bytes": size,
        "pushes": len(walls),
        "median_s": round(statistics.median(walls), 3),
        "gb_per_s": round(size / statistics.median(walls) / 1e9, 2),
        "least_s": round(min(walls), 3),
        "processor_s": round(statistics.median(cpus), 3),
        "answers": len(whole),
        "answers_cut": whole.count(False),
        "answers_of_several_versions": mixed,
    }


def fill(model: Path) -> None:
    """Random weights for a config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    from safetensors.torch import save_file

    tied = config.tie_word_embeddings
    save_file(
        {
            name: (torch.randn(x.shape) * 0.02).bfloat16()
            for name, x in shapes.items()
            if not (tied and name == "lm_head.weight")
        },
        model / "model.safetensors",
    )


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        print(json.dumps(measured(asked, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
