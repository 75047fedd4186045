"""How many layers each stage of a pipeline has: as stated, or so that the largest stage is as small
as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from headrace.base.errors import ConfigError


def layers_of_stages(
    stated: tuple[int, ...],
    stages: int,
    layer_bytes: Sequence[int],
    *,
    before: int = 0,
    behind: int = 0,
) -> tuple[int, ...]:
    """The layers of each stage, in order; ConfigError where that cannot be. `before` and `behind`:
    bytes that stand before the first layer and behind the last one, on the first and last stage."""
    if stated:
        _check_stated(stated, stages, len(layer_bytes))
        return stated
    if stages > len(layer_bytes):
        raise ConfigError(
            f"--pipeline-parallel {stages}: the model has {len(layer_bytes)} layers, and each stage "
            "needs one",
            field="pipeline_parallel",
        )
    weighed = [*layer_bytes]
    weighed[0] += before
    weighed[-1] += behind
    return _split(weighed, stages)


def _check_stated(stated: tuple[int, ...], stages: int, num_layers: int) -> None:
    assert len(stated) == stages, (stated, stages)
    if sum(stated) != num_layers or min(stated) < 1:
        raise ConfigError(
            f"--pipeline-layers {','.join(map(str, stated))}: {sum(stated)} layers; the model has "
            f"{num_layers}, and each stage needs one",
            field="pipeline_layers",
        )


def _split(weights: Sequence[int], parts: int) -> tuple[int, ...]:
    """Lengths of neighbouring parts whose greatest sum is least; of several such splits the one
    that leaves the later parts the fewer."""
    ends = [0, *accumulate(weights)]
    least = [[0] + [ends[-1] + 1] * len(weights)]  # by number of parts, then of layers in them
    cut: list[list[int]] = [[0] * len(ends)]
    for _ in range(parts):
        sums, cuts = [ends[-1] + 1], [0]
        for stop in range(1, len(ends)):
            greatest, start = min(
                (max(least[-1][start], ends[stop] - ends[start]), start) for start in range(stop)
            )
            sums.append(greatest)
            cuts.append(start)
        least.append(sums)
        cut.append(cuts)
    lengths: list[int] = []
    stop = len(weights)
    for part in range(parts, 0, -1):
        lengths.append(stop - cut[part][stop])
        stop = cut[part][stop]
    return tuple(reversed(lengths))
