"""Triton's kernels of recurrent state: each row gives what it gives alone; what belongs to no row of the step is never
touched (KRN-13, KRN-14). In the interpreter, or on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.state_rows import op as state_rows_op
from headrace.back.kernels.triton.wrap import interpreted
from tests.covering import first_of_each
from tests.kernels.recurrent_cases import (
    CASES,
    CHUNKS,
    COUNTS,
    check,
    check_return,
    check_states,
    check_trail,
    problem_of,
    return_problem,
    state_problem,
    step,
)  # fmt: skip

DEVICE = "cpu" if interpreted() else "cuda"
DTYPES = [torch.float32, torch.float16 if interpreted() else torch.bfloat16]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]


SHORTER = ("wkv6", "wkv7", "token_shift")
"""Their kernels are held by their self-checks; the rest takes seconds in the interpreter."""


SETTLED = [name for name in CASES if name.partition("-")[0] not in SHORTER]


def shorter_slow(*names: str) -> list[Any]:
    """Parameters."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name.partition("-")[0] in SHORTER else name
        for name in names
    ]


def triton_kernel(case: str) -> object:
    return module_of(case).KERNEL


def module_of(case: str, *, chunks: bool = False) -> Any:
    name = case.partition("-")[0]
    by_chunks = "triton_tiles" if name == "causal_conv" else "triton_chunks"
    file = by_chunks if chunks else f"triton_{name}"
    return importlib.import_module(f"headrace.back.kernels.{name}.{file}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("case", shorter_slow(*CASES))
def test_a_row_gives_what_it_gives_alone(case: str, counts: str, dtype: torch.dtype) -> None:
    """REG-038, REG-039: see tests/kernels/native/test_recurrent.py."""
    arranged = step(case, dtype, counts, DEVICE)
    problem, weights, *_ = arranged
    bound = triton_kernel(case).bind(problem, *weights)
    check(case, bound, arranged, wide_rows=counts == "mixed")


@pytest.mark.parametrize(
    "case",
    [
        *first_of_each(SETTLED, [name.partition("-")[0] for name in SETTLED]),
        *shorter_slow(*(name for name in CASES if name not in SETTLED)),
    ],
)
def test_the_state_behind_every_token_of_drafts_is_kept(case: str) -> None:
    check_trail(case, triton_kernel(case).bind, torch.float32, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CHUNKS)
def test_prompts_by_chunks_give_what_they_give_alone(case: str, dtype: torch.dtype) -> None:
    """KRN-13: beside rows that go token by token, from states of their own, heads that keep from almost all to almost
    nothing, and tokens that let all go; keys that repeat, of which the triangle's powers are largest."""
    problem, weights, inputs, state, rows = step(case, dtype, CHUNKS[case], DEVICE)
    refused = module_of(case, chunks=True).KERNEL.supports(problem)
    if refused is not None:
        pytest.skip(refused)  # such rows go token by token
    if case != "causal_conv":
        weights = problem_of(case, dtype, DEVICE)[0].long_sample(problem).weights
        gates, keys = (inputs[1], inputs[2]) if case == "ssd_scan" else (inputs[3], inputs[1])
        gates[20:40:7] *= 40
        keys[30:60] = keys[30]
    bound = module_of(case, chunks=True).KERNEL.bind(problem, *weights)
    check(case, bound, (problem, weights, inputs, state, rows))


@pytest.mark.parametrize("case", ["gated_delta", "ssd_scan"])
def test_short_rows_and_drafts_beside_chunks_go_token_by_token(case: str) -> None:
    """To the bit; deterministic runs, whose bits no cut of a prompt may change, take no chunks."""
    kernel = module_of(case, chunks=True).KERNEL
    check_trail(case, kernel.bind, torch.float32, DEVICE)
    problem, weights, inputs, state, rows = step(case, torch.float32, "mixed", DEVICE)
    kernels, states = (kernel, triton_kernel(case)), (state.clone(), state.clone())
    ours, theirs = (
        each.bind(problem, *weights)(*inputs, own, rows)
        for each, own in zip(kernels, states, strict=True)
    )
    assert torch.equal(ours[:15], theirs[:15]) and torch.equal(*states)
    assert triton_kernel(case).invariant and not kernel.invariant


@pytest.mark.parametrize("case", CHUNKS)
def test_the_self_check_accepts_chunks(case: str) -> None:
    dtype = torch.float32 if interpreted() else torch.bfloat16
    module, problem = problem_of(case, dtype, DEVICE)
    kernel = module_of(case, chunks=True).KERNEL
    refused = kernel.supports(problem)
    if refused is not None:
        pytest.skip(refused)
    assert module.OP.failures(kernel, problem) == []


@pytest.mark.skipif(interpreted(), reason="too large for the interpreter")
@pytest.mark.parametrize("count, length", [(1, 8192), (16, 512), (3, 1000)])
@pytest.mark.parametrize("name", ["gated_delta", "gated_delta, per channel", "ssd_scan"])
def test_chunks_of_true_sizes_give_what_tokens_give(name: str, count: int, length: int) -> None:
    """bfloat16, 32 heads of 128 x 128 and 128 of 64 x 128, beside the kernel that goes token by token."""
    from benchmarks.h200.recurrent import problems, prompts

    op, problem = problems(DEVICE)[name]
    by_chunks, by_tokens = (module_of(op.name, chunks=chunks).KERNEL for chunks in (True, False))
    assert by_chunks.supports(problem) is None
    weights = problem_of(op.name, torch.bfloat16)[0].long_sample(problem).weights
    *inputs, state, rows = prompts(op.sample(problem).arguments, count, length, DEVICE)
    state.normal_()
    own, padding = state.clone(), state[-1].clone()
    ours = by_chunks.bind(problem, *weights)(*inputs, state, rows)
    theirs = by_tokens.bind(problem, *weights)(*inputs, own, rows)
    assert torch.equal(state[-1], padding)
    for one, other in ((ours, theirs), (state, own)):
        off = (one.float() - other.float()).abs().max() / other.float().abs().max()
        assert one.isfinite().all() and off <= op.tolerance(problem), float(off)


def test_a_state_goes_back_to_the_last_draft_that_stands() -> None:
    from headrace.back.kernels.state_return import op, triton_state_return

    problem = return_problem(DEVICE)
    check_return(triton_state_return.KERNEL.bind(problem), DEVICE)
    assert op.OP.error(triton_state_return.KERNEL, problem) == 0


@pytest.mark.parametrize("case", [*SETTLED, *SHORTER, *shorter_slow("wkv6-linear", "wkv7-first")])
def test_the_self_check_accepts_it(case: str) -> None:
    module, problem = problem_of(case, torch.float32, DEVICE)
    kernel = triton_kernel(case)
    assert kernel.supports(problem) is None
    assert module.OP.error(kernel, problem) <= module.OP.tolerance(problem)


def test_states_begin_and_are_kept_as_the_steps_numbers_say() -> None:
    from headrace.back.kernels.state_rows import triton_state_rows

    problem = state_problem(DEVICE)
    kernels = triton_state_rows.BEGIN_KERNEL, triton_state_rows.KEEP_KERNEL
    check_states(*(kernel.bind(problem) for kernel in kernels), DEVICE)
    for op, kernel in zip((state_rows_op.BEGIN_OP, state_rows_op.KEEP_OP), kernels, strict=True):
        assert op.error(kernel, problem) == 0


def test_positions_move_by_a_number_of_their_row() -> None:
    from headrace.back.kernels.position_shift import op, triton_position_shift

    problem = op.PositionShiftProblem(device=DEVICE)
    for each, kernel in (
        (op.ADD_OP, triton_position_shift.ADD_KERNEL),
        (op.SUBTRACT_OP, triton_position_shift.SUBTRACT_KERNEL),
    ):
        assert each.error(kernel, problem) == 0
