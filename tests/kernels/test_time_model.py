"""The time model against what was measured on an H200, and the plans it gives to other GPUs."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.back.kernels.linear import table
from headrace.back.kernels.linear.table import (
    GemmPlan,
    _by_rule,
    plan_for,
    skip,
    source,
    user_file,
    write,
)
from headrace.back.kernels.linear.time_model import (
    SPARED_US,
    GemmDevice,
    best_kernel,
    gemm_device,
    roofline_us,
    time_us,
)
from headrace.back.platforms.detect import FAKES

MEASURED = Path(__file__).parents[2] / "benchmarks" / "h200" / "kernels.md"
SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288), "8B head": (151936, 4096), "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048), "0.6B gate_up": (6144, 1024), "0.6B down": (1024, 3072),
    "0.6B head": (151936, 1024),
}  # fmt: skip
H200 = GemmDevice(name="NVIDIA H200", capability=(9, 0), sms=132, memory_gb_s=4800, bf16_tflops=989)


def device_of(fake: str) -> GemmDevice:
    facts = FAKES[fake]
    assert facts.capability and facts.memory_gb_s and facts.bf16_tflops
    return GemmDevice(
        name=facts.name,
        capability=facts.capability[:2],
        sms=facts.cores,
        memory_gb_s=facts.memory_gb_s,
        bf16_tflops=facts.bf16_tflops,
    )


H200_NVL = replace(H200, name="NVIDIA H200 NVL")
H100 = replace(device_of("h100"), name="NVIDIA H100 80GB HBM3")
DEVICES = [H200, H200_NVL, H100, *map(device_of, ("a100", "l40s", "b200"))]


def rows() -> list[tuple[str, int, float, float]]:
    """(shape, tokens, the library's microseconds, ours) of the published table."""
    section = MEASURED.read_text().split("## Small ")[1].split("\n## ")[0]
    found = re.findall(r"\| (\S+ \w+) \| (\d+) \| [\d.]+ \| ([\d.]+) \(\d+%\) \| ([\d.]+)", section)
    return [(name, int(tokens), float(lib), float(ours)) for name, tokens, lib, ours in found]


def kernels_for(tokens: int) -> tuple[str, ...]:
    return ("gemv",) if tokens == 1 else ("skinny", "stream")


@pytest.fixture(autouse=True)
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(table, "_skipped", {})
    table.measured.cache_clear()
    table.nearest.cache_clear()


def test_the_model_is_near_the_measurements_it_was_fitted_to() -> None:
    errors: dict[str, list[float]] = {"library": [], "ours": []}
    for name, tokens, library, ours in rows():
        outputs, inputs = SHAPES[name]
        gated = "gate" in name
        errors["library"].append(
            abs(time_us(H200, "library", outputs, inputs, tokens) / library - 1)
        )
        best = min(
            time_us(H200, kernel, outputs, inputs, tokens, gated=gated)
            for kernel in kernels_for(tokens)
        )
        errors["ours"].append(abs(best / ours - 1))
    assert len(errors["ours"]) == 40
    assert statistics.median(errors["library"]) < 0.05
    assert statistics.median(errors["ours"]) < 0.08


def test_choosing_by_the_model_costs_little_beside_the_measured_best() -> None:
    costs = []
    for name, tokens, library, ours in rows():
        outputs, inputs = SHAPES[name]
        gated = "gate" in name
        library += SPARED_US * gated
        best = best_kernel(H200, kernels_for(tokens), outputs, inputs, tokens, gated=gated)
        costs.append((library if best == "library" else ours) / min(library, ours))
    assert max(costs) < 1.4 and statistics.mean(costs) < 1.03, costs


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_a_gpu_reads_no_faster_than_its_memory_and_one_token_takes_a_gemv(
    device: GemmDevice,
) -> None:
    for outputs, inputs in SHAPES.values():
        roofline = roofline_us(device, outputs, inputs, 1)
        assert roofline >= 2 * outputs * inputs / (device.memory_gb_s * 1e3)
        assert time_us(device, "gemv", outputs, inputs, 1) > roofline
        plan = plan_for(device, outputs, inputs, 1, gated=False)
        assert plan is not None and plan.kernel == "gemv"


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_only_hopper_is_given_its_kernels(device: GemmDevice) -> None:
    plans = {
        plan_for(device, outputs, inputs, tokens, gated=gated)
        for outputs, inputs in SHAPES.values()
        for tokens in (1, 2, 8, 16, 32, 64, 1024, 8192)
        for gated in (False, True)
    }
    kernels = {plan.kernel for plan in plans if plan is not None}
    assert "skinny" in kernels
    assert ({"stream", "wide"} <= kernels) == (device.capability == (9, 0)), kernels
    for plan in plans:
        if plan is not None and plan.split > 1 and plan.kernel == "skinny":
            assert plan.split in (2, 4)


def test_more_multiprocessors_split_the_same_outputs_further() -> None:
    splits = [
        _by_rule("skinny", gemm_device("one", (8, 0), sms), 2048, 8192, gated=False).split
        for sms in (20, 80, 160)
    ]
    assert splits == [1, 2, 4]


def test_many_tokens_without_a_gate_are_the_librarys_everywhere() -> None:
    for device in DEVICES:
        assert plan_for(device, 6144, 4096, 4096, gated=False) is None


def test_a_gpu_of_the_same_capability_takes_the_nearest_measured_table() -> None:
    ours = plan_for(H200, 6144, 4096, 8, gated=False)
    for device in (H200_NVL, H100):
        assert plan_for(device, 6144, 4096, 8, gated=False) == ours
        assert source(device, 6144, 4096, gated=False) == "plans measured on NVIDIA H200"
    assert source(H200, 6144, 4096, gated=False) == "plans measured on this GPU"
    assert "by the time model" in source(device_of("a100"), 6144, 4096, gated=False)


def test_of_several_tables_the_one_of_the_most_similar_gpu_is_taken() -> None:
    pcie = replace(H100, name="NVIDIA H100 PCIe", sms=114, memory_gb_s=2000)
    plan = GemmPlan(kernel="skinny", n=32, k=64, warps=4)
    write(user_file(H100), H100, {"6144x4096": {8: plan}})
    assert plan_for(pcie, 6144, 4096, 8, gated=False) == plan
    assert plan_for(H200, 6144, 4096, 8, gated=False) != plan
    assert source(pcie, 6144, 4096, gated=False) == f"plans measured on {H100.name}"


def test_a_shape_that_nobody_measured_is_said_by_name_until_it_is() -> None:
    assert "7168x5120+act by the time model" in source(H200, 7168, 5120, gated=True)
    write(user_file(H200), H200, {"7168x5120+act": {8: None}})
    assert source(H200, 7168, 5120, gated=True) == "plans measured on this GPU"
    assert plan_for(H200, 7168, 5120, 8, gated=True) is None


def test_a_kernel_that_failed_is_not_planned_for_that_shape_again() -> None:
    before = plan_for(H200, 6144, 4096, 8, gated=False)
    assert before is not None and before.kernel == "stream"
    skip(H200, "6144x4096", "stream")
    after = plan_for(H200, 6144, 4096, 8, gated=False)
    assert after is None or after.kernel != "stream"
    assert plan_for(H200, 4096, 4096, 8, gated=False).kernel == "stream"


def test_rates_a_runtime_does_not_say_are_those_of_its_capability() -> None:
    known = gemm_device("new", (9, 0), 78, memory_gb_s=4000)
    assert (known.memory_gb_s, known.bf16_tflops) == (4000, pytest.approx(584, rel=0.01))
    assert gemm_device("newer", (10, 3), 148).memory_gb_s == 8000
    assert gemm_device("cpu", (0, 0), 1).memory_gb_s > 0
