"""`headrace plan`: what it measures on this machine, by which kernels, and what a rank of several costs."""

import msgspec
import pytest
import torch

from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import EngineSpec
from headrace.launch.facts import resolve_options
from headrace.launch.forecast import ModelCost
from headrace.launch.locate import bundled_model
from headrace.launch.plan import build_without_memory, cost_of, probe_cpu


def spec(*extra: str) -> EngineSpec:
    line = CommandLine("test", "", groups=("model", "kv", "scheduler", "device"))
    words = ["--model", str(bundled_model()), "--device", "cpu", "--threads", "1", *extra]
    return resolve_options(line.parse(words)[1]).engine


@pytest.mark.parametrize(
    "extra", [(), ("--quantization", "int8"), ("--quantization", "fp8"), ("--dtype", "float32")]
)
def test_the_probe_measures_the_engines_own_products_and_says_on_what(
    extra: tuple[str, ...],
) -> None:
    given = spec(*extra)
    found = probe_cpu(given, memory_bytes=1 << 30)
    assert 1e8 < found.bandwidth < 1e13 and 1e8 < found.rate < 1e16
    bits = given.model.quantization or given.model.dtype
    assert found.source == f"measured on 1 threads, {bits}" and found.probe_s > 0


def test_fewer_repetitions_are_taken_where_one_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of half a second: after the time is over nothing more is begun."""
    from headrace.launch import plan

    calls: list[int] = []
    monkeypatch.setattr(plan, "_PROBE_S", 0.0)
    plan._best_s(lambda: calls.append(1))
    assert len(calls) == 2  # the one that warms up, and one that counts
    monkeypatch.setattr(plan, "_PROBE_S", 60.0)
    plan._best_s(lambda: calls.append(1))
    assert len(calls) == 2 + 6
    assert msgspec.structs.asdict(plan.probe_cpu(spec(), memory_bytes=1))["memory_bytes"] == 1


def cost(*extra: str, ranks: int = 1) -> ModelCost:
    given = spec(*extra)
    model = build_without_memory(given.model, block_tokens=16, tensor_parallel=ranks)
    return cost_of(model, dtype=torch.bfloat16)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_of_several_costs_its_share_of_the_weights_and_at_least_one_head_of_kv(
    ranks: int,
) -> None:
    """The norms are on every rank; the bundled model has two heads of keys and values."""
    whole, share = cost(), cost(ranks=ranks)
    assert whole.weight_bytes / ranks < share.weight_bytes < 1.1 * whole.weight_bytes / ranks
    assert whole.multiplied / ranks <= share.multiplied < 1.1 * whole.multiplied / ranks
    assert share.kv_bytes(100) == whole.kv_bytes(100) // 2


def test_codes_in_the_kv_cache_count_as_codes_and_their_scales() -> None:
    plain, coded = cost(), cost("--kv-dtype", "fp8")
    assert plain.kv_bytes(100) // 2 < coded.kv_bytes(100) < plain.kv_bytes(100) * 3 // 4
