"""`headrace plan`: what it measures on this machine, by which kernels, and what a rank of several costs."""

import msgspec
import pytest
import torch

from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.platforms.detect import FAKES
from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import Options
from headrace.launch import plan
from headrace.launch.facts import resolve_options
from headrace.launch.locate import bundled_model
from headrace.launch.performance_model import ModelCost
from headrace.launch.plan import build_without_memory, cost_of, kernels_on_absent_device, probe_cpu
from headrace.launch.topology import planned_facts
from tests.stopwatch import Stopwatch


def given(device: str, *extra: str) -> Options:
    line = CommandLine("test", "", groups=("model", "kv", "scheduler", "device"))
    words = ["--model", str(bundled_model()), "--device", device, "--threads", "1", *extra]
    return line.parse(words)[1]


def spec(*extra: str) -> EngineSpec:
    return resolve_options(given("cpu", *extra)).engine


@pytest.mark.serial
@pytest.mark.parametrize(
    "extra", [(), ("--quantization", "int8"), ("--quantization", "fp8"), ("--dtype", "float32")]
)
def test_the_probe_measures_the_engines_own_products_and_says_on_what(
    extra: tuple[str, ...],
) -> None:
    engine = spec(*extra)
    watch = Stopwatch()
    found = probe_cpu(engine, memory_bytes=1 << 30)
    least = 1e8 if watch.undisturbed_s > watch.wall_s / 2 else 0
    assert least < found.bandwidth < 1e13 and least < found.rate < 1e16
    bits = engine.model.quantization or engine.model.dtype
    assert found.source == f"measured on 1 threads, {bits}" and found.probe_s > 0


def test_fewer_repetitions_are_taken_where_one_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of half a second: after the time is over nothing more is begun."""
    calls: list[int] = []
    monkeypatch.setattr(plan, "_PROBE_S", 0.0)
    plan._best_s(lambda: calls.append(1))
    assert len(calls) == 2  # the one that warms up, and one that counts
    monkeypatch.setattr(plan, "_PROBE_S", 60.0)
    plan._best_s(lambda: calls.append(1))
    assert len(calls) == 2 + 6
    assert msgspec.structs.asdict(plan.probe_cpu(spec(), memory_bytes=1))["memory_bytes"] == 1


def cost(*extra: str, ranks: int = 1) -> ModelCost:
    model = build_without_memory(spec(*extra).model, block_tokens=16, tensor_parallel=ranks)
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


def kernels(device: str, *extra: str) -> dict[str, tuple[str, str]]:
    """Op -> the kernel a GPU would be given, and why."""
    options = given("cuda", *extra)
    engine = resolve_options(options, planned_facts(device, options.device)).engine
    ranks = engine.device.tensor_parallel
    found = kernels_on_absent_device(
        engine.model, FAKES[device], block_tokens=16, tensor_parallel=ranks
    )
    return {d.field: (d.chosen, d.why) for d in found}


@pytest.mark.parametrize(
    ("extra", "chosen"),
    [
        ((), "triton"),
        (("--tensor-parallel", "2"), "triton"),
        (("--kv-dtype", "int8"), "triton"),
        (("--deterministic",), "triton fixed order"),
    ],
)
def test_the_kernels_of_a_gpu_are_named_without_it(extra: tuple[str, ...], chosen: str) -> None:
    """BEY-56: nothing runs on it, and nothing of what was found is kept."""
    pytest.importorskip("triton")
    found = kernels("h200", *extra)
    assert found["kernel.attention"][0] == chosen and found["kernel.linear"][0] == chosen
    assert found["kernel.rms_norm"] == ("triton", "2 shapes; native: runs on the CPU only")
    assert found["kernel.sample"][0] == "triton"
    assert not any(getattr(one.problem, "device", "") == "cuda" for one in ATTENTION.choices())


def test_what_a_gpu_cannot_do_is_a_reason() -> None:
    pytest.importorskip("triton")
    assert kernels("l4", "--kv-dtype", "fp8")["kernel.attention"][0] == "triton"
    chosen, why = kernels("a100", "--kv-dtype", "fp8")["kernel.attention"]
    assert chosen == "torch" and "fp8 needs compute capability 8.9, not 8.0" in why


def test_kernels_that_cannot_be_asked_are_left_to_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kernels("mi300x")["kernels"][0] == "at start"
    monkeypatch.setattr(plan, "available", lambda library: False)
    assert "Triton is not installed here" in kernels("h200")["kernels"][1]
