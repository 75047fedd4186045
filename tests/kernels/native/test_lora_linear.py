"""Adapters by a slot per row: near the exact sum, the same bits whatever rows are beside."""

import pytest
import torch

from headrace.back.kernels.lora_linear.native import KERNEL, bind_with
from headrace.back.kernels.lora_linear.op import (
    OP,
    LoraLinearProblem,
    LoraWeights,
    bind_reference,
    sample_rows,
    sample_weights,
)
from headrace.back.kernels.native.library import Arena, NativeError, Recorder

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def problem_of(dtype, inputs, parts, rank=8, slots=3, **more):
    return LoraLinearProblem(
        device="cpu", dtype=dtype, inputs=inputs, parts=parts, rank=rank, slots=slots, **more
    )


def exact(problem, weights, x, y, slots):
    wide = LoraLinearProblem(**{**vars(problem), "dtype": torch.float32})
    floats = LoraWeights(
        a_SKI=weights.a_SKI.float(), b_SRO=weights.b_SRO.float(),
        scale_SP=weights.scale_SP, rank_SP=weights.rank_SP, turn_S2O=weights.turn_S2O,
    )  # fmt: skip
    sums = y.float()
    bind_reference(wide, floats)(x.float(), sums, slots)
    return sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, inputs, parts, rank, slots",
    [(1, 1, (1,), 1, 1), (2, 33, (16, 7, 7), 3, 2), (5, 100, (300,), 8, 3), (9, 64, (64, 16), 16, 1),
     (70, 70, (130, 5), 5, 2), (200, 40, (48,), 64, 3)],
)  # fmt: skip
def test_is_near_the_exact_result(library, dtype, rows, inputs, parts, rank, slots):
    problem = problem_of(dtype, inputs, parts, rank, slots)
    weights, (x, y, at) = sample_weights(problem), sample_rows(problem, rows)
    x, wider = torch.cat((x, x), dim=1)[:, :inputs], torch.cat((y, y), dim=1)
    ours = wider[:, : sum(parts)]
    expected = exact(problem, weights, x, ours, at)
    bind_with(library, problem, weights)(x, ours, at)
    assert (ours.float() - expected).abs().max() <= BOUND[dtype] * expected.abs().max()
    assert torch.equal(wider[:, sum(parts) :], y), "nothing is written beside y"
    assert torch.equal(ours[at == 0], y[at == 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 70])
def test_magnitudes_turn_what_the_weight_gives_and_wide_results_are_not_rounded(
    newest, dtype, rows
):
    problem = problem_of(dtype, 100, (300, 33), turned=True, wide=True)
    weights, (x, y, at) = sample_weights(problem), sample_rows(problem, rows)
    expected = exact(problem, weights, x, y, at)
    bind_with(newest, problem, weights)(x, y, at)
    assert y.dtype == torch.float32
    assert (y - expected).abs().max() <= 4e-6 * expected.abs().max()


def test_what_is_beyond_a_slots_rank_is_not_read(library):
    problem = problem_of(torch.float32, 20, (24, 8), rank=6)
    weights, (x, y, at) = sample_weights(problem), sample_rows(problem, 12)
    expected = exact(problem, weights, x, y, at)
    for slot, ranks in enumerate(weights.rank_SP.tolist()):
        weights.b_SRO[slot, max(ranks) :] = torch.nan
        for part, rank in enumerate(ranks):
            weights.a_SKI[slot, part * 6 + rank : (part + 1) * 6] = torch.nan
    bind_with(library, problem, weights)(x, y, at)
    assert torch.allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads(library, dtype):
    problem = problem_of(dtype, 96, (320, 48), rank=7, slots=4)
    add = bind_with(library, problem, sample_weights(problem))
    x, y, at = sample_rows(problem, 150)
    together = y.clone()
    add(x, together, at)
    library.set_threads(1)
    for rows in (1, 2, 3, 5, 64, 149):
        part = y[:rows].clone()
        add(x[:rows], part, at[:rows])
        assert torch.equal(part, together[:rows])


def test_a_slot_that_is_not_there_is_refused(newest):
    problem = problem_of(torch.float32, 8, (8,))
    x, y, at = sample_rows(problem, 3)
    for wrong in (-1, 4):
        with pytest.raises(NativeError, match="index out of range"):
            bind_with(newest, problem, sample_weights(problem))(x, y, torch.full_like(at, wrong))


def test_a_recorded_call_reads_slots_and_weights_anew(newest):
    problem = problem_of(torch.float32, 32, (40,))
    weights, (x, y, at) = sample_weights(problem), sample_rows(problem, 6)
    add, first = bind_with(newest, problem, weights), y.clone()
    with Recorder(newest, Arena()) as recorder:
        add(x, y, at)
    assert not recorder.foreign
    y.copy_(first)
    at.copy_(at.flip(0))
    weights.b_SRO.mul_(2.0)
    expected = exact(problem, weights, x, y, at)
    recorder.graph().replay()
    assert torch.allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_check_accepts_it(newest, dtype):
    problem = problem_of(dtype, 1024, (2048, 512, 512), rank=16, slots=4)
    assert OP.error(KERNEL, problem) <= OP.tolerance(problem)
