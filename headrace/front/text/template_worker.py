"""The process that renders chat templates. Run as a script: it imports jinja2 and the standard
library alone.

A template is code of somebody else, and also that of a well-known model can run long on the right
messages. So it is rendered where it can be killed: in Jinja's immutable sandbox, in a process with
bounded memory, under an alarm that ends the process even if nobody waits for it any more. Requests
and answers are JSON documents behind a 4-byte length.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

BREAK = "\ufdd0"
MAX_REPEAT = 1_000_000
_LENGTH = struct.Struct("<I")
_SOURCES: dict[int, str] = {}


Answer = Callable[[dict[str, Any]], Any]


class Refused(Exception):
    """The template itself raised, or asked for too much."""


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model wrote; for rendering it is
    its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with repetition and powers bounded."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**" and abs(right) > 64:
            raise Refused("an exponent is above 64")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                repeats = isinstance(one, str | list | tuple) and isinstance(other, int)
                if repeats and len(one) * other > MAX_REPEAT:
                    raise Refused(f"a repetition gives more than {MAX_REPEAT} items")
        return super().call_binop(context, operator, left, right)


def environment() -> Environment:
    """The environment that chat templates are written for."""
    sandbox = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = _raise
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    sandbox.globals.pop("lipsum", None)
    return sandbox


def _raise(message: str) -> None:
    raise Refused(str(message))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: not escaped for HTML. The guard's character is never
    escaped."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if not ensure_ascii:
        return text
    return "".join(c if c.isascii() or c == BREAK else json.dumps(c)[1:-1] for c in text)


@lru_cache(maxsize=32)
def compiled(source: str) -> tuple[jinja2.Template, list[str]]:
    """The template and the variables it reads."""
    env = environment()
    return env.from_string(source), sorted(jinja2.meta.find_undeclared_variables(env.parse(source)))


def answer(request: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """Compiles, and renders if there are variables to render with."""
    try:
        # a template comes once, with a number that it is known by from then on
        if "source" in request:
            _SOURCES[request["number"]] = request["source"]
        template, names = compiled(_SOURCES[request["number"]])
        if request["variables"] is None:
            return {"names": names}
        return {"text": _render(template, request["variables"], max_chars)}
    except Exception as error:  # whatever a template can raise is the template's failure
        return {"error": _said(error)[:1000]}


def _said(error: Exception) -> str:
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, MemoryError):
        return "the template needs too much memory"
    if isinstance(error, RecursionError):
        return "the template recurses too deeply"
    return f"{type(error).__name__}: {error}"


def _render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    pieces, size = [], 0
    for piece in template.generate(**variables):
        size += len(piece)
        if size > max_chars:
            raise Refused(f"the rendered prompt has more than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def serve(source: BinaryIO, sink: BinaryIO, answer_one: Answer, *, limit_s: float) -> None:
    """Answers requests until the other end closes; one that takes longer than its own `limit_s`, or
    this one, ends the process."""
    sink.write(b"!")
    sink.flush()
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        request = json.loads(source.read(_LENGTH.unpack(head)[0]))
        signal.setitimer(signal.ITIMER_REAL, request.get("limit_s", limit_s))
        body = json.dumps(answer_one(request)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(_LENGTH.pack(len(body)) + body)
        sink.flush()


if __name__ == "__main__":
    memory_bytes, most = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(
        sys.stdin.buffer,
        sys.stdout.buffer,
        lambda request: answer(request, most),
        limit_s=float(sys.argv[3]),
    )
