"""Heartbeats of an API process: they come from its event loop, and never hold it up."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from headrace.launch import api_process
from headrace.launch.api_process import send_heartbeats
from headrace.launch.topology import Report


def test_heartbeats_are_reports_that_the_parent_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_process, "HEARTBEAT_S", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:

        async def some() -> None:
            task = asyncio.create_task(send_heartbeats(theirs))
            for _ in range(5):
                await asyncio.sleep(0)
            task.cancel()

        asyncio.run(some())
        lines = ours.recv(65536).splitlines()
        assert len(lines) >= 2
        reports = [msgspec.json.decode(line, type=Report) for line in lines]
        assert reports == [Report(heartbeat=True)] * len(lines)


def test_a_parent_that_does_not_read_does_not_hold_up_the_loop() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                theirs.send(b"x" * 65536)
        theirs.setblocking(True)

        async def one() -> None:
            task = asyncio.create_task(send_heartbeats(theirs))
            await asyncio.sleep(0)
            task.cancel()

        asyncio.run(one())
