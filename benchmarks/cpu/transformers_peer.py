"""transformers as one of the engines, bf16, random weights (loads: answer.py).

    python benchmarks/cpu/transformers_peer.py MODEL --threads 2

The forward pass is driven step by step with a dynamic cache, greedy over all rows: generate()'s own work per step is
left out, so the figure flatters it.
"""

from __future__ import annotations

import argparse
import time

import torch
from answer import answer
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config = AutoConfig.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(streams: int, num_input: int, num_output: int) -> tuple[float, list[float]]:
        token_RT = torch.randint(0, config.vocab_size, (streams, num_input))
        cache, times = DynamicCache(config=config), []
        for _ in range(num_output):
            begin = time.perf_counter()
            out = model(token_RT, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token_RT = out.logits[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter() - begin)
        return times[0], times[1:]

    answer(run)


if __name__ == "__main__":
    main()
