"""PAR-07, PAR-10: a server whose engine cores share out their experts, asked by OpenAI's client; and what becomes of it
when one of them dies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from openai import OpenAI

from tests.api.serving import Served, eventually, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ADMIN = "admin-key-1"
MODEL = ("--demo", "mixture", "--dtype", "float32", "--threads", "1", "--device", "cpu")
SHARED = (*MODEL, "--max-model-len", "256", "--kv-blocks", "60")
PROMPTS = ["Once upon a time", "1, 2, 3, 4,", "def f(x):", "The quick brown fox"]


def texts_of(served: Served) -> list[str]:
    """Of all prompts at once."""
    with (
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):

        def ask(prompt: str) -> str:
            made = client.completions.create(
                model="headrace-mixture", prompt=prompt, max_tokens=24, temperature=0
            )
            return made.choices[0].text

        return list(pool.map(ask, PROMPTS))


@contextmanager
def started(*options: str) -> Iterator[Served]:
    with serving(None, *SHARED, *options) as served:
        yield served


@pytest.fixture(scope="module")
def alone() -> Iterator[tuple[list[str], float]]:
    with started() as served:
        yield texts_of(served), weight_bytes(served)[0]


def weight_bytes(served: Served) -> list[float]:
    """Of each engine core."""
    page = served.get("/metrics").text
    return [float(one) for one in re.findall(r"headrace_engine_weight_bytes\{.*\} (\S+)", page)]


def begun_again(served: Served, before: set[int]) -> bool:
    """Whether two cores are there that were not before, and requests are taken."""
    now = {core.pid for core in served.cores}
    return len(now) == 2 and not before & now and served.get("/health/ready").status_code == 200


def test_two_cores_answer_as_one_and_start_again_together(alone: tuple[list[str], float]) -> None:
    expected, whole = alone
    with started("--data-parallel-size", "2", "--enable-expert-parallel") as served:
        assert texts_of(served) == expected
        shares = weight_bytes(served)
        assert len(shares) == 2 and all(one < 0.9 * whole for one in shares), (shares, whole)
        before = {core.pid for core in served.cores}
        worker = served.named("headrace.back.executor.worker_entry")[0]
        worker.kill()

        eventually(lambda: begun_again(served, before), within_s=120)
        assert texts_of(served) == expected
        assert any("died with engine core" in line for line in served.lines)
        assert served.stop() == 0


def test_cores_come_and_go_and_experts_with_them(alone: tuple[list[str], float]) -> None:
    """PAR-06, PAR-07: 2, 3, 2, 4 cores; while their number changes none serves."""
    elastic = ("--data-parallel-size", "2", "--max-replicas", "4", "--enable-elastic-ep")
    with started(*elastic, "--enable-expert-parallel", "--admin-key", ADMIN) as served:
        assert texts_of(served) == alone[0]

        def scaled(count: int, **more: object) -> httpx.Response:
            return served.post(
                "/scale_elastic_ep",
                {"new_data_parallel_size": count, **more},
                **{"x-api-key": ADMIN},
            )

        for count in (1, 5):
            refused = scaled(count)
            assert refused.status_code == 400
            assert "2 (--data-parallel) to 4 (--max-replicas)" in refused.text
        first = {core.pid for core in served.cores}
        for count in (3, 2, 4):
            with ThreadPoolExecutor(1) as pool:
                scaling = pool.submit(scaled, count)
                if count > 2:  # a process is started, which takes a while
                    eventually(lambda: completion(served).status_code == 503, within_s=60)
                    asked = served.post("/is_scaling_elastic_ep", {}, **{"x-api-key": ADMIN})
                    assert asked.json() == {"is_scaling_elastic_ep": True}
                answer = scaling.result()
            assert answer.status_code == 200, answer.text
            assert texts_of(served) == alone[0]
            assert len(served.cores) == count and first <= {core.pid for core in served.cores}
        late = scaled(2, drain_timeout=0)
        assert late.status_code == 408 and "nothing was changed" in late.text
        assert texts_of(served) == alone[0]
        ended = [line for line in served.lines if "has ended (exit status" in line]
        assert len(ended) == 1 and "exit status 0" in ended[0]
        served.named("headrace.back.executor.worker_entry")[-1].kill()
        eventually(lambda: begun_again(served, first), within_s=120)
        assert texts_of(served) == alone[0], "with those that are always there"
        assert served.stop() == 0


def completion(served: Served, **more: object) -> httpx.Response:
    return served.post(
        "/v1/completions", {"prompt": "Once", "max_tokens": 2, "temperature": 0, **more}
    )
