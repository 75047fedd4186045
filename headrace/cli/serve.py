"""`headrace serve`: resolve, bind, start the process tree, print what was decided."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.base import env
from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import Decision, Resolved
from headrace.base.config.tree import Options
from headrace.base.errors import StartError
from headrace.base.process_age import process_age_s
from headrace.base.telemetry import log as logs
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.cli.other_servers import translated, without_gpu
from headrace.launch.facts import resolve_options
from headrace.launch.listen import address_of, bind, bind_admin, reserve
from headrace.launch.supervisor import ManagedProcess, Supervisor
from headrace.launch.topology import RuntimeFolder


def main(argv: Sequence[str]) -> int:
    """`headrace serve [MODEL] [options]`."""
    groups = ("model", "kv", "scheduler", "device", "adapters", "server")
    line = CommandLine(
        "headrace serve", "Serve a model over HTTP (OpenAI-compatible).", groups=groups
    )
    add_model_argument(line)
    words, notes = translated(argv, line.flags)
    own, options = line.parse(words)
    options, notes = without_gpu(options, notes)
    return run(with_model(options, own.path), notes)


def run(options: Options, notes: Sequence[Decision] = ()) -> int:
    """Serves until SIGTERM; the exit status (0 after a drain, 2 if it cannot start, 1 after a crash
    loop)."""
    logs.configure("headrace", options.server.log_level)
    try:
        env.cache_dir()  # whose faults are said before anything is loaded
        resolved = resolve_options(options)
        resolved = msgspec.structs.replace(resolved, decisions=(*notes, *resolved.decisions))
        listener = bind(resolved.server.host, resolved.server.port)
        place = resolved.server.admin_listen
        admin = None if place is None else bind_admin(place)
        resolved, grpc = _with_grpc(resolved)
    except StartError as error:
        print(f"headrace: {error.message}", file=sys.stderr, flush=True)
        return 2
    folder = RuntimeFolder()
    address = address_of(listener)

    def announce(processes: list[ManagedProcess]) -> None:
        show_start(resolved, processes, seconds=process_age_s())
        print(f"headrace is ready: {address}", flush=True)
        if grpc is not None:
            print(f"headrace serves gRPC: {address_of(grpc, scheme='')}", flush=True)
        if admin is not None:
            at = address_of(admin)
            print(
                f"administration: {at if at.startswith('unix:') else at + '/v1/admin/'}", flush=True
            )
        if resolved.server.log_level != "error" and not address.startswith("unix:"):
            print(what_to_try(resolved, address), flush=True)

    try:
        return Supervisor(resolved, folder, listener, announce, admin=admin).run()
    finally:
        folder.close()
        for one in (listener, admin, grpc):
            if one is not None:
                one.close()


def _with_grpc(resolved: Resolved) -> tuple[Resolved, socket.socket | None]:
    """With the port that gRPC gets, and the socket that holds it for the API processes."""
    server = resolved.server
    if server.grpc_port is None:
        return resolved, None
    held = reserve(server.host, server.grpc_port)
    server = msgspec.structs.replace(server, grpc_port=held.getsockname()[1])
    return msgspec.structs.replace(resolved, server=server), held


def what_to_try(resolved: Resolved, address: str) -> str:
    """The first things a person may want to do, ready to be pasted."""
    host = address.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")
    model = json.dumps(resolved.text.model_names[0])
    messages = '"messages": [{"role": "user", "content": "Hello! Who are you?"}]'
    keyed = bool(resolved.server.api_key_digests or resolved.server.api_key_file)
    header = '-H "Authorization: Bearer $KEY" ' if keyed else ""
    body = f'{{"model": {model}, {messages}}}'.replace("'", "'\\''")
    key = "KEY" if keyed else '"none"'
    ask = messages.replace('"messages": ', "messages=", 1)
    return (
        f"try:  curl {host}/v1/chat/completions {header}-H 'Content-Type: application/json' -d '{body}'\n"
        f'  or  openai.OpenAI(base_url="{host}/v1", api_key={key}).chat.completions.create('
        f"model={model}, {ask})"
    )


def show_start(resolved: Resolved, processes: list[ManagedProcess], *, seconds: float) -> None:
    """One table of decisions, one line of memory, one line of where the start-up time went."""
    cores = [
        process.report for process in processes if process.is_core and process.report is not None
    ]
    core = cores[0]
    console = Console(stderr=True)
    console.print(_table([*resolved.decisions, *(Decision(*row) for row in core.decisions)]))
    memory = core.memory
    console.print(
        f"memory: weights {memory['weight_bytes'] / 2**30:.2f} GiB, KV cache {memory['kv_bytes'] / 2**30:.2f} GiB"
        f" = {memory['kv_blocks']} blocks = {memory['kv_tokens']} tokens"
        + (f", graphs {memory['graph_bytes'] / 2**20:.0f} MiB" if memory["graph_bytes"] else "")
        + (f", in each of {len(cores)} replicas" if len(cores) > 1 else ""),
        highlight=False,
    )
    parts = {**core.start_s, "rest": seconds - sum(core.start_s.values())}
    phases = ", ".join(f"{name} {spent:.2f} s" for name, spent in parts.items() if spent >= 0.005)
    console.print(f"start: {seconds:.2f} s ({phases})", highlight=False)


def _table(decisions: list[Decision]) -> Table:
    table = Table("option", "requested", "chosen", "why", title="Decisions", title_justify="left")
    for decision in decisions:
        table.add_row(decision.field, decision.requested, decision.chosen, decision.why)
    return table
