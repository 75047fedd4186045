"""REG-113, BEY-10: what requests leave behind. The same hostile wave again and again, to every route: after the
first ones have filled the caches, no process holds more than before."""

from __future__ import annotations

import http.client
import random
from collections import Counter
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from benchmarks.robustness.hostile import Case, any_case, routes
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, serving

WAVE, WARM, MORE = 600, 3, 3
SLOPE_MIB = 4.0  # of MORE waves; without a leak 0 to 2, where an allocator takes another arena


def wave() -> list[Case]:
    rng = random.Random(7)
    rows = list(routes().items())
    cases = [any_case(rng, *rng.choice(rows)) for _ in range(2 * WAVE)]
    return [case for case in cases if "pause" not in case.path and b"background" not in case.body][
        :WAVE
    ]


def told(port: int, cases: list[Case]) -> Counter[int]:
    found: Counter[int] = Counter()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as wire:
        for case in cases:
            wire.request(case.method, case.path, case.body, case.headers)
            answer = wire.getresponse()
            answer.read()
            found[answer.status] += 1
    return found


def mib(processes: list[psutil.Process]) -> float:
    return sum(process.memory_info().rss for process in processes) / 2**20


def held(served: Served) -> tuple[float, float]:
    return mib(served.api_processes), mib(served.cores)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
def test_hostile_requests_leave_nothing_behind(tmp_path: Path) -> None:
    cases = wave()
    with serving(write_model_folder(tmp_path / "tiny")) as served:
        for _ in range(WARM):
            first = told(served.port, cases)
        assert not any(status >= 500 and status != 501 for status in first), first
        assert {200, 400, 404} <= first.keys()
        api, core = held(served)
        for _ in range(MORE):
            assert told(served.port, cases) == first
        api_after, core_after = held(served)
        assert api_after - api < SLOPE_MIB, (api, api_after)
        assert core_after - core < SLOPE_MIB, (core, core_after)
        assert served.at_rest()
