"""PAR-02, PAR-12: ranks that share out the KV of sequences, over gloo, write what one worker writes: prompts in chunks,
prefixes found again, preemption, drafts."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.back.executor.choose import make_executor
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.core.core import EngineCore
from headrace.launch.facts import resolve_options
from tests.e2e.test_speculation import Answer, requests_of, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NGRAM = SpeculationOptions(method="ngram", num_speculative_tokens=4, adaptive=False)


def spec_of(device: dict[str, Any], speculation: SpeculationOptions | None) -> EngineSpec:
    """In float32, so that sums in another order choose the same tokens; a pool in which rows are preempted."""
    ranks = device.get("decode_context_parallel_size", 1)
    tree = Options(
        device=DeviceOptions(device="cpu", threads=1, **device),
        model=ModelOptions(max_model_len=256, dtype="float32"),
        kv=KVOptions(kv_blocks=1 + 32 // ranks),
        scheduler=SchedulerOptions(
            speculative_config=speculation, max_step_tokens=24, max_running=6
        ),
    )
    return resolve_options(tree).engine


def answers(spec: EngineSpec) -> tuple[dict[int, Answer], EngineCore]:
    core = EngineCore(spec, make_executor(spec))
    try:
        first = run(core, requests_of(spec, 8), at_once=6)
        again = run(core, requests_of(spec, 8), at_once=6)
        return {**first, **{len(first) + i: one for i, one in enumerate(again.values())}}, core
    finally:
        core.close()


@pytest.mark.parametrize(
    ("device", "speculation"),
    [
        ({"dcp_comm_backend": "a2a"}, None),
        ({"dcp_comm_backend": "ag_rs", "dcp_kv_cache_interleave_size": 16}, None),
        ({"dcp_kv_cache_interleave_size": 2}, NGRAM),
    ],
    ids=["a2a", "ag_rs", "drafts"],
)
def test_ranks_that_share_the_context_answer_as_one_worker(
    device: dict[str, Any], speculation: SpeculationOptions | None
) -> None:
    shared = {"tensor_parallel": 4, "decode_context_parallel_size": 2, **device}
    alone, core = answers(spec_of({}, speculation))
    ours, theirs = answers(spec_of(shared, speculation))
    assert [one.tokens for one in ours.values()] == [one.tokens for one in alone.values()]
    for one in (core, theirs):
        assert one.scheduler.kv.num_hits > 0
