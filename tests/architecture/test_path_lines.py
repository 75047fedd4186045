"""The way of a request reads in under 3,000 lines, and docs/ARCHITECTURE.md says how many there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.path_lines import LIMIT

ROOT = Path(__file__).resolve().parents[2]
ROOM_TO_GROW = (
    0.25  # a table that is off by more than this share (or 15 lines) must be written anew
)


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    """Stop -> lines on the path, from a real request."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.path_lines", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    stops = json.loads(done.stdout)
    return {stop: sum(count[0] for count in files.values()) for stop, files in stops.items()}


def test_a_request_passes_through_fewer_than_3000_lines(measured: dict[str, int]) -> None:
    assert 1000 < sum(measured.values()) < LIMIT, measured


def test_the_page_tells_the_lines_of_every_stop(measured: dict[str, int]) -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    told = {
        name: int(n) for name, n in re.findall(r"^\| \d+ ([^|]+) \|[^|]*\| (\d+) \|", page, re.M)
    }
    assert list(told) == list(measured)
    for stop, lines in measured.items():
        off = abs(told[stop] - lines)
        assert off <= max(15, ROOM_TO_GROW * lines), (
            f"{stop}: {told[stop]} told, {lines} found: `python -m benchmarks.path_lines --write`"
        )
