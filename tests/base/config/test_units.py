"""Sizes as people write them (ENG-12)."""

from __future__ import annotations

import pytest

from headrace.base.config.units import parse_bytes, parse_count, show_bytes
from headrace.base.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", 0),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("1.5 GiB", 3 << 29),
        ("4GB", 4 * 10**9),
        ("2m", 2 * 10**6),
    ],
)
def test_bytes(text: str, wanted: int) -> None:
    assert parse_bytes(text, field="f") == wanted


@pytest.mark.parametrize(
    ("text", "wanted"), [("4096", 4096), ("32K", 32768), ("25.6k", 25600), ("1M", 1 << 20)]
)
def test_counts(text: str, wanted: int) -> None:
    assert parse_count(text, field="f") == wanted


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1e3", "4GiB"])
def test_what_is_no_count_is_refused_with_the_field(text: str) -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        parse_count(text, field="--tokens")


def test_sizes_are_shown_for_people() -> None:
    assert [show_bytes(n) for n in (5, 1536, 3 << 30)] == ["5 B", "1.5 KiB", "3.0 GiB"]
