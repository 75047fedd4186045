"""Native greedy choice and draw against their references: ties, NaN, masks, every width, the distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.back.kernels.greedy import native as greedy
from headrace.back.kernels.greedy import op as greedy_op
from headrace.back.kernels.gumbel import native as gumbel
from headrace.back.kernels.gumbel import op as gumbel_op
from headrace.back.kernels.native.library import loaded
from headrace.back.kernels.token_scores import native as token_scores
from headrace.back.kernels.token_scores import op as token_scores_op
from headrace.back.kernels.token_scores.op import ScoreTable, TokenScoresProblem

pytestmark = pytest.mark.usefixtures("poisoned")
GREEDY = greedy_op.GreedyProblem(device="cpu")
GUMBEL = gumbel_op.GumbelProblem(device="cpu")
INF, NAN = float("inf"), float("nan")
WIDTHS = [1, 3, 16, 17, 1000, 32769, 151_936]


def logits_of(rows, width, seed=0):
    return 4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", WIDTHS)
def test_greedy_equals_the_reference(library, width):
    logits = logits_of(3, width + 2)[:, :width].round()  # rounding makes ties
    token, value = greedy.bind_with(library)(logits)
    expected, best = greedy_op.bind_reference(GREEDY)(logits)
    assert torch.equal(token, expected) and torch.equal(value, best)


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN, 3e38, -3e38])


@settings(max_examples=100, deadline=None)
@given(st.lists(SPECIAL, min_size=1, max_size=70), st.integers(0, 66_000))
def test_greedy_on_any_row_of_special_values(library_path, values, ahead):
    logits = torch.cat((torch.full((ahead,), -INF), torch.tensor(values)))[None]
    token, value = greedy.bind_with(loaded())(logits)
    expected, best = greedy_op.bind_reference(GREEDY)(logits)
    assert torch.equal(token, expected) and torch.equal(value.nan_to_num(7.0), best.nan_to_num(7.0))


SCORES = TokenScoresProblem(device="cpu")


def scores_by(function, logits, token, columns):
    scores = ScoreTable.empty(len(logits), columns, logits.device)
    function(logits, token, scores)
    return scores


def same_scores(ours, expected):
    """Log-probabilities to rounding, all else to the bit; a NaN is a NaN."""
    assert torch.equal(ours.ids, expected.ids) and torch.equal(ours.ranks, expected.ranks)
    for one, other in ((ours.values, expected.values), (ours.log_sum_exp, expected.log_sum_exp)):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_token_scores_equal_the_reference(library, width):
    rows = 3
    logits = logits_of(rows, width + 2)[:, :width]
    logits[1] = logits[1].round()
    token = torch.randint(width, (rows,), generator=torch.Generator().manual_seed(1))
    ours, reference = token_scores.bind_with(library), token_scores_op.bind_reference(SCORES)
    for columns in (1, min(6, width + 1), min(21, width + 1)):
        mine = scores_by(ours, logits, token, columns)
        same_scores(mine, scores_by(reference, logits, token, columns))
        alone = scores_by(ours, logits[1:2], token[1:2], columns)
        assert torch.equal(alone.data[0], mine.data[1])


@settings(max_examples=100, deadline=None)
@given(st.lists(SPECIAL, min_size=1, max_size=70), st.integers(0, 20_000), st.integers(0, 69))
def test_token_scores_of_any_row_of_special_values(library_path, values, ahead, at):
    logits = torch.cat((torch.full((ahead,), -INF), torch.tensor(values)))[None]
    token, columns = torch.tensor([ahead + at % len(values)]), 1 + min(5, logits.shape[1])
    mine = scores_by(token_scores.bind_with(loaded()), logits, token, columns)
    same_scores(mine, scores_by(token_scores_op.bind_reference(SCORES), logits, token, columns))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_draw_equals_the_reference(library, width):
    rows = 8 if width > 100_000 else 40
    logits = logits_of(rows, width + 3)[:, :width]
    temperature = torch.linspace(0.05, 3.0, rows, dtype=torch.float64)
    keys = torch.randint(
        -(1 << 63), (1 << 63) - 1, (rows,), generator=torch.Generator().manual_seed(5)
    )
    token, z = gumbel.bind_with(library)(logits, temperature, keys)
    expected, best = gumbel_op.bind_reference(GUMBEL)(logits, temperature, keys)
    assert torch.equal(token, expected) and torch.equal(z, best)


def test_masked_tokens_are_never_drawn_and_a_row_without_tokens_says_so(library):
    logits = torch.full((200, 40_000), -INF)
    logits[:100, 39_990] = -50.0
    ones, keys = torch.ones(200, dtype=torch.float64), torch.arange(200)
    token, z = gumbel.bind_with(library)(logits, ones, keys)
    assert (token[:100] == 39_990).all() and (z[:100] == -50.0).all()
    assert (token[100:] == 0).all() and (z[100:] == -INF).all()


def test_the_draw_follows_the_softmax(newest):
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01], dtype=torch.float64)
    draws = 200_000
    logits = (2.0 * probabilities.log()).float().expand(draws, 5).contiguous()
    keys = torch.randint(
        -(1 << 63), (1 << 63) - 1, (draws,), generator=torch.Generator().manual_seed(1)
    )
    token, _ = gumbel.bind_with(newest)(
        logits, torch.full((draws,), 2.0, dtype=torch.float64), keys
    )
    seen = torch.bincount(token, minlength=5).double()
    chi_square = ((seen - draws * probabilities) ** 2 / (draws * probabilities)).sum()
    assert (
        chi_square < 23.5
    )  # 4 degrees of freedom: exceeded once in 10,000 seeds, and the seed is fixed


def test_the_self_checks_accept_them(newest):
    assert greedy_op.OP.error(greedy.KERNEL, GREEDY) == 0.0
    assert gumbel_op.OP.error(gumbel.KERNEL, GUMBEL) == 0.0
