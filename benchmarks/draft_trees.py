"""Whether a tree of drafts would bring more than a chain with as many rows to verify: what a trained head of the
bundled model puts where, on held-out conversations.

    python -m benchmarks.draft_trees [--each 6] [--row-tokens 512] [--kinds eagle3 mtp]
    python -m benchmarks.draft_trees --write     makes draft_trees.md of the result

At each place where the assistant speaks, the head is unrolled along what the model says (greedily what it is trained
for); counted is the rank that the head gives to the model's token at each depth. A tree whose node at depth j has the
head's best w_j tokens below it accepts as far as the ranks go: this is exact for the path that is verified. A tree of
widths (w_1, w_2, ...) has w_1 + w_1 w_2 + ... rows beside the newest token's; a chain has a row for each draft.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.speculative import RESULTS
from demo.attention import Batch
from demo.decoder import rope
from demo.train_drafters import BUILD, SHAPE, TAPS, Held, Passes, Teacher, later, read
from headrace.bench.report import markdown_table

DRAFTERS = Path(__file__).parents[1] / "demo" / "drafters"
RESULT = RESULTS / "draft_trees.json"
TASKS = ("chat", "story", "json", "tool_call", "system", "think", "copy", "sort")
DEPTH = 8
TREES = ((2, 1), (2, 1, 1, 1), (3, 1, 1), (2, 2, 1), (4, 1), (8,))
ROWS = 8


def known_of(kind: str) -> torch.Tensor:
    """The tokens that a head knows."""
    from safetensors.torch import load_file

    offset = load_file(DRAFTERS / kind / "model.safetensors").get("d2t")
    whole = torch.arange(SHAPE.vocab_size)
    return whole if offset is None else torch.arange(len(offset)) + offset


@torch.no_grad()
def ranks(kind: str, teacher: Teacher, batch: Batch) -> torch.Tensor:
    """Of each place where the assistant speaks for DEPTH tokens more, the ranks [N, DEPTH] from 0 on; a token that the
    head does not know has the last."""
    head, known = BUILD[kind](), known_of(kind)
    head.load_state_dict(read(kind, DRAFTERS / kind))
    seen, last = teacher.states(batch, TAPS)
    document, table = batch.document, teacher.table
    same = document[:, :, None] == document[:, None, :]
    angles = rope(batch.positions, SHAPE)
    embedded = F.embedding(torch.roll(batch.tokens, -1, 1), table)
    best = F.linear(torch.roll(last, -1, 1), table).argmax(-1)
    column = torch.full((SHAPE.vocab_size,), -1)
    column[known] = torch.arange(len(known))
    at = column[best]
    hidden, passes, found = head.first(seen, last), Passes(), []
    for j in range(DEPTH):
        hidden = head(embedded, hidden, angles, same, passes)
        scores = F.linear(head.norm(hidden), table[known])
        own = scores.gather(-1, at.clamp(min=0)[..., None])
        rank = torch.where(at >= 0, (scores > own).sum(-1), len(known))
        found.append(torch.roll(rank, -j, 1))
        hidden = later(hidden, 1)
    learnt = torch.roll(batch.targets, -1, 1) >= 0
    whole = learnt & (document > 0) & (document == torch.roll(document, -1 - DEPTH, 1))
    whole[:, -1 - DEPTH :] = False
    return torch.stack(found, dim=-1)[whole]


def accepted(rank_ND: torch.Tensor, widths: tuple[int, ...]) -> float:
    """Mean drafts that stand."""
    limit = torch.tensor(widths)
    return float((rank_ND[:, : len(widths)] < limit).long().cumprod(-1).sum(-1).float().mean())


def num_rows(widths: tuple[int, ...]) -> int:
    """Rows to verify beside the newest token's."""
    rows, nodes = 0, 1
    for width in widths:
        nodes *= width
        rows += nodes
    return rows


def measured(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """A line for each head and task."""
    device = torch.device("cpu")
    held, teacher = Held(arguments.each, arguments.row_tokens, device), Teacher(device)
    lines: list[dict[str, object]] = []
    for kind in arguments.kinds:
        for task in TASKS:
            batch = held.batches[task]
            parts = [
                ranks(kind, teacher, Batch(*(x[i : i + 1] for x in batch)))
                for i in range(len(batch.tokens))
            ]
            rank_ND = torch.cat(parts)
            chains = {n: accepted(rank_ND, (1,) * n) for n in range(1, DEPTH + 1)}
            trees = {str(tree): accepted(rank_ND, tree) for tree in TREES}
            line = {
                "kind": kind,
                "task": task,
                "places": len(rank_ND),
                "chains": chains,
                "trees": trees,
            }
            lines.append(line)
            print(json.dumps(line), flush=True)
    return lines


def page(lines: list[dict[str, object]]) -> str:
    """draft_trees.md."""
    header = ("drafter", "task", "places", *(f"chain of {n}" for n in (2, 4, 8)))
    header += tuple(f"{tree}: {num_rows(tree)} rows" for tree in TREES)
    rows = [
        (
            line["kind"],
            line["task"],
            line["places"],
            *(f"{line['chains'][str(n)]:.2f}" for n in (2, 4, 8)),
            *(f"{line['trees'][str(tree)]:.2f}" for tree in TREES),
        )
        for line in lines
    ]
    return (
        "# Trees of drafts against chains\n\nMade by `python -m benchmarks.draft_trees`, then `--write`: mean drafts "
        "that stand, of the bundled model's heads on its held-out\nconversations; counted, not timed.\n\n"
        + markdown_table(header, rows)
        + "\n"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--each", type=int, default=6, help="conversations of each task")
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--kinds", nargs="+", default=["eagle3", "mtp"])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.write:
        Path(__file__).with_suffix(".md").write_text(page(json.loads(RESULT.read_text())))
        return
    lines = measured(given)
    RESULT.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
