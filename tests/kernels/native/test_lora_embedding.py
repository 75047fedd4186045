"""Adapters of a table by a slot per token: near the exact sum, one bit whatever is beside, refused outside."""

import pytest
import torch

from headrace.back.kernels.lora_embedding.native import KERNEL, bind_with
from headrace.back.kernels.lora_embedding.op import (
    OP,
    LoraEmbeddingProblem,
    bind_reference,
    sample_tables,
    sample_tokens,
)
from headrace.back.kernels.native.library import Arena, NativeError, Recorder


def problem_of(dtype, width=70, rank=5):
    return LoraEmbeddingProblem(device="cpu", dtype=dtype, rows=40, width=width, rank=rank, slots=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_the_reference(newest, dtype):
    assert OP.error(KERNEL, problem_of(dtype)) <= OP.tolerance(problem_of(dtype))


def test_what_is_beyond_a_rank_is_not_read_and_a_recorded_call_reads_anew(newest):
    problem = problem_of(torch.float32)
    tables, (ids, x, at) = sample_tables(problem), sample_tokens(problem, 9)
    tables.a_SVR[0, :, 3:] = torch.nan
    tables.b_SRE[0, 3:] = torch.nan
    expected, other = x.clone(), x.clone()
    bind_reference(problem, tables)(ids, expected, at)
    add = bind_with(newest, problem, tables)
    with Recorder(newest, Arena()) as recorder:
        add(ids, x, at)
    assert torch.allclose(x, expected, atol=1e-6)
    x.copy_(other)
    at.zero_()
    recorder.graph().replay()
    assert torch.equal(x, other)


def test_tokens_and_slots_that_are_not_there_are_refused(newest):
    problem = problem_of(torch.float32)
    ids, x, at = sample_tokens(problem, 3)
    add = bind_with(newest, problem, sample_tables(problem))
    for wrong in ((torch.full_like(ids, 40), x, at), (ids, x, torch.full_like(at, 4))):
        with pytest.raises(NativeError, match="index out of range"):
            add(*wrong)
