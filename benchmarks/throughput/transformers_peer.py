"""The same load as `headrace bench latency`, run by transformers' own generate: one JSON object on one line.

    python benchmarks/throughput/transformers_peer.py MODEL --batch-size 8 --input-len 128 --output-len 32

MODEL is a folder; without weights in it the model gets random ones. Batch of equal lengths, greedy, eos ignored.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def load(folder: str) -> torch.nn.Module:
    """The model in bf16, from weights or from its configuration alone."""
    if list(Path(folder).glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )


def timed(model: torch.nn.Module, prompt_BI: torch.Tensor, num_output: int) -> float:
    """Seconds for `num_output` greedy tokens per row."""
    begin = time.perf_counter()
    model.generate(
        prompt_BI, attention_mask=torch.ones_like(prompt_BI), do_sample=False,
        min_new_tokens=num_output, max_new_tokens=num_output, pad_token_id=0,
    )  # fmt: skip
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for flag, default in (
        ("--batch-size", 1),
        ("--input-len", 128),
        ("--output-len", 32),
        ("--iterations", 1),
    ):
        parser.add_argument(flag, type=int, default=default)
    given = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    model = load(given.model).eval()
    start_s = time.perf_counter() - begin
    prompt = torch.randint(0, model.config.vocab_size, (given.batch_size, given.input_len))
    with torch.inference_mode():
        timed(model, prompt[:, :8], 2)
        prefill = min(timed(model, prompt, 1) for _ in range(given.iterations))
        total = min(timed(model, prompt, given.output_len) for _ in range(given.iterations))
    step_s = (total - prefill) / (given.output_len - 1)
    print(
        json.dumps(
            {
                "prefill_tok_s": given.batch_size * given.input_len / prefill,
                "decode_step_ms": step_s * 1e3,
                "decode_tok_s": given.batch_size / step_s,
                "start_s": start_s,
            }
        )
    )


if __name__ == "__main__":
    main()
