"""Where kernels are interpreted (test_interpreter.py), the interpreter is a quicker one, and of each product of
parameters the cases that cover all values are enough, but for the slow tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

INTERPRETED = False
if find_spec("triton") is not None:
    from headrace.back.kernels.triton.wrap import interpreted

    INTERPRETED = interpreted()
    if INTERPRETED:
        from tests.kernels.triton.quick_interpreter import quicken

        quicken()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A GPU runs them all in no time."""
    for item in items:
        if INTERPRETED and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.covering(1))
