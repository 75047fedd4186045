"""Waiting times without the time in which the machine was busy with something else."""

from __future__ import annotations

from tests.stopwatch import Stopwatch, stalled_s


def test_time_in_which_a_task_waited_for_a_processor_is_left_out() -> None:
    clock = {"wall": 100.0, "stalled": 7.0}
    watch = Stopwatch(lambda: clock["wall"], lambda: clock["stalled"])
    clock.update(wall=103.0, stalled=9.0)
    assert watch.wall_s == 3.0 and watch.undisturbed_s == 1.0
    clock.update(stalled=11.0)  # read after the wall
    assert watch.undisturbed_s == 0.0


def test_what_the_kernel_says_only_grows() -> None:
    first = stalled_s()
    assert 0 <= first <= stalled_s()
