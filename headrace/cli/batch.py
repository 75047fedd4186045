"""`headrace batch IN OUT [MODEL]`: answers a file of requests, without a server.

IN has one request per line as /v1/batches takes it, OUT gets one line per request. What OUT answers
with 200 is not run again, so a run that was killed goes on where it ended when the command is
repeated; lines that were refused are asked anew.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.base.config.options import CommandLine
from headrace.base.config.tree import Options
from headrace.base.config.units import parse_bytes
from headrace.base.errors import ConfigError
from headrace.cli.model_argument import with_model
from headrace.cli.session import open_session
from headrace.front.server.batches.lines import check_lines, run_lines
from headrace.front.server.services import services_over
from headrace.launch.resolve import server_spec

AT_ONCE = 64


def main(argv: Sequence[str]) -> int:
    """`headrace batch IN OUT [MODEL] [options]`: 0 if every line was answered with 200, else 1."""
    line = CommandLine(
        "headrace batch",
        "Answer a file of requests.",
        groups=("model", "kv", "scheduler", "device", "adapters"),
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
    with (
        _opened(source, "rb", "IN") as file,
        _locked(_opened(target, "a+b", "OUT"), target) as answers,
    ):
        total, errors = check_lines(file, endpoint=None, max_line_bytes=max_line_bytes)
        if errors:
            wrong = "\n".join(f"  line {error.line}: {error.message}" for error in errors)
            raise ConfigError(f"IN: {source} cannot be run:\n{wrong}", field="IN")
        answered = _answered(answers, target)
        file.seek(0)
        if len(answered) >= total:
            print(f"all {total} requests have been answered", file=sys.stderr)
            return 0
        with _without_refused(answers, target, answered) as rest:
            done = set(answered)
            return await _answer(options, file, rest, done, total, max_line_bytes)


def _opened(path: Path, mode: str, name: str) -> Any:
    try:
        return path.open(mode)
    except OSError as error:
        raise ConfigError(f"{name}: cannot open {path}: {error.strerror}", field=name) from None


def _locked(file: BinaryIO, target: Path) -> BinaryIO:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"OUT: another batch writes {target}", field="OUT") from None
    return file


class _Response(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


def _answered(answers: BinaryIO, target: Path) -> dict[str, bytes]:
    """The lines of OUT that are answers, by custom_id: no refused requests, and no last line that
    was cut off."""
    answers.seek(0)
    lines = [line for line in answers.read().splitlines(keepends=True) if line.endswith(b"\n")]
    try:
        parsed = [(msgspec.json.decode(line, type=_Line), line) for line in lines]
    except (msgspec.MsgspecError, ValueError):
        raise ConfigError(f"OUT: {target} holds other things than answers", field="OUT") from None
    return {
        one.custom_id: line
        for one, line in parsed
        if one.response is not None and one.response.status_code == 200
    }


def _without_refused(answers: BinaryIO, target: Path, answered: dict[str, bytes]) -> BinaryIO:
    """OUT with the answers alone, locked, to append to. It is replaced as a whole, so that a crash
    loses no answer."""
    kept = b"".join(answered.values())
    if answers.tell() == len(kept):
        return answers
    spare = target.with_name(f".{target.name}.{os.getpid()}")
    spare.write_bytes(kept)
    replacement = _locked(spare.open("ab"), target)
    spare.replace(target)
    return replacement


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
                    services,
                    "",
                    file,
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
