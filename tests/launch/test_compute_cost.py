"""What steps are counted to cost, against sums over single tokens, and against the operations that
PyTorch counts in transformers' model (OBS-03)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headrace.back.executor.null import NullExecutor
from headrace.base.config.tree import Options, SchedulerOptions
from headrace.base.errors import ConfigError
from headrace.core.compute_meter import (
    AttendedCache,
    ComputeMeter,
    StepCost,
    num_pairs,
    num_read,
)
from headrace.core.core import EngineCore
from headrace.launch.compute_cost import step_cost
from headrace.launch.scheduler_limits import mfu_metrics_of
from tests.core.harness import make_request, make_spec
from tests.launch.test_resolve import MODEL
from tests.models.oracle import model_spec, save_oracle
from tests.models.test_parity import tiny_config


@pytest.mark.parametrize("span", [None, 1, 3, 50])
def test_pairs_and_positions_are_those_of_single_tokens(span: int | None) -> None:
    before, tokens = np.array([0, 2, 7, 30]), np.array([5, 1, 4, 2])
    seen = [
        [range(max(0, at + 1 - (span or at + 1)), at + 1) for at in range(first, first + count)]
        for first, count in zip(before.tolist(), tokens.tolist(), strict=True)
    ]
    assert num_pairs(before, tokens, span) == sum(len(one) for row in seen for one in row)
    assert num_read(before, tokens, span) == sum(len(set().union(*row)) for row in seen)


def test_a_run_s_sums_are_those_of_its_tokens() -> None:
    """Two requests, one behind a prefix hit of two blocks."""
    cost = StepCost(
        token_flops=1_000_000,
        sampled_flops=10_000_000_000,
        read_by=lambda tokens: 7.0,
        caches=(AttendedCache(pair_flops=1, token_bytes=3, span=None),),
    )
    meter, spec = ComputeMeter(cost), make_spec(block_tokens=4)
    core = EngineCore(spec, NullExecutor(spec), hooks=[meter], stats=meter)
    prompt, steps = list(range(5, 15)), 0
    for id, outputs, cached in ((1, 4, 0), (2, 3, 8)):
        before = dict(meter.figures())
        core.add(make_request(id, prompt, max_tokens=outputs))
        while len(core.requests):
            steps_before = core.counters.steps
            core.step(wait=True)
            steps += core.counters.steps - steps_before
        told = {name: value - before[name] for name, value in meter.figures().items()}
        computed = range(cached, len(prompt) + outputs - 1)
        pairs = sum(place + 1 for place in computed)
        assert told["estimated_flops"] == (
            len(computed) * cost.token_flops + outputs * cost.sampled_flops + pairs
        )
        assert told["estimated_write_bytes"] == 3 * len(computed)
        reads = len(prompt) + sum(range(len(prompt) + 1, len(prompt) + outputs))
        assert told["estimated_read_bytes"] == 7 * outputs + 3 * reads


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_operations_are_those_that_torch_counts_in_transformers(case: str, tmp_path: Path) -> None:
    oracle, count = save_oracle(tiny_config(case), tmp_path), 9
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        oracle(torch.arange(count)[None])
    by_op = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    spec = msgspec.structs.replace(make_spec(), model=model_spec(tmp_path))
    cost = step_cost(spec)
    linear = sum(flops for op, flops in by_op.items() if op in ("aten.mm", "aten.addmm"))
    assert count * (cost.token_flops + cost.sampled_flops) == linear
    config = oracle.config
    pair = (
        4
        * config.num_attention_heads
        * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    )
    assert [cache.pair_flops for cache in cost.caches] == [pair] * config.num_hidden_layers
    # eager attention multiplies all pairs, seen or not
    assert by_op["aten.bmm"] == count * count * pair * config.num_hidden_layers


def test_models_whose_shapes_do_not_say_it_are_refused() -> None:
    asked = Options(scheduler=SchedulerOptions(mfu_metrics=True)).scheduler
    assert mfu_metrics_of(asked, MODEL)
    assert not mfu_metrics_of(SchedulerOptions(), MODEL)
    with pytest.raises(ConfigError, match="--mfu-metrics: LlamaForCausalLM is no decoder"):
        mfu_metrics_of(asked, msgspec.structs.replace(MODEL, family="transformers"))
