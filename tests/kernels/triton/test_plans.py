"""Start-up checks every plan of a GEMM kernel on the whole shape, and goes on without one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.back.kernels.linear import table, triton_small
from headrace.back.kernels.linear.op import OP, LinearProblem
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
