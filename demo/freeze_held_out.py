"""Writes the held-out items that `headrace eval` asks: headrace/bench/held_out.jsonl.gz, or another
file with items of another seed or number.

python -m demo.freeze_held_out
python -m demo.freeze_held_out --seed 7 --count 400 --out more.jsonl.gz
"""

from __future__ import annotations

import argparse
from pathlib import Path

from demo.tasks import EVAL_TASKS, generate_eval
from headrace.bench.held_out import HELD_OUT, EvalItem, write_items

LONG = {"recall_2k": 5, "recall_4k": 10, "recall_8k": 20}
"""Task -> one item of it for so many of the others: their texts would fill the file."""


def frozen_items(task: str, count: int, seed: int) -> list[EvalItem]:
    """The items of one task as the file has them."""
    return generate_eval(task, max(1, count // LONG.get(task, 1)), seed)


def main() -> None:
    """Writes the file and says how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="items per task")
    parser.add_argument("--out", type=Path, default=HELD_OUT)
    arguments = parser.parse_args()
    items = [i for task in EVAL_TASKS for i in frozen_items(task, arguments.count, arguments.seed)]
    write_items(arguments.out, items, seed=arguments.seed)
    print(f"{arguments.out}: {len(items)} items, {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
