"""`headrace batch IN OUT [MODEL]`: answers a file of requests, without a server.

IN has one request per line as /v1/batches takes it, OUT gets one answer per line. What OUT answers already is not run
again, so a run that was killed is repeated with the same words and goes on where it ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.base.config.options import CommandLine
from headrace.base.config.tree import Options
from headrace.base.config.units import parse_bytes
from headrace.base.errors import ConfigError
from headrace.cli.model_argument import with_model
from headrace.cli.session import open_session
from headrace.front.server.batches.lines import answered_ids, check_lines, run_lines
from headrace.front.server.process import services_over
from headrace.launch.resolve import server_spec

AT_ONCE = 64


def main(argv: Sequence[str]) -> int:
    """`headrace batch IN OUT [MODEL] [options]`: 0 if every line was answered with 200, else 1."""
    line = CommandLine(
        "headrace batch",
        "Answer a file of requests.",
        groups=("model", "kv", "scheduler", "device"),
    )
    line.parser.add_argument(
        "input", nargs="?", metavar="IN", help="requests, one JSON object per line"
    )
    line.parser.add_argument(
        "output", nargs="?", metavar="OUT", help="answers; what it holds is not run again"
    )
    line.parser.add_argument("path", nargs="?", metavar="MODEL", help="default: the bundled model")
    own, options = line.parse(argv)
    if own.output is None:
        raise ConfigError("two files are needed: headrace batch IN OUT [MODEL]", field="OUT")
    return asyncio.run(_run(with_model(options, own.path), Path(own.input), Path(own.output)))


async def _run(options: Options, source: Path, target: Path) -> int:
    max_line_bytes = parse_bytes(options.server.max_body_bytes, field="--max-body-bytes")
    with _opened(source, "rb", "IN") as file, _opened(target, "ab", "OUT") as answers:
        try:
            fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"OUT: another batch writes {target}", field="OUT") from None
        total, errors = check_lines(file, endpoint=None, max_line_bytes=max_line_bytes)
        if errors:
            wrong = "\n".join(f"  line {error.line}: {error.message}" for error in errors)
            raise ConfigError(f"IN: {source} cannot be run:\n{wrong}", field="IN")
        try:
            done = answered_ids(target)
        except ValueError:
            raise ConfigError(
                f"OUT: {target} holds other things than answers", field="OUT"
            ) from None
        file.seek(0)
        if len(done) >= total:
            print(f"all {total} requests have been answered", file=sys.stderr)
            return 0
        return await _answer(options, file, answers, done, total, max_line_bytes)


def _opened(path: Path, mode: str, name: str) -> Any:
    try:
        return path.open(mode)
    except OSError as error:
        raise ConfigError(f"{name}: cannot open {path}: {error.strerror}", field=name) from None


async def _answer(
    options: Options,
    file: BinaryIO,
    answers: BinaryIO,
    done: set[str],
    total: int,
    max_line_bytes: int,
) -> int:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    failed = 0
    async with open_session(options) as session:
        spec = server_spec(options.server)
        text = session.resolved.text
        services = services_over(session.engine, session.engine.tokenizer, text, spec)
        services.warm = True
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("requests", total=total, completed=len(done))
            try:
                async for answered in run_lines(
                    *(services, "", file),
                    endpoint=None,
                    done=done,
                    at_once=AT_ONCE,
                    max_line_bytes=max_line_bytes,
                ):
                    answers.write(answered.written)
                    answers.flush()
                    failed += not answered.ok
                    progress.advance(task)
            finally:
                services.template.close()
                services.guest_templates.close()
    if failed:
        print(f"headrace: {failed} of {total} requests were refused; see OUT", file=sys.stderr)
    return 1 if failed else 0
