"""The environment has one reader and few variables."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from headrace.base import env
from headrace.base.errors import ConfigError


def test_at_most_twenty_variables_each_documented() -> None:
    assert len(env.VARIABLES) <= 20
    assert all(v.doc.strip() for v in env.VARIABLES)


def test_empty_means_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN", "")
    assert env.get("HEADRACE_ADMIN") is None


def test_unknown_names_are_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="NOT_THERE"):
        env.get("NOT_THERE")


def test_cache_folder_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", f"{tmp_path}/cache")
    assert env.cache_dir().stat().st_mode & 0o777 == 0o700


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", "/dev/null/cache")
    with pytest.raises(ConfigError, match="HEADRACE_CACHE_DIR=/dev/null/cache: cannot make"):
        env.cache_dir()


def test_files_of_the_working_directory_are_no_modules_of_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    interpreter, *options = env.python_command()
    assert subprocess.run([interpreter, *options, "-c", "import queue"]).returncode == 0
    assert subprocess.run([interpreter, "-c", "import queue"]).returncode == 9
    monkeypatch.chdir(Path(env.__file__).parents[2])  # where headrace is found by it
    assert env.python_command() == [interpreter]
