"""`headrace eval [MODEL]`: scores a model on the demo models' held-out tasks. Exit status 1 below
--bar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.base.config.options import CommandLine
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.bench.eval import Questioner, TaskScore, score_task
from headrace.bench.held_out import HELD_OUT, EvalItem, read_items
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.cli.session import open_session
from headrace.front.client.transcription import Transcriber
from headrace.front.media.preparation import MediaPreparer

MAX_ITEMS = 1_000_000


def main(argv: Sequence[str]) -> int:
    """Scores every task that was asked for."""
    line = CommandLine(
        "headrace eval",
        "Held-out tasks, greedy, exact match (of speech: words).",
        groups=("model", "kv", "scheduler", "device", "adapters"),
    )
    add_model_argument(line)
    line.parser.add_argument("--tasks", default="", help="comma-separated tasks [all of the file]")
    line.parser.add_argument(
        "--items",
        default=str(HELD_OUT),
        metavar="FILE",
        help="items to ask, as demo.freeze_held_out writes them [the package's own]",
    )
    line.add_number("--count", "items per task at most", default=100, least=1, greatest=MAX_ITEMS)
    line.add_number("--streams", "items at a time", default=16, least=1, greatest=4096)
    line.add_number(
        "--bar", "least share each task must reach", default=0, least=0, greatest=1, whole=False
    )
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    own, options = line.parse(argv)
    items = _chosen(read_items(Path(own.items)), own.tasks, own.count)
    scores = asyncio.run(_score(with_model(options, own.path), items, own.streams))
    _show(scores, as_json=own.json)
    return 0 if all(s.share >= own.bar for s in scores) else 1


def _chosen(by_task: dict[str, list[EvalItem]], names: str, count: int) -> list[list[EvalItem]]:
    """The items to ask, a list per task; ConfigError for a task the file does not have."""
    tasks = [name for name in names.split(",") if name] or list(by_task)
    for task in tasks:
        if task not in by_task:
            raise ConfigError(
                f"--tasks: unknown task {task!r} (known: {', '.join(by_task)})", field="--tasks"
            )
    return [by_task[task][:count] for task in tasks]


async def _score(options: Options, items: list[list[EvalItem]], streams: int) -> list[TaskScore]:
    async with open_session(options) as session:
        text, tokenizer = session.resolved.text, session.engine.tokenizer
        media = MediaPreparer(text.media, tokenizer) if text.media else None
        questioner = Questioner(
            session.engine,
            session.template,
            media=media,
            speech=Transcriber.of(text, tokenizer),
        )
        try:
            return [await score_task(questioner, of_task, streams=streams) for of_task in items]
        finally:
            if media is not None:
                media.close()


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
