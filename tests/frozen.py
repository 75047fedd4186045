"""Python's cyclic collector in a run of tests.

A worker holds some millions of objects for good: the modules of PyTorch and of the oracles, and eleven thousand tests.
A full collection scans them all, 0.8 s each time, and every engine that is closed asks for one. What lives when the
tests are collected, and then behind each file, is frozen: it is scanned no more.
"""

from __future__ import annotations

import gc

import pytest


class Frozen:
    """A plugin. Nothing is collected while tests are imported and collected: nearly all of that stays."""

    def __init__(self) -> None:
        gc.disable()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        """In the process that only shows results too."""
        gc.freeze()
        gc.enable()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """The fixtures of a file are gone with its last test; what is left are modules that it was first to import."""
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()
