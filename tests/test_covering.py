"""Cases that cover all pairs of values."""

from __future__ import annotations

from itertools import product

import pytest

from tests.covering import cover, covered


def cases_of(*levels: int, strength: int) -> list:
    names = "abcdefg"
    grid = product(*(range(level) for level in levels))
    return [covered(dict(zip(names, values, strict=False)), strength) for values in grid]


@pytest.mark.parametrize(
    ("levels", "strength", "most"),
    [
        ((7,), 2, 7),
        ((3, 4), 2, 12),
        ((3, 4), 1, 4),
        ((3, 4), 0, 1),
        ((4, 4, 4), 2, 22),
        ((2,) * 6, 2, 8),
    ],
)
def test_every_combination_is_covered_by_few_cases(
    levels: tuple[int, ...], strength: int, most: int
) -> None:
    cases = cases_of(*levels, strength=strength)
    chosen = cover(cases)
    assert set().union(*(cases[number] for number in chosen)) == set().union(*cases)
    assert len(chosen) <= most
    assert cover(cases) == chosen


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(1, 2), (3, 4), [5, 6]])
@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_of_a_product_every_value_is_kept(
    request: pytest.FixtureRequest, name: str, shape: object
) -> None:
    """Of these twelve cases four are not slow; a run of the slow ones alone cannot count them."""
    if request.node.get_closest_marker("slow"):
        pytest.skip("the four that are not slow count")
    items = [
        item for item in request.session.items if item.originalname == request.function.__name__
    ]
    kept = [item.callspec.params for item in items if not item.get_closest_marker("slow")]
    assert {params["name"] for params in kept} == set("abcd")
    assert len({id(params["shape"]) for params in kept}) == 3 and len(kept) == 4


@pytest.mark.skipif(True, reason="it stands for tests that cannot run here")
@pytest.mark.parametrize("number", range(5))
def test_that_cannot_run_here(number: int) -> None:
    raise AssertionError(number)


def test_of_what_cannot_run_one_case_says_so(request: pytest.FixtureRequest) -> None:
    name = test_that_cannot_run_here.__name__
    cases = [item for item in request.session.items if item.name.startswith(name)]
    assert len(cases) <= 1, "none where a part of the tests runs, or one is chosen"
