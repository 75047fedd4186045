"""`headrace eval [MODEL]`: scores a model on the demo models' held-out tasks. Exit status 1 below
--bar. `--against OTHER`: beside another model, with what its predictions lose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.base.config.options import CommandLine
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.bench.eval import Questioner, TaskScore, score_task
from headrace.bench.held_out import OF_DEMO, EvalItem, read_items
from headrace.bench.losses import AnswerScores, TaskLoss, compare, read_answers
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.cli.session import open_session
from headrace.front.client.chat_transcription import transcriber_of
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
        default="",
        metavar="FILE",
        help="items to ask, as demo.freeze_held_out writes them [the package's own for --demo]",
    )
    line.add_number("--count", "items per task at most", default=100, least=1, greatest=MAX_ITEMS)
    line.add_number("--streams", "items at a time", default=16, least=1, greatest=4096)
    line.add_number(
        "--bar", "least share each task must reach", default=0, least=0, greatest=1, whole=False
    )
    line.parser.add_argument(
        "--against",
        metavar="MODEL",
        help="compare with this model as it is stored (without --quantization and --kv-dtype): tasks, "
        "perplexity and divergence over the right answers",
    )
    line.parser.add_argument("--json", action="store_true", help="print one JSON object")
    own, options = line.parse(argv)
    file = Path(own.items) if own.items else OF_DEMO[options.model.demo]
    items = chosen_items(read_items(file), own.tasks, own.count)
    whole = own.against is not None
    scores, answers = asyncio.run(
        score_model(with_model(options, own.path), items, own.streams, read=whole)
    )
    if not whole:
        _show(scores, as_json=own.json)
    else:
        others = asyncio.run(
            score_model(_stored(options, own.against), items, own.streams, read=True)
        )
        _show_both(scores, answers, *others, as_json=own.json)
    return 0 if all(s.share >= own.bar for s in scores) else 1


def chosen_items(
    by_task: dict[str, list[EvalItem]], names: str, count: int
) -> list[list[EvalItem]]:
    """The items to ask, a list per task; ConfigError for a task the file does not have."""
    tasks = [name for name in names.split(",") if name] or list(by_task)
    for task in tasks:
        if task not in by_task:
            raise ConfigError(
                f"--tasks: unknown task {task!r} (known: {', '.join(by_task)})", field="--tasks"
            )
    return [by_task[task][:count] for task in tasks]


def _stored(options: Options, path: str) -> Options:
    """The other model as it is stored."""
    model = msgspec.structs.replace(options.model, quantization="none", demo="text")
    kv = msgspec.structs.replace(options.kv, kv_dtype="auto", kv_dtype_skip_layers=())
    return with_model(msgspec.structs.replace(options, model=model, kv=kv), path)


Answers = list[list[AnswerScores]]


async def score_model(
    options: Options, items: list[list[EvalItem]], streams: int, *, read: bool
) -> tuple[list[TaskScore], Answers]:
    """What each task gave, and how the model `read` the right answers."""
    async with open_session(options) as session:
        text, tokenizer = session.resolved.text, session.engine.tokenizer
        media = MediaPreparer(text.media, tokenizer) if text.media else None
        questioner = Questioner(
            session.engine,
            session.template,
            media=media,
            speech=transcriber_of(text, tokenizer, session.template),
        )
        try:
            scores = [await score_task(questioner, of_task, streams=streams) for of_task in items]
            answers = [
                await read_answers(session.engine, session.template, of_task, streams=streams)
                for of_task in items
                if read
            ]
            return scores, answers
        finally:
            if media is not None:
                media.close()


def _show_both(
    scores: list[TaskScore],
    answers: Answers,
    other_scores: list[TaskScore],
    other_answers: Answers,
    *,
    as_json: bool,
) -> None:
    """Both models, task by task, and all together."""
    tasks = [score.task for score in scores]
    losses = [
        compare(task, mine, theirs)
        for task, mine, theirs in zip(tasks, answers, other_answers, strict=True)
    ]
    whole = compare("all", [*chain(*answers)], [*chain(*other_answers)])
    shares = list(zip(scores, other_scores, strict=True))
    if as_json:
        document = {
            mine.task: {
                "share": mine.share,
                "count": mine.count,
                "against_share": other.share,
                "loss": None if loss is None else msgspec.to_builtins(loss),
            }
            for (mine, other), loss in zip(shares, losses, strict=True)
        }
        print(json.dumps(document | {"all": {"loss": msgspec.to_builtins(whole)}}))
        return
    names = ("task", "right", "against", "tokens", "perplexity", "against", "divergence", "same")
    table = Table(*names)
    for (mine, other), loss in zip(shares, losses, strict=True):
        table.add_row(mine.task, f"{mine.share:.1%}", f"{other.share:.1%}", *_words(loss))
    count = len(shares)
    means = [sum(pair[i].share for pair in shares) / count for i in range(2)]
    table.add_row("all", *(f"{mean:.1%}" for mean in means), *_words(whole))
    Console().print(table)


def _words(loss: TaskLoss | None) -> tuple[str, ...]:
    if loss is None:
        return ("-",) * 5
    return (
        str(loss.tokens),
        f"{loss.perplexity:.4f}",
        f"{loss.against:.4f}",
        f"{loss.divergence:.5f}",
        f"{loss.agreement:.2%}",
    )


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
