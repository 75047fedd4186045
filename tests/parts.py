"""A run in parts: `--part=3/8` takes of the chosen tests every eighth, from the third on.

Neighbours, which are cases of one test and take about as long, so go to different parts, and the parts
take about as long as each other.
"""

from __future__ import annotations

import re

import pytest


class Part:
    """A plugin for one part, named as "3/8"."""

    def __init__(self, name: str) -> None:
        match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", name)
        if match is None or int(match[1]) > int(match[2]):
            raise pytest.UsageError(f"--part {name}: a part is K/N with 1 <= K <= N")
        self._first, self._count = int(match[1]) - 1, int(match[2])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Behind what deselects by marks and names."""
        ordered = sorted(items, key=lambda item: item.nodeid)
        chosen = {item.nodeid for item in ordered[self._first :: self._count]}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
