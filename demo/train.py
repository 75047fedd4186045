"""Trains the bundled model on one GPU, for a number of steps or of minutes.

Rows of 8192 tokens hold many conversations; attention and positions stay inside each. The loss falls on
what the assistant says. The rate warms up, stays, and falls to zero over the last part. Every
checkpoint is a whole state to go on from; `export.py` makes the shipped files of one.

    python -m demo.train --tokenizer demo/model/tokenizer.json --out runs/demo --minutes 22
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TextIO

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from demo.attention import ATTENTIONS, Batch, Prepared
from demo.decoder import Qwen3, Shape
from demo.optimizer import Muon, adamw
from demo.packing import Rows, documents, pack, start_workers
from demo.tasks.draw import TASKS, held_out_conversations


def to_device(rows: Rows, device: torch.device) -> Batch:
    """Copies rows over and derives targets and positions there."""
    tokens = torch.from_numpy(rows.tokens_BT.astype("int32")).to(device).long()
    learnt = torch.from_numpy(rows.learnt_BT).to(device)
    document = torch.from_numpy(rows.document_BT.astype("int32")).to(device)
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = torch.where(learnt[:, 1:], tokens[:, 1:], -100)
    place = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    opens = torch.ones_like(learnt)
    opens[:, 1:] = document[:, 1:] != document[:, :-1]
    start = torch.where(opens, place, 0).cummax(dim=1).values
    return Batch(tokens, targets, place - start, document)


class Trainer:
    """Model, optimizers and the step; `progress` in 0..1 decides the rate."""

    def __init__(self, shape: Shape, *, rate: float, fall: float, attention: str) -> None:
        self.device = device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.attention = ATTENTIONS[attention]
        self.model = Qwen3(shape).to(device)
        self.muon = Muon(self.model)
        self.adamw = adamw(self.model, rate=rate)
        self.rate, self.fall = rate, fall
        self.norm = torch.zeros(())
        self.steps = 0
        self.tokens = 0
        cuda = device.type == "cuda"
        self.loss = torch.compile(self._loss, dynamic=False) if cuda else self._loss
        self.predict = torch.compile(self._predict, dynamic=False) if cuda else self._predict

    def step(self, rows: Rows, progress: float) -> Tensor:
        """One optimizer step; returns the loss, still on the device."""
        batch = to_device(rows, self.device)
        loss = self.loss(batch, self.attention.prepare(batch))
        loss.backward()
        self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = self._rate_at(progress)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.muon.step(rate)
        self.model.zero_grad(set_to_none=True)
        self.steps += 1
        self.tokens += rows.tokens_BT.size
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, held_out: dict[str, Rows]) -> dict[str, float]:
        """Share of held-out conversations whose every learnt token is the most likely one."""
        found: dict[str, float] = {}
        for task, rows in held_out.items():
            right = total = 0
            for at in range(len(rows.tokens_BT)):
                batch = to_device(Rows(*(part[at : at + 1] for part in rows)), self.device)
                best = self.predict(batch, self.attention.prepare(batch))
                wrong = (best != batch.targets) & (batch.targets >= 0)
                missed = torch.unique(batch.document[wrong]).numel()
                count = int(batch.document.max())
                right, total = right + count - missed, total + count
            found[task] = round(right / total, 4)
        return found

    def save(self, file: Path) -> None:
        """Writes the whole state, first beside the file, then in its place."""
        state = {
            "shape": asdict(self.model.shape),
            "model": self.model.state_dict(),
            "muon": self.muon.state(),
            "adamw": self.adamw.state_dict(),
            "steps": self.steps,
            "tokens": self.tokens,
        }
        beside = file.with_suffix(".part")
        torch.save(state, beside)
        beside.rename(file)

    def load(self, file: Path) -> None:
        """Goes on from a saved state."""
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.muon.load(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        self.steps, self.tokens = state["steps"], state["tokens"]

    def start_from(self, folder: Path) -> None:
        """Starts from shipped weights: bf16, without the optimizers' state, so warm-up comes again."""
        self.model.load_state_dict(load_file(folder / "model.safetensors"))

    def _loss(self, batch: Batch, prepared: Prepared) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            attend = self.attention.attend(batch, prepared)
            return self.model.loss(batch.tokens, batch.targets, batch.positions, attend)

    def _predict(self, batch: Batch, prepared: Prepared) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            attend = self.attention.attend(batch, prepared)
            return self.model(batch.tokens, batch.positions, attend).argmax(dim=-1)

    def _rate_at(self, progress: float) -> float:
        warm = min(1.0, (self.steps + 1) / 200)
        falling = min(1.0, max(0.0, (1.0 - progress) / self.fall))
        return self.rate * min(warm, falling)


def held_out_rows(tokenizer: Tokenizer, *, each: int, row_tokens: int) -> dict[str, Rows]:
    """Packed held-out conversations per task."""
    found = {}
    for task in TASKS:
        chats = held_out_conversations(task, each, seed=1)
        fitting = [d for d in documents(tokenizer, chats) if len(d[0]) <= row_tokens]
        if fitting:
            found[task] = pack(fitting, row_tokens)
    return found


def run(arguments: argparse.Namespace) -> None:
    """The loop: steps, log lines, evaluations and checkpoints until the end is reached."""
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    length, out = arguments.row_tokens, arguments.out
    out.mkdir(parents=True, exist_ok=True)
    queue = start_workers(
        arguments.tokenizer, workers=arguments.workers, rows=arguments.rows, row_tokens=length,
        seed=arguments.seed, depth=4 * arguments.workers,
    )  # fmt: skip
    held_out = held_out_rows(
        Tokenizer.from_file(str(arguments.tokenizer)), each=arguments.held_out, row_tokens=length
    )
    shape = Shape(num_hidden_layers=arguments.layers)
    trainer = Trainer(
        shape, rate=arguments.rate, fall=arguments.fall, attention=arguments.attention
    )
    if arguments.resume:
        trainer.load(arguments.resume)
    elif arguments.weights:
        trainer.start_from(arguments.weights)
    with (out / "log.jsonl").open("a") as log:
        _loop(arguments, trainer, queue, held_out, log)
    trainer.save(out / "state.pt")
    (out / "finished").touch()


def _loop(
    arguments: argparse.Namespace,
    trainer: Trainer,
    queue: Queue[Rows],
    held_out: dict[str, Rows],
    log: TextIO,
) -> None:
    began = last = time.monotonic()
    first = trainer.steps
    recent: list[Tensor] = []
    progress = 0.0
    while progress < 1.0:
        starved = queue.empty()
        recent.append(trainer.step(queue.get(), progress))
        done = trainer.steps - first
        spent = time.monotonic() - began
        progress = done / arguments.steps if arguments.steps else spent / 60 / arguments.minutes
        line: dict[str, object] = {}
        if done % arguments.log_every == 0 or progress >= 1.0:
            loss = torch.stack(recent).mean().item()
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {trainer.steps}")
            now = time.monotonic()
            speed = len(recent) * arguments.rows * arguments.row_tokens / (now - last)
            line = {"step": trainer.steps, "loss": round(loss, 4), "spent_s": round(spent, 1),
                    "tokens": trainer.tokens, "tokens_per_s": round(speed),
                    "norm": round(trainer.norm.item(), 3), "starved": starved}  # fmt: skip
            recent, last = [], now
        if done % arguments.eval_every == 0 or progress >= 1.0:
            line |= {"step": trainer.steps, "held_out": trainer.accuracy(held_out)}
            trainer.save(arguments.out / "state.pt")
            last = time.monotonic()
        if line:
            print(json.dumps(line), file=log, flush=True)


def main() -> None:
    """Reads the flags and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the run")
    parser.add_argument("--steps", type=int, default=0, help="length in steps instead of minutes")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--row-tokens", type=int, default=8192)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--fall", type=float, default=0.4, help="last part in which it falls to 0")
    parser.add_argument("--attention", choices=sorted(ATTENTIONS), default="flex")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--workers", type=int, default=14, help="processes that make data")
    parser.add_argument("--held-out", type=int, default=64, help="conversations per task and look")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a state.pt to go on from")
    parser.add_argument("--weights", type=Path, help="a model folder whose weights to start from")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
