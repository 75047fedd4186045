"""Workers collect for themselves and must find the same tests: names hold no clock, address or order of a set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def collected(hash_seed: str) -> list[str]:
    """The names of all tests as a process of its own finds them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:xdist", "tests"]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return [line for line in run.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_two_processes_find_the_same_tests_under_the_same_names() -> None:
    first, second = collected("1"), collected("2")
    assert len(first) > 4_000
    assert first == second
