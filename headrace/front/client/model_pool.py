"""The API process's side of the pool of models (launch/many): who may send requests to which model.

A model is asked for before its first request and given back after the last; requests in between
share what was granted, so that a busy model costs no message per request. Once the pool has closed
a model, new requests ask first again.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import msgspec

from headrace.base.errors import EngineDead, from_wire
from headrace.base.wire.codec import Codec, cut_frames
from headrace.base.wire.models import (
    ChangeModel,
    ExplainWait,
    FromPool,
    LeaveModel,
    ListModels,
    ModelClosed,
    ModelGone,
    PoolReply,
    ReleaseModel,
    ServedModelState,
    ToPool,
    WantModel,
)

MAX_FRAME_BYTES = 16 << 20


class ModelPoolClient(asyncio.Protocol):
    """The connection, and what was granted through it.

    Invariants: `_grants[m]` is above 0 exactly while `_running[m]` is; every number in `_replies`
    is answered once, also where nobody waits for it any more. A number of a request that wants a
    model is kept with that model.
    """

    def __init__(self, on_gone: Callable[[int], None]) -> None:
        self._on_gone = on_gone
        self._codec: Codec[ToPool | FromPool] = Codec(FromPool)
        self._received = bytearray()
        self._replies: dict[int, tuple[asyncio.Future[Any], int | None]] = {}
        self._next = 0
        self._open: set[int] = set()
        self._grants: Counter[int] = Counter()
        self._running: Counter[int] = Counter()
        self._keep_alive_s: dict[int, float] = {}
        self._transport: asyncio.Transport | None = None

    async def start(self, ours: socket.socket) -> None:
        """Takes the inherited end of the socket over."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)

    @property
    def connected(self) -> bool:
        """Whether the parent is there."""
        return self._transport is not None

    def close(self) -> None:
        """Ends the connection."""
        if self._transport is not None:
            self._transport.close()

    async def take(self, model: int, *, ids: tuple[str, ...] = (), tenant: str = "") -> None:
        """Returns once a request to this model may be sent; `give_back` follows. Whatever keeps the
        model from being loaded is raised."""
        if model in self._open:
            self._running[model] += 1
            return
        number = self._number()
        want = WantModel(number=number, model=model, ids=ids, tenant=tenant)
        reply = self._ask(number, want, model=model)
        try:
            await reply
        except asyncio.CancelledError:
            if reply.done() and not reply.cancelled() and reply.exception() is None:
                self.give_back(model)  # it was granted in the same turn of the loop
            else:
                self._send(LeaveModel(number))
            raise

    def take_again(self, model: int) -> None:
        """One more of what was granted, while another request has it."""
        assert self._running[model] > 0, model
        self._running[model] += 1

    def give_back(self, model: int, keep_alive_s: float | None = None) -> None:
        """A request is over; it wants the model to stay so long (see ReleaseModel)."""
        if keep_alive_s is not None:
            self._keep_alive_s[model] = keep_alive_s
        self._running[model] -= 1
        if self._running[model] == 0:
            self._release(model)

    def keep(self, model: int, keep_alive_s: float) -> None:
        """Says how long a model shall stay, without a request to it."""
        if self._running[model]:
            self._keep_alive_s[model] = keep_alive_s
        else:
            self._send(ReleaseModel(model=model, count=0, keep_alive_s=keep_alive_s))

    async def change(self, model: int, *, load: bool) -> None:
        """Loads a model, or unloads it once it is idle; returns when that is done."""
        number = self._number()
        await self._ask(number, ChangeModel(number=number, model=model, load=load))

    async def states(self) -> list[ServedModelState]:
        """The state of every model, in the order of the catalog."""
        number = self._number()
        states = await self._ask(number, ListModels(number))
        return msgspec.convert(states, list[ServedModelState])

    async def explain(self, ident: str, *, tenant: str | None) -> list[object]:
        """Why the requests of this name wait for a model."""
        number = self._number()
        asked = ExplainWait(number=number, id=ident, tenant=tenant)
        return cast("list[object]", await self._ask(number, asked))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol: this process ends with its parent."""
        self._transport = None
        for reply, _ in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineDead("the server ends", retry_after_s=1.0))
        self._replies.clear()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._received += data
        for body in cut_frames(self._received, max_bytes=MAX_FRAME_BYTES):
            message = self._codec.decode(body)
            if isinstance(message, PoolReply):
                self._take_reply(message)
            elif isinstance(message, ModelClosed):
                self._open.discard(message.model)
            elif isinstance(message, ModelGone):
                self._open.discard(message.model)
                self._on_gone(message.model)

    def _take_reply(self, message: PoolReply) -> None:
        reply, model = self._replies.pop(message.number)
        if message.error is not None:
            if not reply.done():
                reply.set_exception(from_wire(message.error))
            return
        if model is not None:
            self._take_grant(model, wanted=not reply.done())
        if not reply.done():
            reply.set_result(msgspec.msgpack.decode(message.result))

    def _take_grant(self, model: int, *, wanted: bool) -> None:
        """The request counts from now on, before its task runs again: another one that ends
        meanwhile must not release what it was granted."""
        self._grants[model] += 1
        self._open.add(model)
        if wanted:
            self._running[model] += 1
        elif self._running[model] == 0:
            self._release(model)

    def _release(self, model: int) -> None:
        self._open.discard(model)
        self._running.pop(model, None)
        count, keep_alive_s = self._grants.pop(model), self._keep_alive_s.pop(model, None)
        if self._transport is not None:
            self._send(ReleaseModel(model=model, count=count, keep_alive_s=keep_alive_s))

    def _ask(
        self, number: int, message: ToPool, *, model: int | None = None
    ) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send(message)
        self._replies[number] = reply, model
        return reply

    def _send(self, message: ToPool) -> None:
        if self._transport is None:
            raise EngineDead("the server ends", retry_after_s=1.0)
        self._transport.write(self._codec.frame(message))

    def _number(self) -> int:
        self._next += 1
        return self._next
