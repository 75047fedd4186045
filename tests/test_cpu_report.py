"""The report of a run counts what child processes take, living and ended."""

from __future__ import annotations

import subprocess
import sys

from tests.cpu_report import TreeClock, tree_cpu_s

_BURN = """
import sys, time
while time.process_time() < 0.2: pass
print("burnt", flush=True)
sys.stdin.read()
"""


def test_a_child_counts_while_it_lives_and_once_it_has_ended() -> None:
    before_s = tree_cpu_s()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _BURN], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None and child.stdout.readline()
        living_s = tree_cpu_s() - before_s
    ended_s = tree_cpu_s() - before_s
    assert 0.18 < living_s <= ended_s + 0.02


def test_what_a_child_took_is_counted_once_when_it_ends_between_two_looks() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _BURN], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None and child.stdout.readline()
        clock = TreeClock()
        living_s = clock.now_s()
    assert clock.now_s() - living_s < 0.15
