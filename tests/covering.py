"""Which cases of a product of parameters run in every `make test`: those that cover every pair of values.

Most faults need one value or two that meet; a product of five parameters repeats each pair many
times. Where a test is marked `covering`, cases that cover all pairs (or `covering(1)`: all values,
`covering(0)`: one case) stay, and the others are marked slow: they still run, in `make slow`. The
choice depends on the parameters alone and is the same in every process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

Case = frozenset[tuple[tuple[str, int], ...]]
"""What a case covers: values (name, number), or combinations of them."""


def mark_rest_slow(items: list[pytest.Item]) -> None:
    """Marks what the `covering` tests can do without. What is slow already covers nothing."""
    groups: dict[tuple[object, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        marked = item.get_closest_marker("covering") and not item.get_closest_marker("slow")
        if marked and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            groups[item.parent, item.originalname].append(item)
    for group in groups.values():
        marker = group[0].get_closest_marker("covering")
        strength = marker.args[0] if marker is not None and marker.args else 2
        cases = [covered(values_of(item), strength) for item in group]
        chosen = cover(cases)
        for number, item in enumerate(group):
            if number not in chosen:
                item.add_marker(pytest.mark.slow)


def one_of_skipped(items: list[pytest.Item]) -> list[pytest.Item]:
    """Without the cases that this machine skips, but the first of each test and of its slow ones: it says why."""
    told: set[tuple[object, str, bool]] = set()
    kept = []
    for item in items:
        if isinstance(item, pytest.Function) and _is_skipped(item):
            key = item.parent, item.originalname, item.get_closest_marker("slow") is not None
            if key in told:
                continue
            told.add(key)
        kept.append(item)
    return kept


def _is_skipped(item: pytest.Function) -> bool:
    """By a condition that was worked out when its file was read."""
    return any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))


def first_of_each(values: Sequence[object], kinds: Sequence[object]) -> list[object]:
    """Parameters: the first value of each kind as it is, the others slow."""
    return [
        pytest.param(value, marks=() if kinds.index(kind) == number else pytest.mark.slow)
        for number, (value, kind) in enumerate(zip(values, kinds, strict=True))
    ]


def values_of(item: pytest.Function) -> dict[str, int]:
    """Which value each parameter has: by identity, as all cases of a test share the objects of its lists."""
    return {name: id(value) for name, value in item.callspec.params.items()}


def covered(values_by_name: dict[str, int], strength: int) -> Case:
    """The combinations of `strength` values that a case has; of fewer parameters, all."""
    values = sorted(values_by_name.items())
    return frozenset(combinations(values, min(strength, len(values))))


def cover(cases: list[Case]) -> set[int]:
    """Numbers of cases that together cover what all do: each time the one that adds most."""
    missing, chosen = set().union(*cases), set()
    gains = {number: len(case) for number, case in enumerate(cases)}
    while missing:
        best = _most(gains, cases, missing)
        chosen.add(best)
        missing -= cases[best]
        del gains[best]
    return chosen


def _most(gains: dict[int, int], cases: list[Case], missing: set[object]) -> int:
    """The case that adds most. What one adds only shrinks: an old figure that is no better need not be looked at."""
    best, most = -1, 0
    for number in _by_gain(gains):
        if gains[number] <= most:
            break
        gains[number] = len(cases[number] & missing)
        if gains[number] > most:
            best, most = number, gains[number]
    return best


def _by_gain(gains: dict[int, int]) -> Iterator[int]:
    return iter(sorted(gains, key=lambda number: (-gains[number], number)))
