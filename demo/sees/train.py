"""Trains the model that sees on one GPU.

python -m demo.sees.train --fonts fonts --out runs/sees --seconds 480
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from demo.documents import attend, prepare
from demo.ring import Columns, Ring, columns_of
from demo.sees.item import Showing
from demo.sees.model import Qwen3VL, SeeingShape, Seen
from demo.sees.rows import ROW, conversation, row_of, rows
from demo.sees.shapes import comparing, counting, in_order, placing
from demo.sees.texts import Fonts, reading
from demo.trainer import Scores, Trainer, add_arguments, run

Batch = tuple[Seen, BlockMask | Tensor, BlockMask | Tensor]


def to_device(found: Columns, device: torch.device, plain: bool = False) -> Batch:
    """Rows as a batch, with what attention needs."""

    def part(name: str) -> Tensor:
        return found[name].to(device, non_blocking=True)

    def whole(name: str) -> Tensor:
        return part(name).long()

    picture, document = part("picture").int(), part("document").int()
    seen = Seen(
        patches_BPX=part("patches"), places_BP4=part("places"), picture_BP=picture, tokens_BT=whole("tokens"),
        slots_BT=whole("slots"), positions_BT3=part("positions"), targets_BT=whole("targets"), document_BT=document,
    )  # fmt: skip
    return (
        seen,
        prepare(picture, causal=False, plain=plain),
        prepare(document, causal=True, plain=plain),
    )


def held_out_rows(fonts: Fonts, count: int) -> list[tuple[np.ndarray, dict[int, str]]]:
    """Rows that are never trained, each with the task of each of its documents; one question for each."""
    rng = Random("held out")
    makers = {
        "read": lambda: reading(rng, fonts, held_out=True), "count": lambda: counting(rng),
        "place": lambda: placing(rng), "compare": lambda: comparing(rng), "order": lambda: in_order(rng),
    }  # fmt: skip
    found = []
    for make in makers.values():
        showings = [make() for _ in range(count)]
        single = [Showing(media=one.media, turns=one.turns[:1]) for one in showings]
        for at in range(0, count, 6):
            some = single[at : at + 6]
            packed = [conversation(one) for one in some]
            found.append((row_of(packed), {i: one.turns[0].task for i, one in enumerate(some, 1)}))
    return found


@torch.no_grad()
def accuracy(
    model: Qwen3VL,
    held_out: list[tuple[np.ndarray, dict[int, str]]],
    device: torch.device,
    plain: bool,
) -> Scores:
    """Share of questions of which every token of the answer is the most likely one."""
    right, total = defaultdict[str, int](int), defaultdict[str, int](int)
    predict = _predict if plain else torch.compile(_predict, dynamic=False)
    for row, tasks in held_out:
        batch = to_device(columns_of(row[None]), device, plain)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            best = predict(model, *batch)
        seen = batch[0]
        missed = set(seen.document_BT[(best != seen.targets_BT) & (seen.targets_BT >= 0)].tolist())
        for number, task in tasks.items():
            total[task] += 1
            right[task] += number not in missed
    return {task: round(right[task] / total[task], 3) for task in sorted(total)}


def _predict(
    model: Qwen3VL, seen: Seen, look: BlockMask | Tensor, causal: BlockMask | Tensor
) -> Tensor:
    return model(seen, attend(look), attend(causal)).argmax(dim=-1)


def main() -> None:
    """Reads the flags and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--fonts", type=Path, required=True, help="a folder of .ttf and .otf files")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step")
    parser.add_argument("--held-out", type=int, default=60, help="items per task")
    arguments = parser.parse_args()
    began = time.monotonic()
    fonts = Fonts(arguments.fonts)
    ring = Ring(
        ROW, lambda number: rows(f"sees {arguments.seed} {number}", fonts),
        places=max(16, 4 * arguments.workers), workers=arguments.workers,
    )  # fmt: skip
    held_out = held_out_rows(fonts, arguments.held_out)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Qwen3VL(SeeingShape()).to(device)

    def loss(seen: Seen, look: BlockMask | Tensor, causal: BlockMask | Tensor) -> Tensor:
        return model.loss(seen, attend(look), attend(causal))

    trainer = Trainer(model, loss, rate=arguments.rate, fall=arguments.fall, plain=arguments.plain)
    run(
        trainer, ring.ahead(arguments.rows), lambda found, plain: to_device(found, device, plain),
        lambda: accuracy(model, held_out, device, trainer.plain), arguments, began,
    )  # fmt: skip


if __name__ == "__main__":
    main()
