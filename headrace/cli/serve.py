"""`headrace serve`: resolve, bind, start the process tree, print what was decided."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import Decision, Resolved
from headrace.base.config.tree import Options
from headrace.base.errors import StartError
from headrace.base.telemetry import log as logs
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.launch.facts import resolve_options
from headrace.launch.supervisor import Seat, Supervisor, bind
from headrace.launch.topology import RuntimeFolder


def main(argv: Sequence[str]) -> int:
    """`headrace serve [MODEL] [options]`."""
    groups = ("model", "kv", "scheduler", "device", "server")
    line = CommandLine(
        "headrace serve", "Serve a model over HTTP (OpenAI-compatible).", groups=groups
    )
    add_model_argument(line)
    own, options = line.parse(argv)
    return run(with_model(options, own.path))


def run(options: Options) -> int:
    """Serves until SIGTERM; the exit status (0 after a drain, 2 if it cannot start, 1 after a crash loop)."""
    began = time.monotonic()
    logs.configure("headrace", options.server.log_level)
    try:
        resolved = resolve_options(options)
        listener = bind(resolved.server.host, resolved.server.port)
    except StartError as error:
        print(f"headrace: {error.message}", file=sys.stderr, flush=True)
        return 2
    folder = RuntimeFolder()
    host, port = listener.getsockname()[:2]

    def announce(seats: list[Seat]) -> None:
        show_start(resolved, seats, seconds=time.monotonic() - began)
        print(
            f"headrace is ready: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True
        )

    try:
        return Supervisor(resolved, folder, listener, announce).run()
    finally:
        folder.close()
        listener.close()


def show_start(resolved: Resolved, seats: list[Seat], *, seconds: float) -> None:
    """One table of decisions, one line of memory, one line of where the start-up time went."""
    cores = [seat.report for seat in seats if seat.is_core and seat.report is not None]
    core = cores[0]
    console = Console(stderr=True)
    console.print(_table([*resolved.decisions, *(Decision(*row) for row in core.decisions)]))
    memory = core.memory
    console.print(
        f"memory: weights {memory['weight_bytes'] / 2**30:.2f} GiB, KV cache {memory['kv_bytes'] / 2**30:.2f} GiB"
        f" = {memory['kv_blocks']} blocks = {memory['kv_tokens']} tokens"
        + (f", in each of {len(cores)} replicas" if len(cores) > 1 else ""),
        highlight=False,
    )
    phases = ", ".join(f"{name} {spent:.2f} s" for name, spent in core.start_s.items())
    console.print(f"start: {seconds:.2f} s ({phases})", highlight=False)


def _table(decisions: list[Decision]) -> Table:
    table = Table("option", "given", "chosen", "why", title="Decisions", title_justify="left")
    for decision in decisions:
        table.add_row(decision.field, decision.given, decision.chosen, decision.why)
    return table
