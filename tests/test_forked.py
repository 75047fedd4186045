"""Tests run in forked processes: what those share, and what the death of one costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """
import pytest
from tests.forked import Forked

@pytest.fixture(scope="session", autouse=True)
def session_fixture():
    yield
    open("torn_down", "a").write("x")
def pytest_configure(config):
    config.pluginmanager.register(Forked(config, 2))
"""
TESTS = """
import os, signal
import pytest

open("imported", "a").write("x")

def test_passes(tmp_path):
    print("unseen")
    assert tmp_path.parent.name.startswith("fork")

def test_fails():
    print("seen")
    assert 1 == 2

def test_dies():
    if {dies}:
        os.kill(os.getpid(), signal.SIGKILL)

def test_runs_behind():
    pass

def test_is_skipped():
    pytest.skip("why")
"""


def test_forked_workers_share_what_is_collected_and_replace_each_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text(TESTS.replace("{dies}", str(number == 1)))
    run = _pytest(tmp_path)
    assert run.returncode == 1
    assert "4 failed, 8 passed, 3 skipped" in run.stdout, run.stdout
    assert "test_1.py::test_dies" in run.stdout and "ended with status -9" in run.stdout
    assert "seen" in run.stdout and "unseen" not in run.stdout
    assert (tmp_path / "imported").read_text() == "xxx"
    assert (tmp_path / "torn_down").read_text() == "xx"


def test_with_the_first_failure_all_workers_end(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_0.py").write_text("def test_fails():\n    assert False\n")
    run = _pytest(tmp_path, "-x")
    assert run.returncode == 1 and "stopping after 1 failures" in run.stdout, run.stdout


def _pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With few plugins, which starts sooner."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
