"""A thread keeps to its CPUs, and so does what it starts; it can be moved again."""

import os
import threading

import pytest

from headrace.base.affinity import set_affinity

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")


def masks(*steps: tuple[int, ...]) -> list[set[int]]:
    """The mask after each step in a thread of its own, and at last that of a thread it starts."""
    seen: list[set[int]] = []

    def look() -> None:
        seen.append(os.sched_getaffinity(0))

    def work() -> None:
        for cpus in steps:
            set_affinity(cpus)
            look()
        child = threading.Thread(target=look)
        child.start()
        child.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return seen


def test_a_thread_keeps_to_its_cpus_and_can_be_moved_again() -> None:
    every = os.sched_getaffinity(0)
    first, last = min(every), max(every)
    assert masks((first,), (last,)) == [{first}, {last}, {last}]
    assert os.sched_getaffinity(0) == every


def test_nothing_given_or_nothing_left_changes_nothing() -> None:
    every = os.sched_getaffinity(0)
    assert masks((), (4095,)) == [every, every, every]
