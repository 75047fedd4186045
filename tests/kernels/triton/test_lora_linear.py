"""Shrink and expand, and those of tables, against the reference (test_interpreter.py starts this file in the
interpreter)."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.lora_embedding import op as lora_embedding
from headrace.back.kernels.lora_embedding import triton_lora_embedding
from headrace.back.kernels.lora_embedding.op import LoraEmbeddingProblem
from headrace.back.kernels.lora_linear import triton_lora_linear
from headrace.back.kernels.lora_linear.op import (
    OP,
    LoraLinearProblem,
    bind_reference,
    sample_rows,
    sample_weights,
)
from headrace.back.kernels.triton.wrap import interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
DEVICE = "cpu" if interpreted() else "cuda"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [FP32, FP16] if interpreted() else [FP32, FP16, BF16]
BOUND = {FP32: 1e-5, FP16: 2e-3, BF16: 1.5e-2}


def problem_of(dtype, inputs, parts, rank, slots, **more):
    return LoraLinearProblem(
        device=DEVICE, dtype=dtype, inputs=inputs, parts=parts, rank=rank, slots=slots, **more
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "parts", "rank", "slots"),
    [(1, 70, (130,), 5, 1), (17, 100, (200, 30, 30), 16, 3), (70, 64, (96,), 72, 2), (0, 8, (8,), 2, 1)],
)  # fmt: skip
def test_shrink_and_expand_equal_the_reference(dtype, rows, inputs, parts, rank, slots):
    problem = problem_of(dtype, inputs, parts, rank, slots)
    weights, (x, y, at) = sample_weights(problem), sample_rows(problem, rows)
    expected = y.clone()
    bind_reference(problem, weights)(x, expected, at)
    triton_lora_linear.bind(problem, weights)(x, y, at)
    error = (y.float() - expected.float()).abs().max() if rows else torch.tensor(0.0)
    assert error <= BOUND[dtype] * (expected.float().abs().max() if rows else 1.0)


@pytest.mark.parametrize("rows", [5, 70])
def test_magnitudes_turn_what_the_weight_gives(rows):
    problem = problem_of(FP32, 40, (130, 24), 6, 3, turned=True, wide=True)
    weights, (x, y, at) = sample_weights(problem), sample_rows(problem, rows)
    expected = y.clone()
    bind_reference(problem, weights)(x, expected, at)
    triton_lora_linear.bind(problem, weights)(x, y, at)
    assert torch.allclose(y, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_a_table_equal_the_reference(dtype):
    problem = LoraEmbeddingProblem(device=DEVICE, dtype=dtype, rows=40, width=530, rank=20, slots=3)
    kernel = triton_lora_embedding.KERNEL
    assert lora_embedding.OP.error(kernel, problem) <= lora_embedding.OP.tolerance(problem)


def test_ranks_beyond_a_slots_own_and_slots_nobody_has_are_not_read():
    problem = problem_of(FP32, 40, (24, 8), 6, 3)
    weights, (x, y, at) = sample_weights(problem), sample_rows(problem, 9)
    at[at == 2] = 0
    expected = y.clone()
    bind_reference(problem, weights)(x, expected, at)
    weights.a_SKI[1], weights.b_SRO[1] = torch.nan, torch.nan
    for slot, ranks in enumerate(weights.rank_SP.tolist()):
        weights.b_SRO[slot, max(ranks) :] = torch.nan
    triton_lora_linear.bind(problem, weights)(x, y, at)
    assert torch.allclose(y, expected, atol=1e-4)


def test_rows_without_adapters_are_left_as_they_are():
    problem = problem_of(FP32, 16, (16,), 4, 2)
    x, y, at = sample_rows(problem, 5)
    before = y.clone()
    triton_lora_linear.bind(problem, sample_weights(problem))(x, y, torch.zeros_like(at))
    assert torch.equal(y, before)


def test_the_self_check_accepts_it():
    problem = problem_of(FP32, 256, (128, 64), 16, 2)
    assert OP.error(triton_lora_linear.KERNEL, problem) <= OP.tolerance(problem)
