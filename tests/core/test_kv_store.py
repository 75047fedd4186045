"""Chunks of the KV store while they are being read (KVT-08): whoever waits for them may leave, and nobody else gets the
blocks; the workers are a fake whose copies arrive when the test says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.config.resolved import KVStoreSpec
from headrace.base.wire.request import Finished
from headrace.base.wire.slots import LENGTH_BYTES, MAGIC, KVOrder, KVReply
from headrace.core.kv_store import CHUNK_TOKENS, KVStore
from tests.core.harness import Driver, make_request, make_spec

BLOCK = 16
PROMPT = [(7 * i) % 900 + 5 for i in range(CHUNK_TOKENS + 30)]


class Copy:
    """A copy on its way; `cells`: those of the fake memory that it will write, by block."""

    def __init__(self, cells: dict[int, bytes] | None) -> None:
        self.cells, self.has_landed = cells, cells is None

    def done(self) -> bool:
        return self.has_landed

    def result(self) -> KVReply:
        return KVReply()


class Workers:
    """What a core asks of its workers about blocks, over the null executor's memory."""

    def __init__(self, stored: dict[str, list[bytes]]) -> None:
        self.stored, self.loads = stored, list[Copy]()

    def attach(self, driver: Driver) -> None:
        self.memory = driver.executor._memory._cells.reshape(-1, BLOCK)
        driver.executor.move = self.move

    def move(self, order: KVOrder) -> Copy:
        (blocks,) = order.blocks
        if order.action == "save":
            self.stored[order.path] = [self.memory[block].tobytes() for block in blocks]
            size = len(order.header).to_bytes(LENGTH_BYTES, "little")
            Path(order.path).write_bytes(MAGIC + size + order.header)
            return Copy(None)
        self.loads.append(Copy(dict(zip(blocks, self.stored[order.path], strict=True))))
        return self.loads[-1]

    def land(self) -> None:
        """What has been asked for is there."""
        for copy in self.loads:
            for block, content in (copy.cells or {}).items():
                self.memory[block].data.cast("B")[:] = content
            copy.has_landed = True


class Engines:
    """Cores that start one after the other over one folder."""

    def __init__(self, folder: Path) -> None:
        self.spec = KVStoreSpec(path=str(folder), max_bytes=1 << 30, after=1)
        self.stored: dict[str, list[bytes]] = {}

    def start(self, num_blocks: int = 64) -> tuple[Driver, Workers]:
        hook, workers = KVStore(self.spec, 1, lambda: driver.core), Workers(self.stored)
        spec = make_spec(num_blocks=num_blocks, block_tokens=BLOCK, max_model_len=600)
        driver = Driver(spec, hooks=[hook])
        workers.attach(driver)
        return driver, workers

    def reading(self, num_blocks: int = 64) -> tuple[Driver, Workers]:
        """A core in which request 1 waits for the chunk that another core has stored."""
        first, _ = self.start()
        first.add(make_request(1, PROMPT, max_tokens=2))
        first.run()
        driver, workers = self.start(num_blocks)
        driver.add(make_request(1, PROMPT, max_tokens=2))
        driver.step()
        assert len(workers.loads) == len(self.stored) == 1
        assert driver.reason(1) == "kv_store: the KV of its prompt is being read from the store"
        return driver, workers


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path)


def settle(driver: Driver) -> None:
    """Until no copy is on its way and nobody waits; time passes, for who waits looks again after a while."""
    while driver.core.weights.keeps_executor or driver.core.scheduler.queue:
        driver.clock.now += 0.01
        driver.step()
    driver.run()


def cached(driver: Driver, id: int) -> int:
    finished: Finished = driver.finished[id]
    assert finished.error is None, finished.error
    return finished.num_cached


def test_a_request_that_leaves_while_its_prompt_is_read_leaves_it_to_others(
    engines: Engines,
) -> None:
    """REG-079: its blocks are nobody's until they are filled."""
    driver, workers = engines.reading()
    driver.core.abort([1])
    driver.step()
    assert driver.finished[1].reason == "abort"
    status = driver.ask("status")
    assert status["held_by_hooks"] == 0 and status["refcount_sum"] == CHUNK_TOKENS // BLOCK
    workers.land()
    settle(driver)
    driver.assert_at_rest()
    driver.add(make_request(2, PROMPT, max_tokens=2))
    settle(driver)
    assert cached(driver, 2) == CHUNK_TOKENS and len(workers.loads) == 1


def test_blocks_that_are_being_filled_are_given_to_nobody(engines: Engines) -> None:
    """REG-079: not even where all others are taken, and again and again."""
    driver, workers = engines.reading(num_blocks=40)
    for id in range(2, 8):
        driver.add(make_request(id, 20 * BLOCK - 2, max_tokens=1))
    for _ in range(400):
        if len(driver.finished) == 6:
            break
        driver.step()
    assert sorted(driver.finished) == list(range(2, 8))
    workers.land()
    settle(driver)
    assert cached(driver, 1) == CHUNK_TOKENS
    driver.assert_at_rest()
