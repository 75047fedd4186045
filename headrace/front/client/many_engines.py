"""The engines of several models as one `EngineClient`: for what concerns the server as a whole,
such as health, metrics and administration. Requests go to the engine of their model."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from headrace.base.errors import InvalidRequest, NotFound, Unavailable
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.events import Events, Generation
from headrace.front.client.model_pool import ModelPoolClient

ONE_MODEL = frozenset(
    {"reload", "sleep", "wake", "load_adapter", "unload_adapter", "weights", "weights_version"}
)
"""Operations that make no sense for all models at once."""


class ManyEngines:
    """Implements `events.EngineClient`. `engines` has the engine of every model that was used here,
    by its place; those whose models are not loaded are not connected."""

    def __init__(
        self, pool: ModelPoolClient, engines: dict[int, AsyncLLM], inherited: socket.socket
    ) -> None:
        self._pool = pool
        self._engines = engines
        self._inherited = inherited

    async def start(self) -> None:
        """Joins the pool; engines connect when their models are loaded."""
        await self._pool.start(self._inherited)

    @property
    def _connected(self) -> list[AsyncLLM]:
        return [one for _, one in sorted(self._engines.items()) if one.connected[0]]

    def generate(self, generation: Generation) -> Events:
        """See EngineClient: by the first model that is loaded, for probes."""
        connected = self._connected
        if not connected:
            raise Unavailable("no model is loaded", retry_after_s=1.0)
        return connected[0].generate(generation)

    def check_queue(self, deadline_s: float | None = None) -> None:
        """See EngineClient: which queue it is, the request's model says."""

    async def explain(self, label: str, *, tenant: str | None = None) -> dict[str, object]:
        """See EngineClient: also of requests that wait for their model."""
        requests = await self._pool.explain(label, tenant=tenant)
        for engine in self._connected:
            try:
                reply = await engine.explain(label, tenant=tenant)
            except NotFound:
                continue
            answers = reply["requests"]
            requests += answers if isinstance(answers, list) else []
        if not requests:
            raise NotFound(f"request {label!r:.100} is not in flight", field="id")
        return {"id": label, "requests": requests}

    async def call(self, operation: str, **arguments: object) -> list[object]:
        """See EngineClient: to the cores of the models that are loaded."""
        replies = await self.call_each(operation, **arguments)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    async def call_each(self, operation: str, **arguments: object) -> list[object]:
        """See EngineClient."""
        if operation in ONE_MODEL:
            raise InvalidRequest(
                f"{operation}: this server has several models; POST /models/load and /models/unload "
                "act on one of them, and adapters are options of their model"
            )
        engines = self._connected
        replies = await asyncio.gather(*(e.call_each(operation, **arguments) for e in engines))
        named: list[object] = []
        for engine, each in zip(engines, replies, strict=True):
            for reply in each:
                about = {"model": engine.text.model_names[0]}
                named.append({**about, **reply} if isinstance(reply, dict) else reply)
        return named

    @property
    def adapters(self) -> Sequence[str]:
        """See EngineClient."""
        return [name for engine in self._connected for name in engine.adapters]

    @property
    def weights_version(self) -> str:
        """See EngineClient: which model answers, a header cannot know; `usage` tells."""
        return ""

    @property
    def context_tokens(self) -> int:
        """See EngineClient: of the largest."""
        return max((e.context_tokens for e in self._engines.values()), default=1)

    @property
    def held(self) -> str:
        """See EngineClient: a model that sleeps wakes for a request."""
        return ""

    @property
    def connected(self) -> tuple[int, int]:
        """See EngineClient: of the models that are loaded."""
        return len(self._connected), len(self._connected)

    @property
    def degraded(self) -> bool:
        """See EngineClient."""
        return any(engine.degraded for engine in self._connected)

    @property
    def stalled(self) -> bool:
        """See EngineClient."""
        return any(engine.stalled for engine in self._connected)

    @property
    def window(self) -> int:
        """See EngineClient."""
        return max((engine.window for engine in self._connected), default=1)

    @property
    def window_tokens(self) -> int:
        """See EngineClient."""
        return max((engine.window_tokens for engine in self._connected), default=1)

    @property
    def cached_block_tokens(self) -> int:
        """See EngineClient."""
        return max((engine.cached_block_tokens for engine in self._connected), default=0)

    @property
    def ready(self) -> bool:
        """See EngineClient: whatever is loaded, another model may be."""
        return self._pool.connected

    @property
    def trouble(self) -> str:
        """See EngineClient: that of one model does not keep the others from serving."""
        return ""

    @property
    def alive(self) -> bool:
        """See EngineClient."""
        return self._pool.connected

    async def close(self) -> None:
        """Closes every engine, and leaves the pool."""
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))
        self._pool.close()
