"""Native kernels of recurrent state: each row gives what it gives alone, however many tokens it has; what belongs to
no row of the step is never touched (KRN-13, KRN-14)."""

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from headrace.back.kernels.native.library import Arena, Recorder, unowned
from headrace.back.kernels.position_shift import native as position_shift
from headrace.back.kernels.position_shift import op as position_shift_op
from headrace.back.kernels.state_return import native as state_return
from headrace.back.kernels.state_return import op as state_return_op
from headrace.back.kernels.state_rows import native as state_rows
from headrace.back.kernels.state_rows import op as state_rows_op
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

pytestmark = pytest.mark.usefixtures("poisoned")


def native(case):
    return importlib.import_module(f"headrace.back.kernels.{case.partition('-')[0]}.native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("case", CASES)
def test_a_row_gives_what_it_gives_alone(library, case, counts, dtype):
    """REG-038, REG-039: whatever is packed around it; states that no row of the step owns keep their bits."""
    arranged = step(case, dtype, counts)
    problem, weights, *_ = arranged
    bound = native(case).bind_with(library, problem, *weights)
    check(case, bound, arranged, wide_rows=counts == "mixed")


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("case", CASES)
def test_the_reference_does_too(case, counts):
    arranged = step(case, torch.float32, counts)
    problem, weights, _, state, rows = arranged
    module, _ = problem_of(case, torch.float32)
    reference = module.OP.reference.bind(problem, *weights)

    def bound(*arguments):
        padding = state[-1].clone()
        y = reference(*arguments[:-2], state, type(rows)(
            row_R=rows.row_R.clamp(min=0), query_start_R1=rows.query_start_R1, decode=False
        ))  # fmt: skip
        state[-1] = padding
        return y

    check(case, bound, arranged)


@pytest.mark.parametrize("case", CASES)
def test_the_self_check_accepts_it_and_nothing_of_a_step_is_torchs(newest, case):
    module, problem = problem_of(case, torch.float32)
    kernel = native(case).KERNEL
    assert kernel.supports(problem) is None
    assert module.OP.error(kernel, problem) <= module.OP.tolerance(problem)


@pytest.mark.parametrize("case", CASES)
def test_chunks_of_a_row_give_what_the_whole_gives(library, case):
    """To the bit: a prompt may be cut anywhere."""
    problem, weights, inputs, state, rows = step(case, torch.float32, "long")
    bound = native(case).bind_with(library, problem, *weights)
    other = state.clone()
    whole = bound(*inputs, state, rows)
    parts = []
    for first, last in ((0, 1), (1, 17), (17, 40)):
        cut = type(rows)(
            row_R=torch.tensor([5], dtype=torch.int32),
            query_start_R1=torch.tensor([0, last - first], dtype=torch.int32),
            decode=False,
        )
        parts.append(bound(*(one[first:last] for one in inputs), other, cut))
    assert torch.equal(torch.cat(parts), whole[:40]) and torch.equal(other[5], state[5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_state_behind_every_token_of_drafts_is_kept(library, case, dtype):
    check_trail(case, partial(native(case).bind_with, library), dtype, "cpu")


@pytest.mark.parametrize("case", CASES)
def test_the_reference_keeps_them_too(case):
    module, _ = problem_of(case, torch.float32)

    def bind(problem, *weights):
        reference = module.OP.reference.bind(problem, *weights)

        def bound(*arguments):
            *inputs, state, rows = arguments
            padding = rows.padding(state)
            kept, row_R = state[padding].clone(), rows.row_R
            row_R = torch.where((row_R < 0) | (row_R > padding), padding, row_R)
            y = reference(*inputs, state, replace(rows, row_R=row_R))
            state[padding] = kept
            return y

        return bound

    check_trail(case, bind, torch.float32, "cpu", tolerance=1e-6)


def test_a_state_goes_back_to_the_last_draft_that_stands(library, newest):
    problem = return_problem("cpu")
    check_return(state_return.bind_with(library, problem), "cpu")
    assert state_return_op.OP.error(state_return.KERNEL, problem) == 0


def test_a_recorded_step_replays_them(newest):
    arena, steps = Arena(), []
    for case in CASES:
        problem, weights, inputs, state, rows = step(case, torch.float32, "decode")
        bound = native(case).bind_with(newest, problem, *weights)
        expected_state = state.clone()
        expected = bound(*inputs, expected_state, rows)
        steps.append((bound, inputs, state, rows, expected, expected_state))
    recorder = Recorder(newest, arena)
    with recorder:
        ys = [bound(*inputs, state, rows) for bound, inputs, state, rows, *_ in steps]
    assert not recorder.foreign, recorder.foreign
    graph = recorder.graph()
    kept = [
        unowned(y) if y.is_contiguous() else unowned(y.transpose(0, 1)).transpose(0, 1) for y in ys
    ]
    for (*_, expected, expected_state), y in zip(steps, kept, strict=True):
        y.zero_()
        assert expected_state.isfinite().all() and expected.shape == y.shape
    originals = [step(case, torch.float32, "decode")[3] for case in CASES]
    for (_, _, state, *_), original in zip(steps, originals, strict=True):
        state.copy_(original)
    graph.replay()
    for (_, _, state, _, expected, expected_state), y in zip(steps, kept, strict=True):
        assert torch.equal(y[:3], expected[:3]) and torch.equal(state, expected_state)


def test_states_begin_and_are_kept_as_the_steps_numbers_say(library):
    problem = state_problem("cpu")
    begin, keep = (state_rows.bind_with(library, problem, keeps=keeps) for keeps in (False, True))
    check_states(begin, keep, "cpu")


def test_the_self_check_accepts_that(newest):
    for op, kernel in (
        (state_rows_op.BEGIN_OP, state_rows.BEGIN_KERNEL),
        (state_rows_op.KEEP_OP, state_rows.KEEP_KERNEL),
    ):
        assert op.error(kernel, state_problem("cpu")) == 0


def test_positions_move_by_a_number_of_their_row_and_back(library, newest):
    problem = position_shift_op.PositionShiftProblem(device="cpu")
    for op, kernel, sign in (
        (position_shift_op.ADD_OP, position_shift.ADD_KERNEL, 1),
        (position_shift_op.SUBTRACT_OP, position_shift.SUBTRACT_KERNEL, -1),
    ):
        assert op.error(kernel, problem) == 0
        shift = position_shift.bind_with(library, problem, sign=sign)
        back = position_shift.bind_with(library, problem, sign=-sign)
        for dtype in (torch.int32, torch.int64):
            row = torch.tensor([3, 0, 2, 5, 5], dtype=dtype)
            start = torch.tensor([0, 1, 5, 6, 6, 6], dtype=torch.int32)
            delta = torch.tensor([-7, 11, 4, -300, 9, 0])
            positions = torch.arange(500, 509)
            shift(row, start, delta, positions)
            moved = [-300, -7, -7, -7, -7, 4, 0, 0, 0]
            assert (positions - torch.arange(500, 509)).tolist() == [sign * one for one in moved]
            back(row, start, delta, positions)
            assert torch.equal(positions, torch.arange(500, 509))


def test_a_recorded_move_is_replayed(newest):
    problem = position_shift_op.PositionShiftProblem(device="cpu")
    shift = position_shift.bind_with(newest, problem, sign=1)
    delta, positions = torch.tensor([-2, 5, 0]), torch.arange(10, 12)
    row, start = torch.tensor([1, 0]), torch.tensor([0, 1, 2], dtype=torch.int32)
    recorder = Recorder(newest, Arena())
    with recorder:
        shift(row, start, delta, positions)
    assert not recorder.foreign, recorder.foreign
    positions.copy_(torch.tensor([100, 200]))
    recorder.graph().replay()
    assert positions.tolist() == [105, 198]
