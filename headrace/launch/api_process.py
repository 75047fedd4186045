"""What an API process is told by the supervisor, and the name of the module that runs it.

The module itself is `headrace.front.server.process`: it stands above this floor, so it is known
here by name only.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec

from headrace.base.config.resolved import Decision, EngineSpec, ServerSpec, TextSpec
from headrace.base.wire.models import ModelPlace
from headrace.launch.topology import HEARTBEAT_S, Report, report

MODULE = "headrace.front.server.process"


class ApiSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One API process: how it makes text, how it serves, where the engine cores listen.

    A core that is silent for `heartbeat_timeout_s` counts as stuck: /health says so. `engine` and
    `decisions` are only told on (GET /v1/admin/config). `models`: of a server with several, in the
    order of `socket_paths`; `text` and `engine` are then those of its default model. `replicas`: so
    many of the cores are always there; None: all.
    """

    text: TextSpec
    server: ServerSpec
    socket_paths: list[str]
    heartbeat_timeout_s: float
    engine: EngineSpec | None = None
    decisions: tuple[Decision, ...] = ()
    models: tuple[ModelPlace, ...] = ()
    replicas: int | None = None


def failure_at(socket_path: str) -> Path:
    """Where an engine core that could not start leaves the reason, for those who wait for it."""
    return Path(socket_path).with_suffix(".error")


async def send_heartbeats(status: socket.socket) -> None:
    """Sends heartbeats to the parent from the event loop, so that a loop that hangs falls silent.

    A heartbeat that the socket does not take at once is left out: the loop must not wait for a
    parent that does not read.
    """
    while True:
        report(status, Report(heartbeat=True), wait=False)
        await asyncio.sleep(HEARTBEAT_S)
