"""Kernels of several operations: how many there are, and that without them the answers are the
same (KRN-26)."""

from __future__ import annotations

import msgspec
import pytest

from headrace.back.executor.inline import InlineExecutor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import DeviceOptions, ModelOptions, Options, SchedulerOptions
from headrace.core.core import EngineCore
from headrace.launch.facts import resolve_options
from tests.back.runner.test_row_directions import answers, request

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
LAYERS = 8


def spec_of(*unfused: str, eager: bool = False, quantization: str = "none") -> EngineSpec:
    return resolve_options(
        Options(
            device=DeviceOptions(device="cpu", unfused=unfused, enforce_eager=eager),
            model=ModelOptions(max_model_len=64, dtype="float32", quantization=quantization),
            scheduler=SchedulerOptions(max_step_tokens=32, max_running=4),
        )
    ).engine


def said(spec: EngineSpec) -> tuple[list[list[int]], dict[str, int]]:
    """What is answered, and how many kernels of each kind there are."""
    executor = InlineExecutor(spec)
    core = EngineCore(spec, executor)
    tokens = answers(core, [request(number, {}) for number in range(3)])
    counts = {name: chosen for name, _, chosen, _ in executor.facts.decisions}.get("fusions", "")
    executor.close()
    pairs = (one.rpartition(" ") for one in counts.split(", ") if one)
    return tokens, {name: int(count) for name, _, count in pairs}


@pytest.mark.parametrize(
    ("quantization", "name", "count"),
    [("none", "qk-rope", LAYERS), ("int8", "norm-quant", 2 * LAYERS)],
)
def test_each_fusion_is_in_all_layers_and_changes_no_answer(
    quantization: str, name: str, count: int
) -> None:
    fused, there = said(spec_of(quantization=quantization))
    assert there[name] == count
    apart, left = said(spec_of(name, quantization=quantization))
    assert name not in left and {**there, name: 0} == {**left, name: 0}
    assert fused == apart


def test_all_of_them_left_out_and_steps_that_are_called() -> None:
    names = "qk-rope", "norm-quant", "linear", "all-reduce-norm"
    plain, _ = said(spec_of())
    apart, left = said(spec_of(*names, eager=True))
    assert plain == apart and not left
    assert msgspec.structs.asdict(spec_of(*names).model)["unfused"] == names
