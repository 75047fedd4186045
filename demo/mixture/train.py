"""Trains the model with experts on one GPU, on the bundled model's tasks and with its tokenizer.

python -m demo.mixture.train --tokenizer demo/model/tokenizer.json --out runs/mixture --seconds 480
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from demo.documents import attend, prepare
from demo.mixture.delta import CHUNK, MOST_TOKENS
from demo.mixture.model import KimiLinear, MixtureShape
from demo.packing import Document, documents, pack, stream
from demo.ring import Columns, Ring, columns_of
from demo.tasks.draw import TASKS, held_out_conversations
from demo.trainer import Scores, Trainer, add_arguments, run

LENGTH = 8192
"""Tokens of a row."""
Batch = tuple[Tensor, Tensor, Tensor, BlockMask | Tensor]


def aligned(document: Document) -> Document:
    """Filled up to whole chunks, of which the filling is not learnt."""
    ids, learnt = document
    filling = (0, -len(ids) % CHUNK)
    return np.pad(ids, filling), np.pad(learnt, filling)


def row_kind(length: int) -> np.dtype:
    """The type of a row."""
    return np.dtype(
        [("tokens", np.int16, length), ("learnt", np.bool_, length), ("document", np.int16, length)]
    )


def rows(tokenizer_file: str, seed: str, length: int) -> Iterator[np.ndarray]:
    """Endless rows of documents that each fit into the scan."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(tokenizer_file)
    row = np.zeros((), row_kind(length))
    for tokens, learnt, document in stream(
        tokenizer, seed, length, longest=MOST_TOKENS, form=aligned
    ):
        row["tokens"], row["learnt"], row["document"] = tokens[0], learnt[0], document[0]
        yield row


def to_device(found: Columns, device: torch.device, plain: bool = False) -> Batch:
    """Tokens, targets, places in documents, and what attention needs."""
    moved = {name: values.to(device, non_blocking=True) for name, values in found.items()}
    tokens, learnt, document = moved["tokens"].long(), moved["learnt"], moved["document"].int()
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = torch.where(learnt[:, 1:], tokens[:, 1:], -100)
    place = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    opens = torch.ones_like(learnt)
    opens[:, 1:] = document[:, 1:] != document[:, :-1]
    start = torch.where(opens, place, 0).cummax(dim=1).values
    return tokens, targets, place - start, prepare(document, causal=True, plain=plain)


def held_out_rows(tokenizer: Tokenizer, count: int, length: int) -> dict[str, np.ndarray]:
    """A few rows of held-out conversations for each task."""
    found = {}
    for task in TASKS:
        made = documents(tokenizer, held_out_conversations(task, count, seed=1))
        fitting = [aligned(one) for one in made if len(one[0]) <= MOST_TOKENS]
        if len(fitting) < max(1, count // 2):
            continue
        packed = pack(fitting, length)
        some = np.zeros(len(packed.tokens_BT), row_kind(length))
        some["tokens"], some["learnt"], some["document"] = packed
        found[task] = some
    return found


@torch.no_grad()
def accuracy(
    model: KimiLinear, held_out: dict[str, np.ndarray], device: torch.device, plain: bool
) -> Scores:
    """Share of conversations whose every learnt token is the most likely one."""
    scores: Scores = {}
    predict = _predict if plain else torch.compile(_predict, dynamic=False)
    model.eval()
    for task, found in held_out.items():
        missed = total = 0
        for at in range(len(found)):
            tokens, targets, place, mask = to_device(columns_of(found[at : at + 1]), device, plain)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                best = predict(model, tokens, place, mask)
            numbers = torch.from_numpy(found["document"][at].astype(np.int64)).to(device)
            missed += numbers[((best != targets) & (targets >= 0))[0]].unique().numel()
            total += int(numbers.max())
        scores[task] = round(1 - missed / total, 3)
    model.train()
    return scores


def _predict(model: KimiLinear, tokens: Tensor, place: Tensor, mask: BlockMask | Tensor) -> Tensor:
    return model(tokens, place, attend(mask)).argmax(dim=-1)


def main() -> None:
    """Reads the flags and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=6, help="rows of a step")
    parser.add_argument("--row-tokens", type=int, default=LENGTH)
    parser.add_argument("--held-out", type=int, default=48, help="conversations per task")
    arguments = parser.parse_args()
    began = time.monotonic()
    length, name = arguments.row_tokens, str(arguments.tokenizer)
    ring = Ring(
        row_kind(length), lambda number: rows(name, f"mixture {arguments.seed} {number}", length),
        places=8 * arguments.workers + 2 * arguments.rows, workers=arguments.workers,
    )  # fmt: skip
    held_out = held_out_rows(Tokenizer.from_file(name), arguments.held_out, length)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = KimiLinear(MixtureShape()).to(device)

    def loss(tokens: Tensor, targets: Tensor, place: Tensor, mask: BlockMask | Tensor) -> Tensor:
        logits = model(tokens, place, attend(mask))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)

    trainer = Trainer(model, loss, rate=arguments.rate, fall=arguments.fall, plain=arguments.plain)
    run(
        trainer, ring.ahead(arguments.rows), lambda found, plain: to_device(found, device, plain),
        lambda: accuracy(model, held_out, device, trainer.plain), arguments, began,
    )  # fmt: skip


if __name__ == "__main__":
    main()
