"""A streamed chat passes through a bounded number of statements and files, and docs/ARCHITECTURE.md says how many."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.request_path import MAX_FILES, MAX_STATEMENTS, _statements, weight
from headrace.back.kernels.native.library import NativeLibrary, load

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 0.25  # a table that is off by more than this share (or 15) must be written anew


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, int]]:
    """Stage -> file -> statements on the path, from a real request. `make test` builds the kernels first."""
    if not isinstance(load(), NativeLibrary):
        pytest.skip("the native kernels are not built: PyTorch's operations are another path")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.request_path", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    stages = json.loads(done.stdout)
    return {stage: {file: n[0] for file, n in files.items()} for stage, files in stages.items()}


def test_a_request_passes_through_few_statements(measured: dict[str, dict[str, int]]) -> None:
    total = sum(sum(files.values()) for files in measured.values())
    assert 1000 < total <= MAX_STATEMENTS, measured


def test_a_request_passes_through_few_files(measured: dict[str, dict[str, int]]) -> None:
    total = sum(len(files) for files in measured.values())
    assert 30 < total <= MAX_FILES, measured


def test_the_page_tells_the_statements_of_every_stage(measured: dict[str, dict[str, int]]) -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| \d+ ([^|]+) \|[^|]*\| (\d+) \|", page, re.M)
    on_page = {name: int(number) for name, number in rows}
    assert list(on_page) == list(measured)
    for stage, files in measured.items():
        statements = sum(files.values())
        assert abs(on_page[stage] - statements) <= max(15, TOLERANCE * statements), (
            f"{stage}: {on_page[stage]} on the page, {statements} measured: "
            "`python -m benchmarks.request_path --write`"
        )


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("a = 1", 1),
        ("a, b = 1, 2", 2),
        ("a, b = f()", 1),
        ("f(*(a, b, c))", 4),
        ("f(*rest)", 1),
        ("f(**{'a': 1, 'b': 2})", 3),
        ("if (a := f()): g()", 3),
        ("a and f()", 2),
        ("x = a and f()", 2),
        ("if a and f(): g()", 2),
        ("def f():\n    'what it does'\n    return 1", 2),
        ("try:\n    f()\nexcept E:\n    g(*(a, b))", 5),
    ],
)
def test_what_is_packed_into_a_statement_counts_by_its_parts(source: str, count: int) -> None:
    assert weight(_statements(ast.parse(source))) == count
