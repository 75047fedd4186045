"""PAR-07, PAR-10: a server whose engine cores share out their experts, asked by OpenAI's client; and what becomes of it
when one of them dies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from openai import OpenAI

from tests.api.serving import Served, eventually, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
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


def test_two_cores_answer_as_one_and_start_again_together(alone: tuple[list[str], float]) -> None:
    expected, whole = alone
    with started("--data-parallel-size", "2", "--enable-expert-parallel") as served:
        assert texts_of(served) == expected
        shares = weight_bytes(served)
        assert len(shares) == 2 and all(one < 0.9 * whole for one in shares), (shares, whole)
        before = {core.pid for core in served.cores}
        worker = served.named("headrace.back.executor.worker_entry")[0]
        worker.kill()

        def are_new() -> bool:
            cores = served.cores
            there = len(cores) == 2 and not before & {core.pid for core in cores}
            return there and served.get("/health/ready").text.find("ready") >= 0

        eventually(are_new, within_s=120)
        assert served.get("/health/ready").status_code == 200
        assert texts_of(served) == expected
        assert any("died with engine core" in line for line in served.lines)
        assert served.stop() == 0
