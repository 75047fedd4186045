"""The order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: beside each other, workers then end at about the same time."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
