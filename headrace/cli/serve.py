"""`headrace serve`: resolve, bind, start the process tree, print what was decided."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.base import env
from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import Decision, Resolved, ServerSpec, TextSpec
from headrace.base.config.tree import Options
from headrace.base.config.units import show_bytes
from headrace.base.errors import StartError
from headrace.base.process_age import process_age_s
from headrace.base.telemetry import log as logs
from headrace.cli.downloading import with_permission
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.cli.other_servers import translated, without_gpu
from headrace.launch.api_process import ApiSpec
from headrace.launch.children import CoreProcesses, ManagedProcess, api_processes
from headrace.launch.facts import resolve_options
from headrace.launch.listen import address_of, bind, bind_admin, reserve
from headrace.launch.many.catalog import Catalog, read_catalog, serves_many
from headrace.launch.many.service import ModelService
from headrace.launch.replicas import ElasticCores
from headrace.launch.supervisor import SILENCE_S, Supervisor
from headrace.launch.topology import RuntimeFolder


def main(argv: Sequence[str]) -> int:
    """`headrace serve [MODEL] [options]`."""
    groups = ("model", "kv", "scheduler", "device", "adapters", "server", "many")
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
        options = with_permission(options)
        if serves_many(options):
            return _serve_many(read_catalog(options), notes)
        resolved = resolve_options(options)
        resolved = msgspec.structs.replace(resolved, decisions=(*notes, *resolved.decisions))
        return _serve_one(resolved)
    except StartError as error:
        print(f"headrace: {error.message}", file=sys.stderr, flush=True)
        return 2


def _serve_one(resolved: Resolved) -> int:
    with Listening(resolved.server) as places, closing(RuntimeFolder()) as folder:
        spec = ApiSpec(
            text=resolved.text,
            server=places.server,
            socket_paths=[folder.socket_path(index) for index in range(resolved.max_replicas)],
            replicas=resolved.replicas,
            heartbeat_timeout_s=SILENCE_S,
            engine=resolved.engine,
            decisions=resolved.decisions,
        )

        def announce(processes: list[ManagedProcess]) -> None:
            show_start(resolved, processes, seconds=process_age_s())
            places.announce(what_to_try(resolved.text, places.server, places.address))

        cores = CoreProcesses(resolved, folder)
        own = cores.all()
        apis = api_processes(spec, folder, places.listener, admin=places.admin)
        elastic = ElasticCores(
            cores.make,
            folder.socket_path,
            fixed=resolved.replicas,
            most=resolved.max_replicas,
            is_group=cores.is_group,
        )
        return Supervisor(places.server, [*own, *apis], folder, announce, part=elastic).run()


def _serve_many(catalog: Catalog, notes: Sequence[Decision]) -> int:
    default = catalog.default
    assert default.text is not None
    text = default.text
    with Listening(catalog.server) as places, closing(RuntimeFolder()) as folder:
        service = ModelService(catalog, folder)
        spec = ApiSpec(
            text=text,
            server=places.server,
            socket_paths=service.socket_paths,
            heartbeat_timeout_s=SILENCE_S,
            engine=default.engine,
            decisions=tuple(notes),
            models=tuple(service.places),
        )

        def announce(processes: list[ManagedProcess]) -> None:
            show_models(catalog, seconds=process_age_s())
            places.announce(what_to_try(text, places.server, places.address))

        apis = api_processes(
            spec, folder, places.listener, admin=places.admin, connect_pool=service.connect
        )
        return Supervisor(places.server, apis, folder, announce, part=service).run()


class Listening:
    """What a server listens on. `server`: with the ports that were free."""

    def __init__(self, server: ServerSpec) -> None:
        self._held = ExitStack()
        self.listener = self._held.enter_context(bind(server.host, server.port))
        place = server.admin_listen
        self.admin = None if place is None else self._held.enter_context(bind_admin(place))
        scheme = "http://" if server.tls is None else "https://"
        self.address = address_of(self.listener, scheme=scheme)
        self.server, self._grpc = _with_grpc(server)
        if self._grpc is not None:
            self._held.enter_context(self._grpc)

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def announce(self, to_try: str) -> None:
        """Says where the server is, and what to try."""
        print(f"headrace is ready: {self.address}", flush=True)
        if self._grpc is not None:
            print(f"headrace serves gRPC: {address_of(self._grpc, scheme='')}", flush=True)
        if self.admin is not None:
            at = address_of(self.admin, scheme=self.address.partition("://")[0] + "://")
            shown = at if at.startswith("unix:") else at + "/v1/admin/"
            print(f"administration: {shown}", flush=True)
        if self.server.log_level != "error" and not self.address.startswith("unix:"):
            print(to_try, flush=True)


def _with_grpc(server: ServerSpec) -> tuple[ServerSpec, socket.socket | None]:
    """With the port that gRPC gets, and the socket that holds it for the API processes."""
    if server.grpc_port is None:
        return server, None
    held = reserve(server.host, server.grpc_port)
    return msgspec.structs.replace(server, grpc_port=held.getsockname()[1]), held


def what_to_try(text: TextSpec, server: ServerSpec, address: str) -> str:
    """The first things a person may want to do, ready to be pasted."""
    host = address.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")
    model = json.dumps(text.model_names[0])
    if _only_hears(text):
        return _with_a_recording(model, server, host)
    messages = '"messages": [{"role": "user", "content": "Hello! Who are you?"}]'
    keyed = bool(server.api_key_digests or server.api_key_file)
    header = '-H "Authorization: Bearer $KEY" ' if keyed else ""
    body = f'{{"model": {model}, {messages}}}'.replace("'", "'\\''")
    key = "KEY" if keyed else '"none"'
    ask = messages.replace('"messages": ', "messages=", 1)
    return (
        f"try:  curl {host}/v1/chat/completions {header}-H 'Content-Type: application/json' -d '{body}'\n"
        f'  or  openai.OpenAI(base_url="{host}/v1", api_key={key}).chat.completions.create('
        f"model={model}, {ask})"
    )


def _only_hears(text: TextSpec) -> bool:
    """Whether a model turns speech into text and there is no chat with it."""
    sound = text.media.settings.sound if text.media is not None else None
    listens = text.hears is not None or bool(text.spectrogram) or sound is not None
    return listens and text.chat_template is None


def _with_a_recording(model: str, server: ServerSpec, host: str) -> str:
    keyed = bool(server.api_key_digests or server.api_key_file)
    header = '-H "Authorization: Bearer $KEY" ' if keyed else ""
    key = "KEY" if keyed else '"none"'
    named = f"model={json.loads(model)}".replace("'", "'\\''")
    return (
        f"try:  curl {host}/v1/audio/transcriptions {header}-F file=@speech.wav -F '{named}'\n"
        f'  or  openai.OpenAI(base_url="{host}/v1", api_key={key})'
        f'.audio.transcriptions.create(model={model}, file=open("speech.wav", "rb"))'
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
        + (
            f", {memory['snapshots']} snapshots of states in {memory['snapshot_bytes'] / 2**20:.0f} MiB of it"
            if memory["snapshots"] > 1
            else ""
        )
        + (f", graphs {memory['graph_bytes'] / 2**20:.0f} MiB" if memory["graph_bytes"] else "")
        + (f", in each of {len(cores)} engine cores" if len(cores) > 1 else ""),
        highlight=False,
    )
    parts = {**core.start_s, "rest": seconds - sum(core.start_s.values())}
    phases = ", ".join(f"{name} {spent:.2f} s" for name, spent in parts.items() if spent >= 0.005)
    console.print(f"start: {seconds:.2f} s ({phases})", highlight=False)


def show_models(catalog: Catalog, *, seconds: float) -> None:
    """A row for each model, and what they share."""
    console = Console(stderr=True)
    table = Table("model", "needs", "options", title="Models", title_justify="left")
    for model in catalog.models:
        need = "-" if model.error else show_bytes(model.num_bytes)
        words = ["pinned"] if model.pinned else []
        words += [f"priority {model.priority}"] if model.priority else []
        table.add_row(model.name, need, model.error or ", ".join(words))
    console.print(table)
    console.print(
        f"memory of all loaded models: {show_bytes(catalog.budget_bytes)}; of those that sleep: "
        f"{show_bytes(catalog.sleep_bytes)}",
        highlight=False,
    )
    console.print(f"start: {seconds:.2f} s", highlight=False)


def _table(decisions: list[Decision]) -> Table:
    table = Table("option", "requested", "chosen", "why", title="Decisions", title_justify="left")
    for decision in decisions:
        table.add_row(decision.field, decision.requested, decision.chosen, decision.why)
    return table
