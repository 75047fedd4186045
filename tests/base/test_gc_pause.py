"""The collector around imports, and beside requests."""

import gc
import weakref

import pytest

from headrace.base import gc_pause
from headrace.base.gc_pause import PROMOTIONS, OldGeneration, collection_paused


@pytest.mark.parametrize("ours", [False, True])
def test_nothing_is_collected_within_and_only_a_process_of_ours_keeps_what_lives(monkeypatch, ours):
    monkeypatch.setattr(gc_pause, "_own", ours)
    assert gc.isenabled()
    before = gc.get_freeze_count()
    try:
        with collection_paused():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
        assert gc.isenabled()
        frozen = gc.get_freeze_count() - before
        # what was frozen before may die meanwhile: then there is less of it
        assert frozen >= len(kept) if ours else frozen <= 0
    finally:
        gc.enable()  # not thawed: each full collection of a worker of tests would then scan millions of objects


def test_one_that_is_off_stays_off_and_nothing_is_frozen(monkeypatch):
    monkeypatch.setattr(gc_pause, "_own", True)
    gc.disable()
    try:
        before = gc.get_freeze_count()
        with collection_paused():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() <= before
    finally:
        gc.enable()


class Circle:
    """Garbage that only the collector finds."""

    def __init__(self):
        self.own = self


def old_garbage():
    """Garbage that has lived long enough to be of the oldest generation."""
    circle = Circle()
    gc.collect(0)
    gc.collect(1)
    return weakref.ref(circle)


def promote(times):
    """So many collections of the middle generation."""
    for _ in range(times):
        gc.collect(1)


@pytest.fixture
def thresholds():
    """What the collector is told here ends with the test."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
def test_old_garbage_goes_while_nobody_waits_or_once_there_is_twice_as_much():
    num_old, young = len(gc.get_objects(generation=2)), gc.get_threshold()[:2]
    old = OldGeneration(fewest=num_old + 20_000)
    assert gc.get_threshold()[:2] == young and gc.get_threshold()[2] > 10**9
    gc.collect()
    circle = old_garbage()
    assert not old.look(idle=True), "little has grown old since"
    promote(PROMOTIONS)
    assert not old.look(idle=False) and circle() is not None, "somebody waits, and it is little"
    assert old.look(idle=True) and circle() is None
    circle = old_garbage()
    kept = [[] for _ in range(2 * (num_old + 20_000))]
    promote(PROMOTIONS)
    assert old.look(idle=False) and circle() is None, "memory is bounded however long they wait"
    promote(PROMOTIONS)
    assert not old.look(idle=False), f"the {len(kept)} that stay are what there is"
