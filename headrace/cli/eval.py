"""`headrace eval [MODEL]`: scores a model on the bundled model's held-out tasks. Exit status 1 below --bar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from headrace.base.config.options import CommandLine
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.bench.datasets.tasks import EVAL_TASKS
from headrace.bench.eval import TaskScore, score_task
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.cli.session import open_session


def main(argv: Sequence[str]) -> int:
    """Scores every task that was asked for."""
    line = CommandLine(
        "headrace eval",
        "Held-out tasks, greedy, exact match.",
        groups=("model", "kv", "scheduler", "device"),
    )
    add_model_argument(line)
    line.parser.add_argument("--tasks", default=",".join(EVAL_TASKS), help="comma-separated tasks")
    line.parser.add_argument("--count", type=int, default=100, help="items per task [100]")
    line.parser.add_argument("--eval-seed", type=int, default=0, help="seed of the items [0]")
    line.parser.add_argument("--streams", type=int, default=16, help="items at a time [16]")
    line.parser.add_argument(
        "--bar", type=float, default=0.0, help="least share each task must reach [0]"
    )
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    own, options = line.parse(argv)
    tasks = [t for t in own.tasks.split(",") if t]
    for task in tasks:
        if task not in EVAL_TASKS:
            raise ConfigError(
                f"--tasks: unknown task {task!r} (known: {', '.join(EVAL_TASKS)})", field="--tasks"
            )
    scores = asyncio.run(
        _score(with_model(options, own.path), tasks, own.count, own.eval_seed, own.streams)
    )
    _show(scores, as_json=own.json)
    return 0 if all(s.share >= own.bar for s in scores) else 1


async def _score(
    options: Options, tasks: list[str], count: int, seed: int, streams: int
) -> list[TaskScore]:
    async with open_session(options) as session:
        return [
            await score_task(
                session.engine, session.template, task, count=count, seed=seed, streams=streams
            )
            for task in tasks
        ]


def _show(scores: list[TaskScore], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({s.task: {"share": s.share, "count": s.count} for s in scores}))
        return
    table = Table("task", "right", "of", "share", "first wrong answer")
    for s in scores:
        wrong = (
            ""
            if s.first_wrong is None
            else f"{s.first_wrong[0][-60:]!r} -> {s.first_wrong[1][:60]!r}"
        )
        table.add_row(s.task, str(s.right), str(s.count), f"{s.share:.1%}", wrong)
    Console().print(table)
