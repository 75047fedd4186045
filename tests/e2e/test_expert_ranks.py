"""PAR-10, PAR-12: ranks with whole experts, over gloo: experts that move between them and copies of
some change no token, nor do drafts, by text or by a model of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.back.executor.choose import make_executor
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.base.telemetry import log as logs
from headrace.core.core import EngineCore
from headrace.launch.facts import resolve_options
from tests.e2e.test_speculation import SAMPLINGS, Answer, assert_equal, requests_of, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DEMO = Path(__file__).parents[2] / "demo"
NGRAM = SpeculationOptions(method="ngram", num_speculative_tokens=4, adaptive=False)
MODEL = SpeculationOptions(
    method="draft_model",
    model=str(DEMO / "model"),
    num_speculative_tokens=2,
    adaptive=False,
)
MOVING = {"num_redundant_experts": 2, "expert_rebalance_steps": 5}


def answers(
    speculation: SpeculationOptions | None = None, **device: Any
) -> tuple[dict[int, Answer], EngineCore]:
    """Of requests that sample in every way; in float32, as sums are taken in other orders."""
    tree = Options(
        device=DeviceOptions(device="cpu", threads=1, **device),
        model=ModelOptions(max_model_len=256, demo="mixture", dtype="float32"),
        kv=KVOptions(kv_blocks=60),
        scheduler=SchedulerOptions(
            speculative_config=speculation, max_step_tokens=64, max_running=8
        ),
    )
    spec = resolve_options(tree).engine
    core = EngineCore(spec, make_executor(spec))
    try:
        return run(core, requests_of(spec, len(SAMPLINGS)), at_once=6), core
    finally:
        core.close()


@pytest.fixture(autouse=True)
def informing() -> Iterator[None]:
    """Workers log what they are told to."""
    level = logs.level()
    logs.set_level("info")
    yield
    logs.set_level(level)


@pytest.fixture(scope="module")
def alone() -> dict[int, Answer]:
    return answers()[0]


@pytest.mark.parametrize(
    ("speculation", "device"),
    [
        (None, MOVING),
        (None, {"all2all_backend": "ragged", **MOVING}),
        (None, {"pipeline_parallel": 2, **MOVING}),
        (None, {"decode_context_parallel_size": 2, **MOVING}),
        (NGRAM, {}),
        (MODEL, {}),
        (MODEL, MOVING),
    ],
    ids=[
        "moving",
        "moving-ragged",
        "moving-stages",
        "moving-context",
        "drafts",
        "drafter",
        "drafter-moving",
    ],
)
def test_ranks_with_whole_experts_answer_as_one_worker(
    alone: dict[int, Answer],
    speculation: SpeculationOptions | None,
    device: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A request may be one rank's experts' alone: the others wait for nobody."""
    found, core = answers(speculation, tensor_parallel=2, enable_expert_parallel=True, **device)
    assert_equal(alone, found)
    moves = re.findall(r"experts: (\d+) came to this rank", capfd.readouterr().err)
    assert any(map(int, moves)) is ("expert_rebalance_steps" in device)
    stats = core.scheduler.speculation.stats
    assert (stats.num_accepted_tokens > 20) is (speculation is not None)
