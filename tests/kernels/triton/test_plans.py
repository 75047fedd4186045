"""Start-up checks every plan of a GEMM kernel on the whole shape, and goes on without one that fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.linear import dequantized, table, triton_small
from headrace.back.kernels.linear.op import OP, LinearProblem
from headrace.back.kernels.linear.time_model import GemmDevice
from headrace.back.kernels.linear.triton_linear import KERNEL
from headrace.back.kernels.op import Kernel

PROBLEM = LinearProblem(device="cpu", dtype=torch.float32, inputs=512, outputs=128)


@pytest.fixture(autouse=True)
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(table, "_skipped", {})
    table.measured.cache_clear()
    table.nearest.cache_clear()


def names(kernel: Kernel[LinearProblem]) -> list[str]:
    assert kernel.plans is not None
    return [check.name for check in kernel.plans(PROBLEM)]


def test_each_size_that_is_compiled_is_checked_on_the_models_shape() -> None:
    assert names(KERNEL) == [
        "gemv of 1 tokens",
        "skinny of 16 tokens",
        "skinny of 32 tokens",
        "skinny of 64 tokens",
        "96 tokens",
    ]
    for check in KERNEL.plans(PROBLEM):
        assert check.sample().weights[0].shape == (128, 512)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_of_a_gpu_that_is_not_here_nothing_is_said() -> None:
    absent = LinearProblem(device="cuda", dtype=torch.bfloat16, inputs=4096, outputs=6144)
    assert KERNEL.note(absent) == "" and "time model" in KERNEL.note(PROBLEM)


def test_a_plan_that_does_not_run_is_not_taken_again_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setitem(triton_small._KINDS, "skinny", broken)
    monkeypatch.setitem(triton_small._KINDS, "gemv", lambda *_: lambda x_TI, y_TY: y_TY.zero_())
    monkeypatch.setattr(OP, "_choices", {})
    monkeypatch.setattr(OP, "_failures", {})
    monkeypatch.setattr(OP, "_skipped", {})
    failures = OP.failures(KERNEL, PROBLEM)
    assert [name.split()[0] for name, _ in failures] == ["gemv", "skinny", "skinny", "skinny"]
    assert "error" in failures[0][1] and "out of resource" in failures[1][1]
    assert names(KERNEL) == ["96 tokens"]


HOPPER = GemmDevice(
    name="NVIDIA H200", capability=(9, 0), sms=132, memory_gb_s=4800.0, bf16_tflops=989.0
)


@dataclass(frozen=True)
class Zeros:
    """A quantized weight."""

    outputs: int
    inputs: int
    device: torch.device


def test_what_the_kernel_in_front_writes_is_not_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dequantized weight is written just before the GEMM: of few tokens the library multiplies, since our kernels
    ask for the weight while the one in front may still be writing it."""
    assert set(triton_small._KINDS) - triton_small.READ_AHEAD == {"wide"}
    taken: dict[int, str] = {}

    def launcher(gemm: triton_small.Gemm, plan: table.GemmPlan, tokens: int) -> triton_small.Launch:
        taken[tokens] = plan.kernel
        return lambda x_TI, y_TY: None

    monkeypatch.setattr(triton_small, "gemm_device_of", lambda device: HOPPER)
    monkeypatch.setattr(triton_small, "launcher", launcher)
    monkeypatch.setattr(triton_small, "unfit", lambda gemm: set())
    weight = torch.empty(2 * 12288, 4096, dtype=torch.bfloat16, device="meta")
    kept = triton_small.small(triton_small.Gemm(weight_OI=weight, activation="silu"))
    fresh = triton_small.small(triton_small.Gemm(weight_OI=weight, activation="silu"), fresh=True)
    for tokens in (1, 8, 16):
        assert kept(tokens) is not None and taken.pop(tokens) in triton_small.READ_AHEAD
        assert fresh(tokens) is None
    assert fresh(4096) is not None and set(taken.values()) == {"wide"}


def test_dequantized_weights_are_told_to_be_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def small(gemm: triton_small.Gemm, *, fresh: bool = False) -> Any:
        asked.append(fresh)
        return lambda tokens: None

    monkeypatch.setattr(dequantized, "small", small)
    monkeypatch.setattr(dequantized.triton_gated_act, "bind", lambda problem: lambda y_TY: y_TY)
    many = dequantized.bind_dequantized(
        Zeros(outputs=8, inputs=4, device=torch.device("cpu")),
        lambda weight, out_OI: out_OI.zero_(),
        None,
        dtype=torch.float32,
        activation=GatedActProblem(device="cpu", dtype=torch.float32, width=4, activation="silu"),
        add=False,
        wide=False,
    )
    many(torch.ones(3, 4), None)
    assert asked == [True]
