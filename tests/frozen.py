"""What a run of tests pays for at each test though it changes nothing: Python's cyclic collector, and loggers.

A worker holds some millions of objects for good: the modules of PyTorch and of the oracles, and eleven thousand tests.
A full collection scans them all, 0.8 s each time, and every engine that is closed asks for one. What lives when the
tests are collected, and then behind each file, is frozen: it is scanned no more.

pytest puts its handlers on the root logger and on each that does not propagate, three times a test, and PyTorch makes
fifty of those: 3 ms a test. During the tests they propagate.
"""

from __future__ import annotations

import gc
import logging

import pytest


class Frozen:
    """A plugin. Nothing is collected while tests are imported and collected: nearly all of that stays."""

    def __init__(self) -> None:
        gc.disable()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Before there is much."""
        _begin_hypothesis()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        """In the process that only shows results too."""
        gc.freeze()
        gc.enable()
        for name, logger in logging.root.manager.loggerDict.items():
            if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
                logger.propagate = True

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """The fixtures of a file are gone with its last test; what is left are modules that it was first to import."""
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


def _begin_hypothesis() -> None:
    """With its first example Hypothesis registers its source of numbers, which warns if nothing refers to that; it asks
    the collector, which does not know what is frozen, and has it scan all there is: little now, millions of objects
    once the tests are collected."""
    try:
        from hypothesis import given, strategies
    except ImportError:  # `make test-gpu` does without it
        return

    @given(strategies.none())
    def first(_: None) -> None:
        pass

    first()
