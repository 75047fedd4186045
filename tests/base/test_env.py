"""The environment has one reader and few variables."""

from __future__ import annotations

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
