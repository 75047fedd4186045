"""Greedy choice over parts of the logits is that over the whole rows, bit for bit, wherever the parts are cut."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.greedy.op import bind_reference as whole
from headrace.back.kernels.running_greedy.native import KERNEL, bind_with
from headrace.back.kernels.running_greedy.op import OP, RunningGreedyProblem, bind_reference

PROBLEM = RunningGreedyProblem(device="cpu")


def by_parts(running, logits, cuts):
    token = torch.full((len(logits),), -7)
    value = torch.full((len(logits),), float("nan"))
    for first, last in zip([0, *cuts], [*cuts, logits.shape[1]], strict=True):
        running(logits[:, first:last], first, token, value)
    return token, value


def assert_same(running, logits, cuts):
    token, value = by_parts(running, logits, cuts)
    expected, best = whole(GreedyProblem(device="cpu"))(logits)
    assert torch.equal(token, expected)
    assert torch.equal(value.nan_to_num(7.5), best.nan_to_num(7.5))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_cut_gives_the_choice_of_the_whole(library, data):
    """With few different values, so that there are many ties, NaN and infinities among them."""
    width = data.draw(st.integers(2, 200))
    values = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, 2.0]
    column = st.lists(st.sampled_from(values), min_size=width, max_size=width)
    logits = torch.tensor(data.draw(st.lists(column, min_size=1, max_size=3)))
    cuts = sorted(data.draw(st.sets(st.integers(1, width - 1), max_size=4)))
    assert_same(bind_with(library), logits, cuts)
    assert_same(bind_reference(PROBLEM), logits, cuts)


def test_a_whole_vocabulary(library):
    logits = torch.randn(5, 151_936, generator=torch.Generator().manual_seed(0))
    logits[1, 40_000] = logits[1, 90_000] = 50.0
    logits[2, 70_000], logits[3] = float("nan"), float("-inf")
    assert_same(bind_with(library), logits, range(16_384, 151_936, 16_384))


def test_the_self_check_accepts_it(newest):
    assert OP.error(KERNEL, PROBLEM) == 0


@pytest.mark.parametrize("running", [bind_reference(PROBLEM)])
def test_the_sample_tells_a_choice_that_forgets_what_was_before(running):
    def forgetful(logits, first, token, value):
        running(logits, 0, token, value)
        token += first

    sample, other = OP.sample(PROBLEM), OP.sample(PROBLEM)
    running(*sample.arguments)
    forgetful(*other.arguments)
    assert not torch.equal(sample.arguments[2], other.arguments[2])
