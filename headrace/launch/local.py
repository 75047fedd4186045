"""Engine cores without a server: what `LLM`, `headrace bench` and `headrace chat` start and talk
to."""

from __future__ import annotations

import selectors
import socket
import subprocess
import weakref
from types import TracebackType

import msgspec

from headrace.base.config.resolved import Resolved
from headrace.base.config.tree import Options
from headrace.base.errors import EngineDead, StartError
from headrace.launch.expert_group import MeetingPlaces
from headrace.launch.facts import resolve_options
from headrace.launch.kv_events import remove_with
from headrace.launch.prestart import CORE_MODULE
from headrace.launch.topology import ChildProcess, Report, RuntimeFolder, core_environment, spawn

STOP_GRACE_S = 5.0


class LocalEngine:
    """Running engine cores of this process's own. They end with `close`, with this object, or with
    this process."""

    def __init__(
        self, resolved: Resolved, folder: RuntimeFolder, children: list[ChildProcess]
    ) -> None:
        self.resolved = resolved
        self.socket_paths = [folder.socket_path(index) for index in range(len(children))]
        self.reports: list[Report] = []
        self._children = children
        self._finalizer = weakref.finalize(self, _stop, children, folder)

    def close(self) -> None:
        """Ends the cores and removes their folder; idempotent."""
        self._finalizer()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Returns when every core has loaded; StartError with the core's message if one cannot."""
        for child in self._children:
            self.reports.append(_wait_report(child))
            # Nobody reads what comes later, heartbeats above all: unread they would fill the socket
            # and stop the core some minutes on. Now they are errors that the core passes over.
            child.status.shutdown(socket.SHUT_RD)


def start_local(options: Options) -> LocalEngine:
    """Finds the model, resolves the options and starts the cores; returns when they are ready."""
    resolved = resolve_options(_for_throughput(options))
    folder = RuntimeFolder()
    spec = folder.write_spec("core", resolved.engine)
    for index in range(resolved.replicas):
        remove_with(folder, resolved.engine.kv, folder.socket_path(index))
    places, grouped = MeetingPlaces(folder), resolved.engine.device.expert_group is not None
    children = [
        spawn(
            "core",
            CORE_MODULE,
            "--spec",
            spec,
            "--socket",
            folder.socket_path(index),
            *(places.words(index) if grouped else ()),
            die_with_thread=False,
            environment=core_environment(resolved, index),
        )
        for index in range(resolved.replicas)
    ]
    engine = LocalEngine(resolved, folder, children)
    try:
        engine.wait_ready()
    except BaseException:
        engine.close()
        raise
    return engine


def _for_throughput(options: Options) -> Options:
    """Nobody watches single tokens of these engines: prompts need not make room for decodes."""
    if options.scheduler.max_decode_slowdown != "auto":
        return options
    scheduler = msgspec.structs.replace(options.scheduler, max_decode_slowdown=None)
    return msgspec.structs.replace(options, scheduler=scheduler)


def _wait_report(child: ChildProcess) -> Report:
    with selectors.DefaultSelector() as selector:
        selector.register(child.status, selectors.EVENT_READ)
        selector.select()
    for message in child.reports():
        if message.error is not None:
            raise StartError(message.error)
        return message
    raise EngineDead(f"the engine core died while starting (exit status {child.process.wait()})")


def _stop(children: list[ChildProcess], folder: RuntimeFolder) -> None:
    for child in children:
        child.status.close()  # tells it to end
    for child in children:
        try:
            child.process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
    folder.close()
