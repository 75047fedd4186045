"""Stops by a signal."""

from __future__ import annotations

import os
import signal
import subprocess

from headrace.base.process_stop import CHECK_S, StopDetector, stop_of


def test_two_short_stops_are_not_one_long_one() -> None:
    """A look at each would kill a child that ran in between."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    stops = []
    for _ in range(2):
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x" and stop_of(process.pid) is None
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stops.append((stop_of(process.pid), stop_of(process.pid)))
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
    process.communicate(timeout=300)
    (first, again), (second, _) = stops
    assert first is not None and first == again and second is not None and second != first
    assert stop_of(process.pid) is None


def test_only_a_second_look_at_one_stop_counts() -> None:
    process = subprocess.Popen(["sleep", "600"])
    detector = StopDetector(process.pid)
    assert not detector.is_stopped(1.0)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert not detector.is_stopped(100.0), "a first look proves nothing"
    assert not detector.is_stopped(100.0 + CHECK_S / 2)
    assert detector.is_stopped(100.0 + CHECK_S)
    process.kill()
    process.wait()
    assert not detector.is_stopped(200.0)
