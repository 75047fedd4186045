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
