"""The training of the small models that came after the first: steps for so many seconds, a log, and checkpoints.

The rate warms up, stays, and falls to zero over the last part of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from demo.optimizer import Muon, adamw

WARM_STEPS = 200
AGREE = 0.6
"""Of each parameter's gradient, in bfloat16 at random weights; wrong ones have been at 0.3 and below."""
Scores = dict[str, float]


class Trainer:
    """Model, optimizers and the step. `loss` takes a prepared batch, and is compiled on CUDA unless it is to be
    `plain`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        *,
        rate: float,
        fall: float,
        plain: bool = False,
    ) -> None:
        self.device = next(model.parameters()).device
        self.model = model
        self.muon, self.adamw = Muon(model), adamw(model, rate=rate)
        self.rate, self.fall = rate, fall
        self.plain_loss = loss
        self.plain = plain or self.device.type != "cuda"
        self.loss = loss if self.plain else torch.compile(loss, dynamic=False)
        self.steps = 0
        self.norm = torch.zeros(())
        self.keep()

    def step(self, batch: tuple[Any, ...], progress: float) -> Tensor:
        """One step of both optimizers; `progress` in 0..1. Returns the loss, still on the device."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.loss(*batch)
        loss.backward()
        self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = self.rate * min(
            (self.steps + 1) / WARM_STEPS, 1.0, max(0.0, (1.0 - progress) / self.fall)
        )
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.muon.step(rate)
        self.model.zero_grad(set_to_none=True)
        self.steps += 1
        return loss.detach()

    def keep(self) -> None:
        """Remembers the weights as good ones."""
        self._good = {name: value.clone() for name, value in self.model.state_dict().items()}

    def go_back(self) -> None:
        """To the weights that were good, with half the rate and fresh optimizers: after a loss that is no number."""
        self.rate /= 2
        self.model.load_state_dict(self._good)
        self.muon, self.adamw = Muon(self.model), adamw(self.model, rate=self.rate)
        self.steps = 0

    def check(self, batch: tuple[Any, ...], plain_batch: tuple[Any, ...]) -> float:
        """The cosine of the compiled loss's gradient with that of the plain one. Below AGREE the plain one is
        used from now on: compilers have been seen to be wrong here (demo/attention.py)."""
        found = []
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        for loss, given in ((self.loss, batch), (self.plain_loss, plain_batch)):
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"
            ):
                value = loss(*given)
            value.backward()
            parts = [
                torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()
            ]
            found.append([part / (part.norm() + 1e-12) for part in parts])
            sizes = [float(part.norm()) for part in parts]
            self.model.zero_grad(set_to_none=True)
            for buffer, before in buffers:
                buffer.copy_(before)
        cosines = [float((a * b).sum()) for a, b in zip(*found, strict=True)]
        seen = [
            cosine for cosine, size in zip(cosines, sizes, strict=True) if size > 1e-2 * max(sizes)
        ]
        least = min(seen)
        if least < AGREE:
            self.plain, self.loss = True, self.plain_loss
        return least

    def save(self, file: Path) -> None:
        """The weights alone, in fp32: first beside the file, then in its place."""
        beside = file.with_suffix(".part")
        torch.save(self.model.state_dict(), beside)
        beside.rename(file)

    def load(self, file: Path) -> None:
        """Starts from saved weights or exported ones (`.safetensors`, whose matrices may be the kernels of
        convolutions, and without what training alone has: that begins anew), with fresh optimizers."""
        if file.suffix == ".safetensors":
            own = self.model.state_dict()
            exported = load_file(file)
            found = own | {name: value.view(own[name].shape) for name, value in exported.items()}
        else:
            found = torch.load(file, map_location=self.device, weights_only=True)
        self.model.load_state_dict(found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that all trainings have."""
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--steps", type=int, default=1 << 30, help="at most so many")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument(
        "--fall", type=float, default=0.6, help="the last part of the time, in which the rate falls"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=40.0, help="seconds between evaluations")
    parser.add_argument("--plain", action="store_true", help="compile nothing: slow")
    parser.add_argument("--unchecked", action="store_true", help="do not compare gradients first")
    parser.add_argument("--weights", type=Path, help="state.pt or model.safetensors to start from")


def run(
    trainer: Trainer,
    take: Callable[[], Any],
    prepared: Callable[[Any, bool], tuple[Any, ...]],
    score: Callable[[], Scores],
    arguments: argparse.Namespace,
    began: float,
) -> None:
    """Steps until the time (from `began`, a monotonic time) is over. `prepared` makes rows that
    were taken a batch, plainly if it is asked to."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.weights:
        trainer.load(arguments.weights)
        trainer.keep()
    last = scored = time.monotonic()
    first, recent = last, list[Tensor]()
    with (arguments.out / "log.jsonl").open("a") as log:

        def tell(**entry: object) -> None:
            print(json.dumps(entry), file=log, flush=True)

        if not (trainer.plain or arguments.unchecked):
            found = take()
            agree = trainer.check(prepared(found, False), prepared(found, True))
            tell(agree=round(agree, 3), spent_s=round(time.monotonic() - began, 1))

        last = scored = time.monotonic()
        while trainer.steps < arguments.steps:
            now = time.monotonic()
            progress = max((now - began) / arguments.seconds, trainer.steps / arguments.steps)
            if progress >= 1.0:
                break
            recent.append(trainer.step(prepared(take(), trainer.plain), progress))
            if now - last > 5.0:
                loss = torch.stack(recent).mean().item()
                spent = time.monotonic()
                tell(
                    step=trainer.steps, loss=round(loss, 4), spent_s=round(spent - began, 1),
                    ms=round(1000 * (spent - last) / len(recent), 2), norm=round(float(trainer.norm), 3),
                )  # fmt: skip
                last, recent = spent, []
                if math.isfinite(loss):
                    trainer.keep()
                else:
                    trainer.go_back()
            if now - scored > arguments.every:
                tell(step=trainer.steps, held_out=score())
                trainer.save(arguments.out / "state.pt")
                scored = last = time.monotonic()
        trainer.save(arguments.out / "state.pt")
        tell(step=trainer.steps, held_out=score(), spent_s=round(time.monotonic() - first, 1))
