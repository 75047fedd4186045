"""Scores a model folder with `transformers`, greedily, on held-out items: the reference result.

python -m demo.check --model demo/model --count 200
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.tasks import EVAL_TASKS, generate_eval
from headrace.bench.held_out import EvalItem
from headrace.bench.scoring import score

BAR = {"copy": 0.95, "recall": 0.95, "arithmetic": 0.95, "tool_call": 0.95, "json": 0.95}
"""What the shipped model must reach."""


class Greedy:
    """Greedy answers in batches, padded on the left."""

    def __init__(self, folder: Path, *, device: str, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval()
        self.device = device

    @torch.inference_mode()
    def answers(self, items: list[EvalItem]) -> list[str]:
        """The raw text of each answer."""
        prompts = [
            self.tokenizer.apply_chat_template(
                item.messages, tools=item.tools, tokenize=False, add_generation_prompt=True,
                **item.template_kwargs,
            )
            for item in items
        ]  # fmt: skip
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        inputs.pop("token_type_ids", None)
        longest = max(item.max_tokens for item in items)
        output = self.model.generate(
            **inputs, do_sample=False, temperature=None, top_p=None, max_new_tokens=longest
        )
        new = output[:, inputs["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(new, skip_special_tokens=False)


def main() -> None:
    """Scores every task; the exit status says whether the bar is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", nargs="*", default=list(EVAL_TASKS))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--show", type=int, default=2, help="wrong answers to print per task")
    arguments = parser.parse_args()
    greedy = Greedy(arguments.model, device=arguments.device, dtype=getattr(torch, arguments.dtype))
    reached = True
    for task in arguments.tasks:
        items = generate_eval(task, arguments.count, arguments.seed)
        wrong: list[tuple[EvalItem, str]] = []
        size = arguments.batch if not task.startswith("recall_") else max(1, arguments.batch // 8)
        for at in range(0, len(items), size):
            some = items[at : at + size]
            answers = greedy.answers(some)
            wrong += [(i, a) for i, a in zip(some, answers, strict=True) if not score(i, a)]
        share = 1 - len(wrong) / len(items)
        reached &= share >= BAR.get(task, 0.0)
        print(json.dumps({"task": task, "count": len(items), "score": round(share, 4)}), flush=True)
        for item, text in wrong[: arguments.show]:
            asked = item.messages[-1]["content"][-300:]
            print(f"   asked {asked!r}\n   wanted {item.expected!r}\n   got {text[:300]!r}")
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main()
