"""PAR-01, PAR-12 on GPUs (`make test-gpu`): ranks with whole experts, and ranks that share out the KV of sequences,
write what one GPU writes: prompts in chunks, prefixes found again, preemption, recorded steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from headrace.back.executor.choose import make_executor
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
)
from headrace.base.wire.request import RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.launch.facts import resolve_options
from tests.e2e.test_speculation import Answer, requests_of, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
MODELS = Path(__file__).parents[2] / "demo"
MIXTURE = MODELS / "models" / "mixture"
"""Experts and latents."""
WHOLE = {"tensor_parallel": 2, "enable_expert_parallel": True}
SHARED = {"tensor_parallel": 2, "decode_context_parallel_size": 2}
BOUND = 0.02
"""Of log-probabilities, beside another order of sums."""


def answers(model: Path, device: dict[str, Any]) -> dict[int, Answer]:
    """Greedy rows in float32, the same requests twice."""
    ranks = device.get("decode_context_parallel_size", 1)
    tree = Options(
        device=DeviceOptions(device="cuda", **device),
        model=ModelOptions(model=str(model), max_model_len=256, dtype="float32"),
        kv=KVOptions(kv_blocks=1 + 32 // ranks),
        scheduler=SchedulerOptions(max_step_tokens=24, max_running=6),
    )
    spec = resolve_options(tree).engine
    requests = [
        structs.replace(
            one,
            stop=StopRules(max_tokens=40, min_tokens=40),
            sampling=RowSampling(temperature=0.0, logprobs=1),
        )
        for one in requests_of(spec, 8)
    ]
    core = EngineCore(spec, make_executor(spec))
    try:
        first, again = (run(core, requests, at_once=6) for _ in range(2))
        return {**first, **{len(first) + id: one for id, one in again.items()}}
    finally:
        core.close()


@cache
def alone(model: Path) -> dict[int, Answer]:
    """Of one GPU."""
    return answers(model, {})


@pytest.mark.parametrize(
    ("model", "device"),
    [
        (MIXTURE, WHOLE),
        (MIXTURE, {**WHOLE, "all2all_backend": "padded"}),
        (MIXTURE, {**WHOLE, "all2all_backend": "allgather_reducescatter"}),
        (MIXTURE, {**WHOLE, "expert_rebalance_steps": 5, "num_redundant_experts": 2}),
        (MIXTURE, SHARED),
        (MIXTURE, {**SHARED, "dcp_comm_backend": "ag_rs"}),
    ],
    ids=["experts", "padded", "gathered", "moving", "latents", "latents, ag_rs"],
)
def test_ranks_on_gpus_write_what_one_writes(model: Path, device: dict[str, Any]) -> None:
    if torch.cuda.device_count() < device["tensor_parallel"]:
        pytest.skip(f"{device['tensor_parallel']} CUDA devices are needed")
    ours, expected = answers(model, device), alone(model)
    agreed = [agreement(one, expected[id]) for id, one in ours.items()]
    assert min(agreed) >= 2 and sum(agreed) >= 0.7 * 40 * len(agreed), agreed


def agreement(ours: Answer, expected: Answer) -> int:
    """Tokens up to the first that differs, where the two were near a tie: the best had the same
    probability."""
    for at, (one, other) in enumerate(zip(ours.logprobs, expected.logprobs, strict=True)):
        assert abs(one.values[0] - other.values[0]) <= BOUND, (at, one, other)
        if ours.tokens[at] != expected.tokens[at]:
            return at
    return len(expected.tokens)
