"""What stands around the adapters of experts: equal to the reference, also when it is replayed; refused outside."""

import pytest
import torch

from headrace.back.kernels.lora_pairs import native
from headrace.back.kernels.lora_pairs.op import (
    PAIRS_OP,
    SUM_OP,
    LoraPairsProblem,
    bind_pairs,
    bind_sum,
    new_pairs,
)
from headrace.back.kernels.native.library import Arena, NativeError, Recorder


def problem_of(dtype=torch.float32):
    return LoraPairsProblem(device="cpu", dtype=dtype, experts=4, slots=3, width=37, inner=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_are_the_references(newest, dtype):
    problem = problem_of(dtype)
    for op, kernel in ((PAIRS_OP, native.PAIRS), (SUM_OP, native.SUM)):
        assert op.error(kernel, problem) <= op.tolerance(problem)


def test_recorded_calls_read_what_there_is_then_and_what_is_outside_is_refused(newest):
    problem = problem_of()
    x, y = torch.randn(2, 6, 37, generator=torch.Generator().manual_seed(0)).unbind()
    at, expert = torch.tensor([0, 1, 2, 1, 0, 2]).int(), torch.arange(18).view(6, 3).int() % 4
    weight, pairs = torch.rand(6, 3), new_pairs(problem, x)
    split = native.bind_pairs_with(newest, problem)
    add = native.bind_sum_with(newest, problem)
    with Recorder(newest, Arena()) as recorder:
        split(x, at, expert, pairs)
        add(y, weight, pairs)
    before = y.copy_(x).clone()
    at.fill_(1)
    expert[2, 1] = -1
    recorder.graph().replay()
    assert torch.equal(y, before) and pairs.slot_P.view(6, 3)[2].tolist() == [3, 0, 1]
    pairs.down_PE.copy_(pairs.x_PE)
    add(y, weight, pairs)
    bind_pairs(problem)(x, at, expert, pairs)
    pairs.down_PE.copy_(pairs.x_PE)
    bind_sum(problem)(before, weight, pairs)
    assert torch.allclose(y, before, atol=1e-5)
    for wrong in ((torch.full_like(at, -1), expert), (at, torch.full_like(expert, 4))):
        with pytest.raises(NativeError, match="index out of range"):
            split(x, *wrong, pairs)
