"""PAR-05: layers by bytes, or as stated; what cannot be split is refused with the numbers."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from headrace.back.parallel.stages import layers_of_stages
from headrace.base.errors import ConfigError


def heaviest(layers: tuple[int, ...], weights: list[int]) -> int:
    ends = [sum(layers[:i]) for i in range(len(layers) + 1)]
    return max(sum(weights[a:b]) for a, b in pairwise(ends))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("weights", [[5] * 8, [1, 9, 1, 1, 7, 2, 2, 3], [40, 1, 1, 1, 1, 1]])
def test_the_largest_stage_is_as_small_as_it_can_be(stages: int, weights: list[int]) -> None:
    ours = layers_of_stages((), stages, weights)
    assert sum(ours) == len(weights) and min(ours) >= 1 and len(ours) == stages
    every = [
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, len(weights)), strict=True))
        for cuts in combinations(range(1, len(weights)), stages - 1)
    ]
    assert heaviest(ours, weights) == min(heaviest(one, weights) for one in every)


def test_what_stands_around_the_layers_weighs_on_the_outer_stages() -> None:
    assert layers_of_stages((), 2, [10] * 8) == (4, 4)
    assert layers_of_stages((), 2, [10] * 8, behind=40) == (6, 2)
    assert layers_of_stages((), 2, [10] * 8, before=20, behind=20) == (4, 4)


@pytest.mark.parametrize(
    ("stated", "stages", "words"),
    [
        ((), 5, "pipeline-parallel 5: the model has 4 layers"),
        ((2, 1), 2, "2,1: 3 layers; the model has 4"),
        ((4, 0), 2, "each stage needs one"),
    ],
)
def test_stages_without_layers_are_refused(stated: tuple, stages: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layers_of_stages(stated, stages, [1] * 4)
    assert layers_of_stages((1, 3), 2, [1] * 4) == (1, 3)
