"""Triton's kernels of recurrent state: each row gives what it gives alone; what belongs to no row of the step is never
touched (KRN-13, KRN-14). In the interpreter, or on a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.state_rows import op as state_rows_op
from headrace.back.kernels.triton.wrap import interpreted
from tests.covering import first_of_each
from tests.kernels.recurrent_cases import (
    CASES,
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


def triton_kernel(case: str) -> object:
    name = case.partition("-")[0]
    return importlib.import_module(f"headrace.back.kernels.{name}.triton_{name}").KERNEL


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("case", CASES)
def test_a_row_gives_what_it_gives_alone(case: str, counts: str, dtype: torch.dtype) -> None:
    """REG-038, REG-039: see tests/kernels/native/test_recurrent.py."""
    arranged = step(case, dtype, counts, DEVICE)
    problem, weights, *_ = arranged
    bound = triton_kernel(case).bind(problem, *weights)
    check(case, bound, arranged, wide_rows=counts == "mixed")


@pytest.mark.parametrize(
    "case", first_of_each([*CASES], [name.partition("-")[0] for name in CASES])
)
def test_the_state_behind_every_token_of_drafts_is_kept(case: str) -> None:
    check_trail(case, triton_kernel(case).bind, torch.float32, DEVICE)


def test_a_state_goes_back_to_the_last_draft_that_stands() -> None:
    from headrace.back.kernels.state_return import op, triton_state_return

    problem = return_problem(DEVICE)
    check_return(triton_state_return.KERNEL.bind(problem), DEVICE)
    assert op.OP.error(triton_state_return.KERNEL, problem) == 0


@pytest.mark.parametrize("case", CASES)
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
