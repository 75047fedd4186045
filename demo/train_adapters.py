"""Trains the two adapters that come with the bundled model, in PEFT's layout.

    python -m demo.train_adapters --out demo/adapters [--device cuda] [--steps 400]

`shout` answers plain questions in capitals, `quote` puts each answer between quotation marks. The
questions are those of demo/tasks; an answer is the right one, in the adapter's manner. Only the
adapter learns: rank 8 on query, key, value and output, 360,448 bytes each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo.decoder import Qwen3, Shape
from demo.packing import Document, documents
from demo.tasks import TASKS, Conversation
from demo.tasks.item import may_train

MODEL = Path(__file__).parent / "model"
RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MOST_TOKENS = 192
PLAIN = ("chat", "arithmetic", "sort", "count", "compare", "reverse", "pick", "copy")
"""Tasks of one question and one short answer."""
MANNERS: dict[str, Callable[[str], str]] = {
    "shout": str.upper,
    "quote": lambda text: f'"{text}"',
}
"""Name of an adapter -> what it makes of an answer."""


class AdaptedLinear(nn.Module):
    """A frozen linear layer, and what its adapter adds."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + ALPHA / RANK * F.linear(F.linear(x, self.a), self.b)


def adapted(device: str) -> tuple[Qwen3, dict[str, AdaptedLinear]]:
    """The shipped model with fresh adapters, by their modules' names."""
    model = Qwen3(Shape())
    model.load_state_dict(load_file(MODEL / "model.safetensors"))
    model.requires_grad_(False)
    layers = {}
    for number, layer in enumerate(model.model.layers):
        for name in TARGETS:
            linear = AdaptedLinear(getattr(layer.self_attn, name))
            setattr(layer.self_attn, name, linear)
            layers[f"model.layers.{number}.self_attn.{name}"] = linear
    return model.to(device), layers


def in_manner(conversation: Conversation, manner: Callable[[str], str]) -> Conversation:
    """The conversation whose answer is given in a manner."""
    *before, last = conversation.messages
    return replace(conversation, messages=[*before, {**last, "content": manner(last["content"])}])


def batches(
    tokenizer: Tokenizer, manner: Callable[[str], str], *, rows: int, seed: int
) -> Iterator[list[Document]]:
    """Endless batches of short plain conversations."""
    rng, waiting = Random(seed), []
    while True:
        fresh = [TASKS[rng.choice(PLAIN)](rng) for _ in range(2 * rows)]
        plain = [one for one in fresh if may_train(one.keys) and len(one.messages) == 2]
        made = documents(tokenizer, [in_manner(one, manner) for one in plain])
        waiting += [document for document in made if len(document[0]) <= MOST_TOKENS]
        while len(waiting) >= rows:
            yield waiting[:rows]
            del waiting[:rows]


def loss_of(model: Qwen3, batch: list[Document], device: str) -> Tensor:
    """Mean cross entropy over the learnt tokens, a row a conversation."""
    longest = max(len(ids) for ids, _ in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.long)
    targets = torch.full((len(batch), longest), -100)
    for row, (ids, learnt) in enumerate(batch):
        known = torch.from_numpy(ids.astype("int64"))
        tokens[row, : len(ids)] = known
        targets[row, : len(ids) - 1] = torch.where(torch.from_numpy(learnt[1:]), known[1:], -100)
    positions = torch.arange(longest).expand(len(batch), -1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return model.loss(tokens.to(device), targets.to(device), positions.to(device), attend)


def train(name: str, *, device: str, steps: int, rows: int, rate: float) -> dict[str, Tensor]:
    """An adapter's tensors by PEFT's names, bf16."""
    torch.manual_seed(0)
    model, layers = adapted(device)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    source = batches(tokenizer, MANNERS[name], rows=rows, seed=len(name))
    learning = [weight for layer in layers.values() for weight in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(learning, lr=rate, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        loss = loss_of(model, next(source), device)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(
                json.dumps({"adapter": name, "step": step, "loss": round(loss.item(), 4)}),
                flush=True,
            )
    halves = {"A": "a", "B": "b"}
    return {
        f"base_model.model.{module}.lora_{half}.weight": getattr(layer, field)
        .detach()
        .cpu()
        .bfloat16()
        .contiguous()
        for module, layer in layers.items()
        for half, field in halves.items()
    }


def main() -> None:
    """Reads the flags and trains both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-3)
    asked = parser.parse_args()
    for name in MANNERS:
        folder = asked.out / name
        folder.mkdir(parents=True, exist_ok=True)
        how = {"steps": asked.steps, "rows": asked.rows, "rate": asked.rate}
        save_file(train(name, device=asked.device, **how), folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
        config |= {"target_modules": list(TARGETS), "base_model_name_or_path": "demo/model"}
        text = json.dumps(config, indent=2) + "\n"
        (folder / "adapter_config.json").write_text(text)


if __name__ == "__main__":
    main()
