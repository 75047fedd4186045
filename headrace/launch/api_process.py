"""What an API process is told by the supervisor, and the name of the module that runs it.

The module itself is `headrace.front.server.process`: it stands above this floor, so it is known here by name only.
"""

from __future__ import annotations

import msgspec

from headrace.base.config.resolved import Decision, EngineSpec, ServerSpec, TextSpec

MODULE = "headrace.front.server.process"


class ApiSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One API process: how it makes text, how it serves, where the engine cores listen.

    A core that is silent for `heartbeat_timeout_s` counts as stuck: /health says so. `engine` and `decisions` are only
    told on (GET /v1/admin/config).
    """

    text: TextSpec
    server: ServerSpec
    socket_paths: list[str]
    heartbeat_timeout_s: float
    engine: EngineSpec | None = None
    decisions: tuple[Decision, ...] = ()
