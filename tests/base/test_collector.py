"""The collector around imports."""

import gc

from headrace.base.collector import put_off


def test_nothing_is_collected_within_and_what_lives_is_passed_over_afterwards():
    assert gc.isenabled()
    before = gc.get_freeze_count()
    try:
        with put_off():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


def test_one_that_is_off_stays_off_and_nothing_is_frozen():
    gc.disable()
    try:
        before = gc.get_freeze_count()
        with put_off():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == before
    finally:
        gc.enable()
