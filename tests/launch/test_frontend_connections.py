"""The socket side of a core, over real sockets (P2)."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.base.wire.codec import HEADER, Codec
from headrace.base.wire.control import PING, Call, Hello, Reply
from headrace.base.wire.request import (
    AbortRequests,
    EngineRequest,
    Finished,
    RowSampling,
    StopRules,
    ToCore,
    ToFront,
    TokenBatch,
)
from headrace.launch.core_process import split
from headrace.launch.frontend_connections import (
    MAX_INCOMING_BYTES,
    FrontendConnections,
    FrontendGone,
)

HELLO = Hello(
    logits_width=9, max_model_len=8, capacity_tokens=8, max_running=2, num_blocks=3, block_tokens=16
)
TO_CORE: Codec[ToCore] = Codec(ToCore)
TO_FRONT: Codec[ToFront] = Codec(ToFront)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "core.sock")


@pytest.fixture
def frontend_connections(path: str) -> Iterator[FrontendConnections]:
    parent, status = socket.socketpair()
    with parent:
        connections = FrontendConnections(path, HELLO, status, orphaned=lambda: None)
        yield connections
    assert connections.join(300)


def connect(path: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(5)
    found.connect(path)
    return found


def read(sock: socket.socket) -> ToFront:
    (length,) = HEADER.unpack(exactly(sock, HEADER.size))
    return TO_FRONT.decode(exactly(sock, length))


def exactly(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = sock.recv(count - len(found))
        assert data, "the connection ended"
        found += data
    return found


def request(number: int) -> EngineRequest:
    return EngineRequest(
        id=number, prompt=b"\1\0\0\0", stop=StopRules(max_tokens=1), sampling=RowSampling()
    )


def test_the_socket_is_private_and_says_hello_first(
    frontend_connections: FrontendConnections, path: str
) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with connect(path) as frontend:
        assert read(frontend) == HELLO


def test_messages_arrive_in_order_however_they_are_cut(
    frontend_connections: FrontendConnections, path: str
) -> None:
    sent: list[ToCore] = [request(1), AbortRequests((1,)), Call(number=4, operation="status")]
    data = b"".join(TO_CORE.frame(message) for message in sent)
    got: list[object] = []
    with connect(path) as frontend:
        for byte in data:
            frontend.sendall(bytes([byte]))
        while len(got) < 3:
            got += [message for _, message in frontend_connections.take(block=True, at_most_s=300)]
    assert got == sent


@pytest.mark.parametrize(
    "bad",
    [
        b"\x05\0\0\0hello",
        HEADER.pack(MAX_INCOMING_BYTES + 1),
        TO_CORE.frame(request(1))[:4] + b"\xff" * (len(TO_CORE.frame(request(1))) - 4),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x05cos\nsystem\n(S'touch /tmp/x'\ntR.",
    ],
)
def test_a_malformed_frame_drops_the_front_before_anything_happens(
    frontend_connections: FrontendConnections, path: str, bad: bytes
) -> None:
    with connect(path) as frontend, connect(path) as bystander:
        read(frontend)
        read(bystander)
        frontend.sendall(TO_CORE.frame(request(7)) + bad)
        assert frontend.recv(1) == b"", "the connection is closed"
        found = frontend_connections.take(block=True, at_most_s=300)
        assert [type(message) for _, message in found] == [FrontendGone]
        assert frontend_connections.malformed_frames == 1
        bystander.sendall(TO_CORE.frame(request(8)))
        ((_, message),) = frontend_connections.take(block=True, at_most_s=300)
        assert message == request(8)


def test_a_large_batch_reaches_a_front_that_reads_late(
    frontend_connections: FrontendConnections, path: str
) -> None:
    count = 1 << 20
    batch = TokenBatch(ids=np.arange(count), tokens=np.arange(count, dtype=np.int32))
    with connect(path) as frontend:
        read(frontend)
        frontend.sendall(TO_CORE.frame(request(1)))
        ((number, _),) = frontend_connections.take(block=True, at_most_s=300)
        frontend_connections.send(number, batch)
        frontend_connections.send(
            number, TokenBatch(ids=np.array([5]), tokens=np.array([6], np.int32))
        )
        first, second = read(frontend), read(frontend)
    assert isinstance(first, TokenBatch) and isinstance(second, TokenBatch)
    assert np.array_equal(first.ids, batch.ids) and second.ids.tolist() == [5]


def test_a_ping_is_answered_while_the_step_loop_takes_nothing(
    frontend_connections: FrontendConnections, path: str
) -> None:
    with connect(path) as frontend:
        read(frontend)
        frontend.sendall(TO_CORE.frame(Call(number=9, operation=PING)))
        assert read(frontend) == Reply(number=9)
    ((_, message),) = frontend_connections.take(block=True, at_most_s=300)
    assert message == FrontendGone()


def test_a_front_that_leaves_is_told_once(
    frontend_connections: FrontendConnections, path: str
) -> None:
    connect(path).close()
    ((number, message),) = frontend_connections.take(block=True, at_most_s=300)
    assert message == FrontendGone()
    frontend_connections.send(number, TokenBatch(ids=np.array([1]), tokens=np.array([1], np.int32)))


def test_a_batch_is_split_by_owner_and_strangers_get_nothing() -> None:
    batch = TokenBatch(
        ids=np.array([1, 2, 1, 3]),
        tokens=np.array([10, 20, 11, 30], np.int32),
        cached=[(1, 16), (9, 32), (2, 48)],
        finished=[Finished(id=2, reason="stop"), Finished(id=4, reason="abort")],
    )
    parts = split(batch, {1: 100, 2: 200, 4: 100})
    assert set(parts) == {100, 200}
    assert parts[100].ids.tolist() == [1, 1] and parts[100].tokens.tolist() == [10, 11]
    assert [end.id for end in parts[100].finished] == [4]
    assert (parts[100].cached, parts[200].cached) == ([(1, 16)], [(2, 48)])
    assert parts[200].tokens.tolist() == [20] and [e.id for e in parts[200].finished] == [2]


def test_one_front_gets_the_batch_itself() -> None:
    batch = TokenBatch(ids=np.array([1, 2]), tokens=np.array([1, 2], np.int32))
    assert split(batch, {1: 5, 2: 5, 9: 6}) == {5: batch}


@pytest.mark.parametrize("unread", [b"", b'{"heartbeat":true}\n'])
def test_the_end_of_the_parent_is_noticed_also_over_unread_heartbeats(
    path: str, unread: bytes
) -> None:
    parent, status = socket.socketpair()
    ends: list[str] = []
    connections = FrontendConnections(path, HELLO, status, orphaned=lambda: ends.append("orphaned"))
    with connect(path) as frontend:
        read(frontend)
        status.sendall(unread or b" ")
        if not unread:
            parent.recv(1)
        parent.close()
        assert connections.join(300) and ends == ["orphaned"]
        assert frontend.recv(1) == b""
