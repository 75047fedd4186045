"""KV that is pushed over TCP (KVT-06): real sockets, files whole or not at all, marks as long as the sender lives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.base.config.kv_options import KVOptions, KVPushSpec
from headrace.base.config.resolved import KVTransferSpec
from headrace.base.errors import ConfigError
from headrace.launch import kv_push
from headrace.launch.kv_push import Announcement, KVPushes, KVReceiver
from headrace.launch.slots import push_of

NAME = "0123456789abcdef" * 2 + "01234567.hrkv"
ROOT = Path(__file__).parents[2]


def until(holds: Callable[[], bool]) -> None:
    """However long a busy machine takes."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


class Ends:
    """A sender and a receiver with folders of their own."""

    def __init__(self, root: Path) -> None:
        self.key = root / "key"
        self.key.write_text("k" * 40)
        self.key.chmod(0o600)
        self.there, self.here = root / "there", root / "here"
        self.there.mkdir()
        self.here.mkdir()
        spec = KVTransferSpec(path=str(self.there), max_bytes=100_000, lease_s=30.0)
        self.receiver = KVReceiver(spec, "127.0.0.1:0", b"k" * 40)
        self.peer = f"127.0.0.1:{self.receiver.port}"
        self.pushes = self.sender(self.key)
        self.mark = self.there / f"{NAME}.part"

    def sender(self, key: Path) -> KVPushes:
        return KVPushes(KVPushSpec(key_file=str(key), peers=(self.peer,)))

    def file(self, content: bytes, rank: str = "") -> Path:
        path = self.here / f"{NAME}{rank}"
        path.write_bytes(content)
        return path

    def end(self, pushes: KVPushes | None = None) -> str | None:
        """Why the next transfer did not arrive."""
        ended: list[str | None] = []
        until(lambda: bool(ended.extend((pushes or self.pushes).ended()) or ended))
        (reason,) = ended
        return reason

    def names(self) -> list[str]:
        return sorted(path.name for path in self.there.iterdir())


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.receiver.close()


def test_files_of_all_ranks_arrive_behind_their_marks(ends: Ends) -> None:
    contents = [os.urandom(40_000), b""]
    push = ends.pushes.begin(ends.peer, NAME, 2)
    assert push is not None
    marks = [f"{NAME}.rank{rank}.part" for rank in range(2)]
    until(lambda: ends.names() == marks)
    push.send([ends.file(content, f".rank{rank}") for rank, content in enumerate(contents)])
    assert ends.end() is None
    assert ends.names() == [f"{NAME}.rank{rank}" for rank in range(2)]
    assert [(ends.there / name).read_bytes() for name in ends.names()] == contents
    assert not list(ends.here.iterdir())
    assert (ends.there / f"{NAME}.rank0").stat().st_mode & 0o777 == 0o600


def test_marks_are_renewed_until_the_prompt_is_computed(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_push, "HEARTBEAT_S", 0.001)
    push = ends.pushes.begin(ends.peer, NAME, 1)
    assert push is not None
    until(ends.mark.exists)
    os.utime(ends.mark, (1, 1))
    until(lambda: ends.mark.stat().st_mtime > 1)
    push.cancel()
    assert ends.end() is None
    until(lambda: ends.names() == [])


@pytest.mark.parametrize("what", ["secret", "room", "name taken", "no name"])
def test_what_is_refused_leaves_nothing(ends: Ends, what: str, tmp_path: Path) -> None:
    pushes, name, reason = ends.pushes, NAME, ""
    if what == "secret":
        other = tmp_path / "other"
        other.write_text("o" * 40)
        other.chmod(0o600)
        pushes, reason = ends.sender(other), "another secret"
    elif what == "name taken":
        (ends.there / NAME).write_bytes(b"there")
        reason = "lies there already"
    elif what == "no name":
        name, reason = f"../{NAME}", "no name of a transfer"
    push = pushes.begin(ends.peer, name, 1)
    assert push is not None
    push.send([ends.file(bytes(200_000 if what == "room" else 10))])
    told = ends.end(pushes)
    assert told is not None and reason in told
    until(lambda: ends.names() == ([NAME] if what == "name taken" else []))
    assert not list(ends.here.iterdir())


def test_what_nobody_fetched_makes_room_when_its_lease_is_over(ends: Ends) -> None:
    for name, age_s in (("0" * 40, 1000), ("1" * 40, 0)):
        path = ends.there / f"{name}.hrkv"
        path.write_bytes(bytes(60_000))
        os.utime(path, (time.time() - age_s,) * 2)
    push = ends.pushes.begin(ends.peer, NAME, 1)
    assert push is not None
    push.send([ends.file(bytes(30_000))])
    assert ends.end() is None
    assert ends.names() == [NAME, f"{'1' * 40}.hrkv"]


def test_a_receiver_that_is_not_there_costs_the_transfer_alone(ends: Ends) -> None:
    ends.receiver.close()
    push = ends.pushes.begin(ends.peer, NAME, 1)
    assert push is not None
    push.send([ends.file(b"KV")])
    assert ends.end() is not None and not list(ends.here.iterdir())


def test_a_receiver_that_dies_meanwhile_costs_the_transfer_alone(ends: Ends) -> None:
    """It has taken a part of a file."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = f"127.0.0.1:{server.getsockname()[1]}"
        push = ends.pushes.begin(peer, NAME, 1)
        assert push is not None
        one, _ = server.accept()
        with one:
            kv_push._announced(one, b"k" * 40)
            one.sendall(b"+")
            push.send([ends.file(bytes(8 << 20))])
            assert one.recv(1) in (b".", b"F")
        assert ends.end() is not None and not list(ends.here.iterdir())


DYING = """
import os, signal, socket, sys, time
from headrace.launch import kv_push
with kv_push._connected(sys.argv[1]) as peer:
    kv_push._announce(peer, kv_push.Announcement(name=sys.argv[2], files=1), b"k" * 40)
    peer.sendall(b"F" + (1000).to_bytes(8, "big") + bytes(500))
    print("half", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_sender_that_is_killed_leaves_nothing(ends: Ends) -> None:
    """A process, in the middle of a file."""
    words = [sys.executable, "-c", DYING, ends.peer, NAME]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        until(ends.mark.exists)
        process.send_signal(signal.SIGKILL)
        until(lambda: ends.names() == [])


def test_one_that_says_nothing_is_taken_for_dead(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_push, "SILENCE_S", 0.05)
    with socket.create_connection(("127.0.0.1", ends.receiver.port)) as peer:
        kv_push._announce(peer, Announcement(name=NAME, files=1), b"k" * 40)
        peer.settimeout(60)
        assert peer.recv(1) == b""
        assert ends.names() == []


def test_senders_are_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_push, "MAX_SENDERS", 1)
    push = ends.pushes.begin(ends.peer, NAME, 1)
    assert push is not None and ends.pushes.begin(ends.peer, NAME, 1) is None
    push.cancel()
    assert ends.end() is None
    again = ends.pushes.begin(ends.peer, NAME, 1)
    assert again is not None
    again.cancel()


def test_what_cannot_be_is_refused_at_start(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("short")
    key.chmod(0o644)
    assert push_of(KVOptions()) is None
    for fields, reason in (
        ({"kv_transfer_listen": "7000"}, "--kv-transfer-listen: '7000' given; HOST:PORT"),
        ({"kv_transfer_peers": ("host:x",)}, "--kv-transfer-peers: 'host:x' given"),
        ({"kv_transfer_listen": "a:1"}, "need --kv-transfer-key-file"),
        (
            {"kv_transfer_listen": "a:1", "kv_transfer_key_file": str(key)},
            "has 5 bytes and mode 644",
        ),
        ({"kv_transfer_listen": "a:1", "kv_transfer_key_file": "/none"}, "No such file"),
    ):
        with pytest.raises(ConfigError, match=reason):
            push_of(KVOptions(**fields))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        key.write_text("k" * 32)
        key.chmod(0o600)
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        spec = KVTransferSpec(path=str(tmp_path), max_bytes=1, lease_s=1.0)
        with pytest.raises(ConfigError, match="cannot be used: Address already in use"):
            KVReceiver(spec, address, b"k" * 32)
