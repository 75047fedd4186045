"""How long cached blocks live, lie idle and are found again (OBS-03), and the memory of processes (OBS-04)."""

from __future__ import annotations

import os

import pytest

from headrace.base.process_memory import descendants, resident_bytes
from headrace.base.telemetry.engine_histograms import further_text
from headrace.core.kv.block_ages import watch
from headrace.core.kv.pool import BlockPool
from headrace.core.kv.slabs import SlabPool
from tests.core.harness import Clock, Driver, make_request, make_spec


@pytest.mark.parametrize("pool", [BlockPool(3, 1), SlabPool(3, [1], [False])])
def test_ages_follow_a_script(pool: BlockPool | SlabPool) -> None:
    clock = Clock()
    ages = watch(pool, 1, clock)
    assert ages is not None and watch(pool, 0) is None
    [[a, b]] = pool.take([2])
    pool.tag(0, a, b"a")
    clock.now += 2
    pool.release(0, [a, b])
    clock.now += 20
    pool.hold(0, [a])
    pool.hold(0, [a])
    pool.release(0, [a])
    clock.now += 3
    pool.release(0, [a])
    clock.now += 45
    pool.take([2])
    report = ages.report()
    assert report["block_reuse_gap_seconds"]["30.0"] == 1
    assert report["block_reuse_gap_seconds"]["sum"] == 20
    idle, lifetime = report["block_idle_before_evict_seconds"], report["block_lifetime_seconds"]
    assert (idle["sum"], lifetime["sum"]) == (45 + 68, 70 + 70)
    assert idle["60.0"] == 1 and idle["300.0"] == 1 and lifetime["300.0"] == 2
    text = further_text([{"block_reuse_gap_seconds": report["block_reuse_gap_seconds"]}]).decode()
    name = "headrace_engine_block_reuse_gap_seconds"
    assert f'{name}_bucket{{engine="0",le="10.0"}} 0.0' in text
    assert f'{name}_bucket{{engine="0",le="+Inf"}} 1.0' in text
    assert f'{name}_sum{{engine="0"}} 20.0' in text and f'{name}_count{{engine="0"}} 1.0' in text


def test_a_sample_is_watched_and_a_core_reports_it() -> None:
    clock = Clock()
    driver = Driver(make_spec(num_blocks=13, block_tokens=4))
    ages = driver.core.kv.ages = watch(driver.core.kv.pool, 4, clock)
    assert ages is not None
    for id in range(4):
        driver.add(make_request(id, 40, max_tokens=1))
        driver.run()
        clock.now += 1
    status = driver.ask("status")
    lifetimes = status["block_lifetime_seconds"]
    total = sum(count for bound, count in lifetimes.items() if bound != "sum")
    assert 5 <= total <= 9, "of about 28 that were taken again, one in four"
    assert status["rss_bytes"] > 1 << 20
    driver.assert_at_rest()


def test_processes_are_found_by_their_parents() -> None:
    assert resident_bytes() > 1 << 20 and resident_bytes(2**31 - 2) == 0
    assert os.getpid() in descendants(os.getppid()) and os.getpid() not in descendants()
