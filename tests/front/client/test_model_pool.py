"""What an API process was granted is given back exactly once, whoever leaves at whichever moment."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from headrace.base.errors import EngineDead, Unavailable, to_wire
from headrace.base.wire.codec import Codec, cut_frames
from headrace.base.wire.models import (
    FromPool,
    LeaveModel,
    ModelClosed,
    ModelGone,
    PoolReply,
    ReleaseModel,
    ToPool,
    WantModel,
)
from headrace.front.client.model_pool import ModelPoolClient


class Parent:
    """The other end of the socket, as the test writes it."""

    def __init__(self, ours: socket.socket) -> None:
        self.socket = ours
        self.codec: Codec[ToPool | FromPool] = Codec(ToPool)
        self.received = bytearray()

    async def messages(self, count: int) -> list[object]:
        loop, bodies = asyncio.get_running_loop(), []
        while len(bodies) < count:
            self.received += await loop.sock_recv(self.socket, 65536)
            bodies += cut_frames(self.received, max_bytes=1 << 20)
        return [self.codec.decode(body) for body in bodies]

    def send(self, *messages: FromPool) -> None:
        self.socket.sendall(b"".join(self.codec.frame(message) for message in messages))


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[ModelPoolClient, Parent, list[int]]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    gone: list[int] = []
    client = ModelPoolClient(gone.append)
    await client.start(theirs)
    yield client, Parent(ours), gone
    client.close()
    ours.close()


async def test_requests_at_the_same_time_share_one_grant() -> None:
    async with connected() as (client, parent, _):
        first = asyncio.ensure_future(client.take(3, ids=("a",), tenant="t"))
        assert await parent.messages(1) == [WantModel(number=1, model=3, ids=("a",), tenant="t")]
        parent.send(PoolReply(number=1))
        await first
        await client.take(3)
        client.take_again(3)
        client.give_back(3, 60.0)
        client.give_back(3)
        client.give_back(3)
        assert await parent.messages(1) == [ReleaseModel(model=3, count=1, keep_alive_s=60.0)]


async def test_a_closed_model_is_asked_for_again_and_both_grants_are_given_back() -> None:
    async with connected() as (client, parent, gone):
        first = asyncio.ensure_future(client.take(0))
        await parent.messages(1)
        parent.send(PoolReply(number=1), ModelClosed(0))
        await first
        second = asyncio.ensure_future(client.take(0))
        assert await parent.messages(1) == [WantModel(number=2, model=0)]
        parent.send(PoolReply(number=2))
        client.give_back(0)
        await second
        client.give_back(0)
        released = [one for one in await parent.messages(1) if isinstance(one, ReleaseModel)]
        if sum(one.count for one in released) < 2:
            released += [one for one in await parent.messages(1) if isinstance(one, ReleaseModel)]
        assert sum(one.count for one in released) == 2
        parent.send(ModelGone(0))
        while not gone:
            await asyncio.sleep(0)
        assert gone == [0]


async def test_who_leaves_while_waiting_holds_nothing() -> None:
    async with connected() as (client, parent, _):
        waiting = asyncio.ensure_future(client.take(0))
        await parent.messages(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await parent.messages(1) == [LeaveModel(1)]
        parent.send(PoolReply(number=1))  # it was granted before the word of its leaving came
        assert await parent.messages(1) == [ReleaseModel(model=0, count=1)]


async def test_who_leaves_in_the_turn_of_its_grant_gives_it_back() -> None:
    async with connected() as (client, parent, _):
        waiting = asyncio.ensure_future(client.take(0))
        await parent.messages(1)
        client.data_received(parent.codec.frame(PoolReply(number=1)))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await parent.messages(1) == [ReleaseModel(model=0, count=1)]


async def test_what_keeps_a_model_from_being_loaded_is_raised() -> None:
    async with connected() as (client, parent, _):
        waiting = asyncio.ensure_future(client.take(0))
        await parent.messages(1)
        parent.send(PoolReply(number=1, error=to_wire(Unavailable("no memory"))))
        with pytest.raises(Unavailable, match="no memory"):
            await waiting
        waiting = asyncio.ensure_future(client.take(0))
        await parent.messages(1)
        parent.socket.close()
        with pytest.raises(EngineDead):
            await waiting
        assert not client.connected
