"""Kernels of a GPU run on the stream that is current when they are called, behind what lies on it (PLT-19)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.back.kernels.op import DeferredChecks, Kernel, Op
from headrace.back.kernels.triton.wrap import planned_for
from headrace.back.models.families import architecture_of
from headrace.base.config.resolved import ModelSpec
from headrace.launch.plan import build_without_memory
from tests.models.test_parity import CASES, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
SLEEP_CYCLES = 40_000_000
"""About 20 ms: a kernel on another stream is long done by then."""


def kernels_of(case: str) -> list[tuple[Op[Any], Kernel[Any], Any]]:
    """Those that this GPU would run for the case's model."""
    config = tiny_config(case).to_dict() | {"architectures": [f"{CASES[case][0]}ForCausalLM"]}
    spec = ModelSpec(
        path="", name=case, format="dummy", family=architecture_of(config).family, dtype="bfloat16",
        max_model_len=32, logits_width=config["vocab_size"], eos_ids=(), config=config,
    )  # fmt: skip
    with DeferredChecks() as checks, planned_for(torch.cuda.get_device_capability()):
        build_without_memory(spec, block_tokens=16, planned="cuda").finish_load()
        found = list(
            {
                (op.name, problem): (op, kernel, problem) for op, kernel, problem in checks._checks
            }.values()
        )
    checks.forget()
    return found


@pytest.mark.parametrize("case", ["qwen3", "deepseek-v3", "qwen3-next", "gpt-oss"])
def test_a_kernel_reads_what_the_current_stream_writes_before_it(case: str) -> None:
    """REG-125: its inputs come late there, and are NaN until then."""
    kernels, late = kernels_of(case), 0
    assert len(kernels) > 8
    stream = torch.cuda.Stream()
    for op, kernel, problem in kernels:
        expected = [one.clone() for one in op._run(kernel.bind, op.sample(problem))]
        sample = op.sample(problem)
        function = kernel.bind(sample.problem, *sample.weights)
        function(*op.sample(problem).arguments)  # compiled
        inputs = [
            x for x in sample.arguments if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]
        kept = [x.clone() for x in inputs]
        for x in inputs:
            x.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            for x, value in zip(inputs, kept, strict=True):
                x.copy_(value)
            found = op._run(lambda *_, run=function: run, sample)
        stream.synchronize()
        late += bool(inputs)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan()), (op.name, kernel.name)
            if ours.is_floating_point():
                torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert late > 4
