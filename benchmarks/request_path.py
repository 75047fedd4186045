"""How much one has to read to follow a request: `python -m benchmarks.request_path [--json | --files | --write]`.

Serves the bundled model in one process (real HTTP, real sockets, real model) and traces one streamed chat. On the path
is every statement of headrace that runs between the HTTP body and the last chunk, and every function entered, as one;
branches that a plain chat does not take are not. Statements are counted, not lines, and what is packed into one counts
as what it holds: an assignment of a tuple of values its parts, a call with a splatted literal its arguments, a walrus
as an assignment of its own, a call behind `and` or `or` as a statement of its own. Of the wire types, whose
fields are read by generated code, and of the template's process, which is not traced, whole definitions count
(`NAMED`). The first request is not traced: start-up and first use are no part of the path. TRACED later ones are, and
what runs in each of them counts: timers (heartbeats, watchdogs, polls) that went off meanwhile are no part of it. One
that goes off in every request of a slow machine, the report of what waits, is off. The C++ of the kernels is not
counted.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import math
import os
import re
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "headrace"
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
MAX_STATEMENTS, MAX_FILES = 3300, 70
WATCHERS = frozenset(
    {
        "front/server/http/stand_in.py",
        "front/server/http/event_loop.py",
        "front/server/process.py",  # resumed by uvicorn's tick, ten times a second, and by its timers
        "front/server/batches/runner.py",
        "front/server/state/batches.py",
    }
)
"""What runs only while the event loop is late, and tracing makes it late, or by timers that go off
in every request of a slow machine: no part of the path."""
TRACED = 60  # what runs in every one of them: fewer left a dozen statements to chance

# (stage, files or folders of headrace/). A file belongs to the first stage that names it.
STAGES = (
    ("HTTP body -> internal request", ("front/server",)),
    (
        "messages -> prompt -> tokens",
        ("front/text/chat", "front/text/template", "front/text/tokenizer", "front/client/inputs"),
    ),
    ("to the core process", ("front/client/connection", "base/wire", "launch")),
    (
        "the loop",
        (
            "core/core.py",
            "core/control.py",
            "core/service_state.py",
            "core/admission.py",
        ),
    ),
    ("choose what runs", ("core/scheduler", "core/request.py")),
    ("find cached blocks, allocate", ("core/kv",)),
    ("plan to the workers", ("back/executor",)),
    ("rows -> batch -> attention plan", ("back/runner",)),
    ("forward", ("back/models", "back/layers", "back/attention", "back/kernels")),
    ("sample", ("back/sampling",)),
    ("update, finish, free", ("core/output_processor.py",)),
    ("tokens -> text -> events", ("front/client", "front/text")),
    ("everywhere", ("base", "core")),
)
NAMED = {
    "base/wire/request.py": (
        "SamplingNumbers",
        "SamplingParams",
        "StopRules",
        "RowSampling",
        "EngineRequest",
        "Finished",
        "TokenBatch",
    ),
    "base/wire/step.py": ("RowStart", "StepPlan", "StepResult"),
    "front/client/events.py": ("Generation", "Started", "Delta", "Ended"),
    "front/server/conversation/request.py": ("Common", "ChatRequest"),
    "front/text/template_worker.py": ("answer", "_render", "serve", "compiled"),
}

BODY = {
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
    "max_tokens": 16,
}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Tracer = Callable[[FrameType, str, object], object]


class Count(NamedTuple):
    """Statements on the path, in the functions it enters, and in the whole file."""

    path: int
    functions: int
    file: int


class Recorder:
    """Collects the lines of headrace that run while `on` is set, in every thread; of several times, what ran each."""

    def __init__(self) -> None:
        self.on = False
        self._seen: dict[str, set[int]] = defaultdict(set)
        self._calls: dict[str, set[int]] = defaultdict(set)
        self._earlier: tuple[dict[str, set[int]], dict[str, set[int]]] | None = None

    @contextmanager
    def once_more(self) -> Iterator[None]:
        """Records what runs inside, and forgets what does not run in every such block."""
        self._seen, self._calls, self.on = defaultdict(set), defaultdict(set), True
        yield
        self.on = False
        if self._earlier is not None:
            self._seen = _common(self._earlier[0], self._seen)
            self._calls = _common(self._earlier[1], self._calls)
        self._earlier = self._seen, self._calls

    def install(self) -> None:
        """From now on, also in threads that start later."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Tracer | None:
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return None
        if self.on:
            self._calls[code.co_filename].add(code.co_firstlineno)
        return self._line

    def _line(self, frame: FrameType, event: str, argument: object) -> Tracer:
        if self.on:
            self._seen[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line

    def counts(self) -> dict[str, Count]:
        """Per file below headrace/."""
        names = {Path(name).relative_to(PACKAGE).as_posix() for name in self._seen}
        return {name: self._count(name) for name in sorted((names | NAMED.keys()) - WATCHERS)}

    def _count(self, name: str) -> Count:
        source = Source(PACKAGE / name)
        entered = self._calls[str(PACKAGE / name)]
        named = source.definitions(NAMED.get(name, ()))
        path = source.executed(self._seen[str(PACKAGE / name)], entered) | named
        functions = source.functions(entered) | named
        return Count(weight(path), weight(functions), weight(source.statements))


def _common(earlier: dict[str, set[int]], now: dict[str, set[int]]) -> dict[str, set[int]]:
    both = {name: earlier[name] & now[name] for name in earlier.keys() & now.keys()}
    return defaultdict(set, {name: lines for name, lines in both.items() if lines})


class Source:
    """The statements of one file, docstrings left out."""

    def __init__(self, path: Path) -> None:
        self._tree = ast.parse(path.read_text())
        self.statements = _statements(self._tree)

    def executed(self, lines: set[int], entered: set[int]) -> set[ast.stmt]:
        """The statements (of compound ones the head) that ran at least in part, and the functions entered."""
        return {
            node
            for node in self.statements
            if (
                min(_extent(node)) in entered
                if isinstance(node, FUNCTIONS)
                else _head(node) & lines
            )
            and not isinstance(node, ast.ClassDef)
        }

    def functions(self, entered: set[int]) -> set[ast.stmt]:
        """All statements of the functions that were entered."""
        nodes = (node for node in self.statements if isinstance(node, FUNCTIONS))
        return set().union(*(_statements(node) for node in nodes if min(_extent(node)) in entered))

    def definitions(self, names: tuple[str, ...]) -> set[ast.stmt]:
        """All statements of these classes and functions of the module."""
        nodes = [node for node in self._tree.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
        by_name = {node.name: _statements(node) for node in nodes}
        return set().union(*(by_name[name] for name in names))


def _statements(tree: ast.AST) -> set[ast.stmt]:
    return {
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }


def weight(statements: set[ast.stmt]) -> int:
    """How many statements these are, with what is packed into one counted by its parts."""
    return sum(1 + _packed(node) for node in statements)


def _packed(statement: ast.stmt) -> int:
    """What a statement holds beyond one: parts of a tuple assigned, splatted arguments, walruses, a call that an `and`
    makes conditional."""
    more = 0
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Tuple) and isinstance(statement, ast.Assign):
        more += len(value.elts) - 1 if isinstance(statement.targets[0], ast.Tuple) else 0
    if isinstance(value, ast.BoolOp):
        more += sum(isinstance(operand, ast.Call) for operand in value.values[1:])
    for node in _expressions(statement):
        if isinstance(node, ast.NamedExpr):
            more += 1
        elif isinstance(node, ast.Starred) and isinstance(node.value, (ast.Tuple, ast.List)):
            more += len(node.value.elts)
        elif isinstance(node, ast.Call):
            literals = [word.value for word in node.keywords if word.arg is None]
            more += sum(len(value.keys) for value in literals if isinstance(value, ast.Dict))
    return more


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """What belongs to a statement itself and not to those in its body."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from ast.walk(child)


def _extent(node: ast.stmt) -> set[int]:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return set(range(first, (node.end_lineno or first) + 1))


def _head(node: ast.stmt) -> set[int]:
    """The lines of a simple statement, or of a compound one up to its body."""
    body = getattr(node, "body", getattr(node, "cases", None))
    if not body:
        return _extent(node)
    first = body[0].lineno if isinstance(body[0], ast.stmt) else body[0].pattern.lineno
    return {line for line in _extent(node) if line < first} or {node.lineno}


async def _ask(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(BODY).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    assert b" 200 " in (status := await reader.readline()), (status, await reader.read(2000))
    await reader.readuntil(b"data: [DONE]\n\n")
    writer.close()


async def _until_ready(port: int) -> None:
    """The API may listen before the core has said hello."""
    line = b""
    while b" 200 " not in line:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health/ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        line = await reader.readline()
        writer.close()


def _wait_ready(api: socket.socket) -> None:
    """Reads reports, of which heartbeats come first, until the API process is ready."""
    reports = b""
    while b'"ready":true' not in reports:
        received = api.recv(4096)
        assert received, f"the API did not become ready: {reports!r}"
        reports += received


async def _measure(recorder: Recorder) -> None:
    from headrace.back.executor.choose import make_executor
    from headrace.base.config.tree import Options
    from headrace.core.core import EngineCore
    from headrace.front.server.process import serve
    from headrace.launch import core_process
    from headrace.launch.api_process import ApiSpec
    from headrace.launch.core_process import CoreLoop, Watchdog
    from headrace.launch.facts import resolve_options
    from headrace.launch.frontend_connections import FrontendConnections
    from headrace.launch.topology import RuntimeFolder

    core_process.LOAD_PERIOD_S = math.inf
    resolved = resolve_options(Options())
    folder = RuntimeFolder()
    core_status, core_parent = socket.socketpair()
    api_status, api_parent = socket.socketpair()
    core = EngineCore(resolved.engine, make_executor(resolved.engine))
    frontends = FrontendConnections(folder.socket_path(0), core.hello(), core_status)
    watchdog = Watchdog(
        300.0, core_status, slow_after_s=lambda: 300.0, on_slow=lambda seconds: None
    )
    loop = CoreLoop(core, frontends, watchdog)
    threading.Thread(target=loop.run, daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0))
    spec = ApiSpec(
        text=resolved.text,
        server=resolved.server,
        socket_paths=[folder.socket_path(0)],
        heartbeat_timeout_s=30.0,
    )
    server = asyncio.ensure_future(serve(spec, listener, api_status))
    await asyncio.to_thread(_wait_ready, api_parent)
    port = listener.getsockname()[1]
    await _until_ready(port)
    await _ask(port)
    for _ in range(TRACED):
        with recorder.once_more():
            await _ask(port)
    api_parent.close()
    await server
    folder.close()
    core_parent.detach()  # the core's threads end with this process


def by_stage(counts: dict[str, Count]) -> list[tuple[str, dict[str, Count]]]:
    """Each stage with its files."""
    stages: list[tuple[str, dict[str, Count]]] = [(stage, {}) for stage, _ in STAGES]
    for name, count in counts.items():
        place = next(i for i, (_, prefixes) in enumerate(STAGES) if name.startswith(prefixes))
        stages[place][1][name] = count
    return stages


def table(stages: list[tuple[str, dict[str, Count]]]) -> str:
    """The table of docs/ARCHITECTURE.md."""
    rows = ["| stage | files, the largest part first | statements |", "|---|---|---|"]
    for number, (stage, files) in enumerate(stages, start=1):
        names = sorted(files, key=lambda name: -files[name].path)
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        rows.append(f"| {number} {stage} | {shown} | {sum(c.path for c in files.values())} |")
    every = [count for _, files in stages for count in files.values()]
    path, functions = sum(c.path for c in every), sum(c.functions for c in every)
    rows.append(f"| | {len(every)} files; the functions entered hold {functions:,} | {path:,} |")
    return "\n".join(rows)


def write(stages: list[tuple[str, dict[str, Count]]]) -> None:
    """Puts the table into its place on the page."""
    page = PAGE.read_text()
    assert "| stage |" in page, "the table is gone from the page"
    fresh = re.sub(r"\| stage \|.*?\n\n", lambda _: table(stages) + "\n\n", page, flags=re.DOTALL)
    PAGE.write_text(fresh)


def main() -> None:
    """Measures, prints, and ends the process with all its threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="stage -> file -> statements")
    parser.add_argument("--files", action="store_true", help="every file")
    parser.add_argument("--write", action="store_true", help="into docs/ARCHITECTURE.md")
    args = parser.parse_args()
    recorder = Recorder()
    recorder.install()
    asyncio.run(_measure(recorder))
    sys.settrace(None)
    stages = by_stage(recorder.counts())
    if args.write:
        write(stages)
    print(json.dumps(dict(stages)) if args.json else table(stages))
    if args.files:
        for _, files in stages:
            for name, count in files.items():
                print(f"{count.path:5} of {count.functions:4} of {count.file:4}  {name}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
