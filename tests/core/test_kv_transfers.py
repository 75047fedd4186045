"""KV that was to come from a server that died: whoever waits for it goes on, and what it left goes (KVT-03, KVT-04)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.base.config.resolved import KVTransferSpec
from headrace.base.wire.transfer import KVTransferParams
from headrace.core.kv_transfers import KVTransfers
from tests.core.harness import Clock, Driver, make_request, make_spec

LEASE_S = 30.0
NAME = "transfer-1"


def waiting(folder: Path, recomputes: bool) -> tuple[Driver, KVTransfers, Clock]:
    """A request that waits for KV of which a server has begun a file and died."""
    spec = KVTransferSpec(path=str(folder), max_bytes=1000, lease_s=LEASE_S, recomputes=recomputes)
    hook, clock = KVTransfers(spec, 1, lambda: driver.core), Clock()
    driver = Driver(make_spec(), hooks=[hook], clock=clock)
    params = KVTransferParams(
        do_remote_prefill=True, transfer_id=NAME, remote_request_id="request-1"
    )
    request = make_request(1, 20, max_tokens=2, hook_payloads=params.payloads("answer-1"))
    path = hook._path(request, NAME)
    Path(f"{path}.part").touch()
    driver.add(request)
    for _ in range(5):
        driver.step()
    assert not driver.finished and driver.ask("status")["held_blocks"] == 0
    assert driver.reason(1) == "kv_transfer: the KV of its prompt has not come yet"
    return driver, hook, clock


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_server_that_died_while_it_sent_holds_nobody(tmp_path: Path, recomputes: bool) -> None:
    """REG-077: recomputed, or ended, as the option says; nothing is held."""
    driver, hook, clock = waiting(tmp_path, recomputes)
    clock.now += LEASE_S
    driver.run()
    ended = driver.finished[1]
    assert ended.reason == ("length" if recomputes else "error")
    assert hook.counts.failed == 1 and hook.num_held == 0
    driver.assert_at_rest()


def test_what_a_dead_server_left_goes_when_another_looks(tmp_path: Path) -> None:
    """REG-078: its file and its mark, once they are older than the lease; no younger one."""
    _, hook, _ = waiting(tmp_path, True)
    (left,) = tmp_path.iterdir()
    young = tmp_path / left.name.replace(".part", "")
    young.write_bytes(b"KV")
    os.utime(left, (1, 1))
    spec = KVTransferSpec(path=str(tmp_path), max_bytes=1000, lease_s=LEASE_S)
    KVTransfers(spec, 1, hook._engine)
    assert list(tmp_path.iterdir()) == [young]


def test_who_waits_goes_on_while_the_sender_lives(tmp_path: Path) -> None:
    """REG-077: its mark is renewed, however long the prompt takes; once it has gone, nobody waits for the lease."""
    driver, hook, clock = waiting(tmp_path, True)
    (mark,) = tmp_path.iterdir()
    for _ in range(4):
        clock.now += LEASE_S * 0.6
        os.utime(mark, ns=(1, mark.stat().st_mtime_ns + 1_000_000_000))
        driver.step()
    assert not driver.finished and hook.counts.failed == 0
    mark.unlink()
    clock.now += 1.0
    driver.run()
    assert driver.finished[1].reason == "length" and hook.counts.failed == 1
    driver.assert_at_rest()


class Peer:
    """A peer that notes what is pushed to it."""

    peers = ("there:7000",)

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.said = full, list[object]()
        self.reasons: list[str | None] = []

    def begin(self, peer: str, name: str, num_files: int) -> Peer | None:
        if self.full:
            return None
        self.said.append((peer, name.endswith(".hrkv"), num_files))
        return self

    def send(self, files: list[Path]) -> None:
        self.said.append([file.exists() for file in files])

    def cancel(self) -> None:
        self.said.append("cancel")

    def ended(self) -> list[str | None]:
        reasons, self.reasons = self.reasons, []
        return reasons


def sending(folder: Path, peer: Peer, host: str = "there") -> tuple[Driver, KVTransfers]:
    spec = KVTransferSpec(path=str(folder), max_bytes=1000, lease_s=LEASE_S)
    hook = KVTransfers(spec, 1, lambda: driver.core, peer)
    driver = Driver(make_spec(), hooks=[hook])
    params = KVTransferParams(
        do_remote_decode=True, transfer_id=NAME, remote_host=host, remote_port=7000
    )
    driver.add(make_request(1, 2, max_tokens=1, hook_payloads=params.payloads("answer-1")))
    return driver, hook


def test_a_push_is_announced_at_once_and_ends_with_its_request(tmp_path: Path) -> None:
    """Of so short a prompt nothing is sent: the peer need not wait."""
    peer = Peer()
    driver, hook = sending(tmp_path, peer)
    assert peer.said == [("there:7000", True, 1)]
    driver.run()
    assert driver.finished[1].reason == "length"
    assert peer.said[1:] == ["cancel"] and hook.counts.failed == 1
    peer.reasons = [None, "it is not there"]
    assert hook.counts.failed == 2
    driver.assert_at_rest()


@pytest.mark.parametrize(
    ("host", "full", "kind"), [("elsewhere", False, "InvalidRequest"), ("there", True, "Conflict")]
)
def test_only_peers_of_the_operator_and_so_many(
    tmp_path: Path, host: str, full: bool, kind: str
) -> None:
    driver, _ = sending(tmp_path, Peer(full=full), host)
    driver.run()
    ended = driver.finished[1]
    assert ended.error is not None and ended.error.kind == kind
    driver.assert_at_rest()
