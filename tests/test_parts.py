"""Parts of a run hold every test once."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.parts import Part


def test_every_test_is_in_one_part_and_parts_are_equal() -> None:
    left_out: list[Any] = []
    config: Any = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    )
    found: Counter[str] = Counter()
    for number in (1, 2, 3):
        items: list[Any] = [SimpleNamespace(nodeid=f"test[{i}]") for i in range(10)]
        Part(f"{number}/3").pytest_collection_modifyitems(config, items)
        assert len(items) in (3, 4)
        found.update(item.nodeid for item in items)
    assert len(found) == 10 and set(found.values()) == {1} and len(left_out) == 20


@pytest.mark.parametrize("name", ["0/3", "4/3", "3", "a/b", "1/0"])
def test_a_part_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--part {name}"):
        Part(name)
