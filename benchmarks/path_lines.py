"""How much one has to read to follow a request: `python -m benchmarks.path_lines [--json | --files | --write]`.

Serves the bundled model in one process (real HTTP, real sockets, real model) and traces one streamed chat. On the path
is every statement of headrace that runs between the HTTP body and the last chunk, and the signature of every function
entered; blank lines, comments and docstrings are not counted, nor are branches that a plain chat does not take. Of
the wire types, whose fields are read by generated code, and of the template's process, which is not traced, whole
definitions count (`NAMED`). The first request is not traced: start-up and first use are no part of the path. Fifteen
later ones are, and what runs in each of them counts: timers (heartbeats, watchdogs, polls) that went off meanwhile
are no part of it either. The C++ of the kernels is not counted.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
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
LIMIT = 3000
TRACED = 15

# (stop, files or folders of headrace/). A file belongs to the first stop that names it.
STOPS = (
    ("HTTP body -> internal request", ("front/server",)),
    (
        "messages -> prompt -> tokens",
        ("front/text/chat", "front/text/template", "front/text/tokenizer", "front/client/inputs"),
    ),
    ("to the core process", ("front/client/connection", "base/wire", "launch")),
    ("the loop", ("core/core.py", "core/control.py", "core/counters.py", "core/admission.py")),
    ("choose what runs", ("core/scheduler", "core/rows.py")),
    ("find cached blocks, allocate", ("core/kv",)),
    ("plan to the workers", ("back/executor",)),
    ("rows -> batch -> attention plan", ("back/runner",)),
    ("forward", ("back/models", "back/layers", "back/attention", "back/kernels")),
    ("sample", ("back/sampling",)),
    ("update, finish, free", ("core/landing.py", "core/outbox.py", "core/request.py")),
    ("tokens -> text -> events", ("front/client", "front/text")),
    ("everywhere", ("base", "core")),
)
NAMED = {
    "base/wire/params.py": ("SamplingNumbers", "SamplingParams", "StopRules", "RowSampling"),
    "base/wire/request.py": ("EngineRequest", "Finished", "TokenBatch"),
    "base/wire/step.py": ("RowStart", "StepPlan", "StepResult"),
    "front/client/events.py": ("Generation", "Started", "Delta", "Ended"),
    "front/server/openai/schema.py": ("Common", "ChatRequest"),
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
    """Lines of code on the path, in the functions it enters, and all lines of the file."""

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
        return {name: self._count(name) for name in sorted(names | NAMED.keys())}

    def _count(self, name: str) -> Count:
        source = Source(PACKAGE / name)
        full = str(PACKAGE / name)
        named = source.definitions(NAMED.get(name, ()))
        path = source.statements(self._seen[full], self._calls[full]) | named
        functions = source.functions(self._calls[full]) | named
        return Count(len(path & source.code), len(functions & source.code), len(source.texts))


def _common(earlier: dict[str, set[int]], now: dict[str, set[int]]) -> dict[str, set[int]]:
    both = {name: earlier[name] & now[name] for name in earlier.keys() & now.keys()}
    return defaultdict(set, {name: lines for name, lines in both.items() if lines})


class Source:
    """The lines of one file. `code`: neither blank, nor comment, nor docstring."""

    def __init__(self, path: Path) -> None:
        self.texts = path.read_text().splitlines()
        self._tree = ast.parse(path.read_text())
        self.code = {
            i for i, t in enumerate(self.texts, 1) if t.strip() and not t.lstrip().startswith("#")
        }
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                self.code -= _extent(node)

    def statements(self, ran: set[int], entered: set[int]) -> set[int]:
        """The whole statements (of compound ones the head) that ran in part; signatures of what was entered."""
        found: set[int] = set()
        for node in ast.walk(self._tree):
            if isinstance(node, FUNCTIONS):
                if _extent(node) and min(_extent(node)) in entered:
                    found |= _head(node)
            elif isinstance(node, ast.stmt) and not isinstance(node, ast.ClassDef):
                found |= lines if (lines := _head(node)) & ran else set()
        return found

    def functions(self, entered: set[int]) -> set[int]:
        """All lines of the functions that were entered."""
        nodes = (node for node in ast.walk(self._tree) if isinstance(node, FUNCTIONS))
        found = [lines for node in nodes if min(lines := _extent(node)) in entered]
        return set().union(*found)

    def definitions(self, names: tuple[str, ...]) -> set[int]:
        """All lines of these classes and functions of the module."""
        nodes = [n for n in self._tree.body if isinstance(n, (*FUNCTIONS, ast.ClassDef))]
        found = {node.name: _extent(node) for node in nodes}
        return set().union(*(found[name] for name in names))


def _extent(node: ast.stmt) -> set[int]:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return set(range(first, (node.end_lineno or first) + 1))


def _head(node: ast.stmt) -> set[int]:
    """A simple statement, or a compound one up to its body."""
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


async def _measure(recorder: Recorder) -> None:
    from headrace.back.executor.choose import make_executor
    from headrace.base.config.tree import Options
    from headrace.core.core import EngineCore
    from headrace.front.server.process import serve
    from headrace.launch.api_process import ApiSpec
    from headrace.launch.core_process import CoreLoop, Watchdog
    from headrace.launch.facts import resolve_options
    from headrace.launch.fronts import Fronts
    from headrace.launch.topology import RuntimeFolder

    resolved = resolve_options(Options())
    folder = RuntimeFolder()
    core_status, core_parent = socket.socketpair()
    api_status, api_parent = socket.socketpair()
    core = EngineCore(resolved.engine, make_executor(resolved.engine))
    fronts = Fronts(folder.socket_path(0), core.hello(), core_status)
    loop = CoreLoop(core, fronts, Watchdog(300.0, core_status))
    threading.Thread(target=loop.run, daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0))
    spec = ApiSpec(
        text=resolved.text,
        server=resolved.server,
        socket_paths=[folder.socket_path(0)],
        heartbeat_timeout_s=30.0,
    )
    server = asyncio.ensure_future(serve(spec, listener, api_status))
    assert await asyncio.to_thread(api_parent.recv, 4096), "the API did not become ready"
    port = listener.getsockname()[1]
    await _ask(port)
    for _ in range(TRACED):
        with recorder.once_more():
            await _ask(port)
    api_parent.close()
    await server
    folder.close()
    core_parent.detach()  # the core's threads end with this process


def by_stop(counts: dict[str, Count]) -> list[tuple[str, dict[str, Count]]]:
    """Each stop with its files."""
    stops: list[tuple[str, dict[str, Count]]] = [(stop, {}) for stop, _ in STOPS]
    for name, count in counts.items():
        place = next(
            i for i, (_, rooms) in enumerate(STOPS) if any(name.startswith(room) for room in rooms)
        )
        stops[place][1][name] = count
    return stops


def table(stops: list[tuple[str, dict[str, Count]]]) -> str:
    """The table of docs/ARCHITECTURE.md."""
    rows = ["| stop | files, the longest way first | lines |", "|---|---|---|"]
    for number, (stop, files) in enumerate(stops, start=1):
        names = sorted(files, key=lambda name: -files[name].path)
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        rows.append(f"| {number} {stop} | {shown} | {sum(c.path for c in files.values())} |")
    every = [count for _, files in stops for count in files.values()]
    path, functions = sum(c.path for c in every), sum(c.functions for c in every)
    rows.append(f"| | {len(every)} files; the functions entered hold {functions:,} | {path:,} |")
    return "\n".join(rows)


def write(stops: list[tuple[str, dict[str, Count]]]) -> None:
    """Puts the table into its place on the page."""
    page = PAGE.read_text()
    assert "| stop |" in page, "the table is gone from the page"
    fresh = re.sub(r"\| stop \|.*?\n\n", lambda _: table(stops) + "\n\n", page, flags=re.DOTALL)
    PAGE.write_text(fresh)


def main() -> None:
    """Measures, prints, and ends the process with all its threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="stop -> file -> lines")
    parser.add_argument("--files", action="store_true", help="every file")
    parser.add_argument("--write", action="store_true", help="into docs/ARCHITECTURE.md")
    given = parser.parse_args()
    recorder = Recorder()
    recorder.install()
    asyncio.run(_measure(recorder))
    sys.settrace(None)
    stops = by_stop(recorder.counts())
    if given.write:
        write(stops)
    print(json.dumps(dict(stops)) if given.json else table(stops))
    if given.files:
        for _, files in stops:
            for name, count in files.items():
                print(f"{count.path:5} of {count.functions:4} of {count.file:4}  {name}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
