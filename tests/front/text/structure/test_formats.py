"""The formats of times are what readers of times take (API-24): calendars, bounds and digits."""

from __future__ import annotations

import json
import re
from datetime import date, datetime, time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.front.text.structure.formats import PATTERNS
from headrace.front.text.structure.regex import portable
from headrace.front.text.structure.schema import checked_schema

READERS = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
}
ALLOWED = {
    "date": ["0001-01-01", "9999-12-31", "2000-02-29", "2024-02-29", "0400-02-29", "2023-04-30"],
    "time": ["00:00:00Z", "23:59:59.123456789Z", "12:30:00+23:59", "01:02:03.4-00:30"],
    "date-time": ["2024-02-29T23:59:59Z", "0001-01-01T00:00:00.1+01:00"],
    "duration": ["P1W", "P1Y2M3D", "PT1H", "P3DT4H5M6S", "P1M", "PT36H", "PT0S", "P999999D"],
}
REFUSED = {
    "date": ["0000-01-01", "2023-02-29", "1900-02-29", "2023-02-31", "2023-13-01", "2023-04-31",
             "12023-01-01", "2023-1-1", "2023-01-00"],
    "time": ["24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00", "12:00Z", "12:00:00.Z",
             "12:00:00.1234567890Z", "12:00:00+24:00"],
    "date-time": ["0000-01-01T00:00:00Z", "2024-01-01 00:00:00Z", "2024-01-01", "2023-02-29T00:00:00Z"],
    "duration": ["P", "PT", "P1", "P1S", "PT1D", "P1YT", "P1Y3D", "PT1H2S", "P1W1D", "P1234567D"],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_what_exists_is_allowed_and_nothing_else(name: str) -> None:
    assert [text for text in ALLOWED[name] if not re.search(PATTERNS[name], text)] == []
    assert [text for text in REFUSED[name] if re.search(PATTERNS[name], text)] == []


@pytest.mark.parametrize("name", sorted(READERS))
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_python_reads_whatever_the_pattern_allows(name: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(PATTERNS[name], fullmatch=True)).rstrip("\n")
    READERS[name](text)


@given(st.dates())
def test_every_day_is_allowed(day: date) -> None:
    assert re.search(PATTERNS["date"], day.isoformat())


def test_a_format_becomes_its_pattern_unless_the_schema_has_its_own() -> None:
    asked = {"type": "string", "format": "date"}
    assert json.loads(checked_schema(asked, field="f")) == {
        "type": "string",
        "pattern": portable(PATTERNS["date"]),
    }
    both = {**asked, "pattern": "^2"}
    assert json.loads(checked_schema(both, field="f")) == both
