"""The robustness runs in short, on the bundled model: hostile requests beside bystanders, and a soak with aborts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> dict[str, Any]:
    """The report of a run of a script of benchmarks/robustness."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "robustness" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_hostile_requests_do_no_harm_to_bystanders_or_the_server() -> None:
    report = run("fuzz.py", "--cases", "600", "--seed", "7")
    assert report["problems"] == [] and report["restarts"] == 0
    assert report["bystander_streams"] >= 8 and report["bystander_mismatches"] == 0
    before, after, total = report["free_blocks"]
    assert before == after == total
    assert report["statuses"]["400"] > 300 and report["statuses"]["200"] > 30


def test_a_soak_with_aborts_leaves_nothing_behind() -> None:
    report = run("soak.py", "--requests", "80", "--seed", "7")
    start, end = report["start"], report["end"]
    assert (end["running"], end["waiting"], end["refcount_sum"]) == (0, 0, 0)
    assert end["free_blocks"] == start["free_blocks"] == end["total_blocks"]
    assert sum(report["outcomes"].values()) == 80
    assert {"200", "cut"} == set(report["outcomes"])
