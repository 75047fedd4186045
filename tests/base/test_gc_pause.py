"""The collector around imports."""

import gc

import pytest

from headrace.base import gc_pause
from headrace.base.gc_pause import collection_paused


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
        assert frozen >= len(kept) if ours else frozen == 0
    finally:
        gc.unfreeze()


def test_one_that_is_off_stays_off_and_nothing_is_frozen(monkeypatch):
    monkeypatch.setattr(gc_pause, "_own", True)
    gc.disable()
    try:
        before = gc.get_freeze_count()
        with collection_paused():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == before
    finally:
        gc.enable()
