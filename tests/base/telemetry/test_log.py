from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

from headrace.base.telemetry.log import LineFormatter, escape


@given(st.text())
def test_an_escaped_text_is_one_printable_line(text: str) -> None:
    line = escape(text, limit=100)
    assert not any((ord(c) < 32 and c != "\t") or 127 <= ord(c) < 160 for c in line)
    assert len(line) <= 4 * 103


def test_a_message_cannot_forge_a_line() -> None:
    record = logging.LogRecord(
        "x", logging.INFO, "f", 1, "id %s", ("a\r\nERROR forged\x1b[31m",), None
    )
    line = LineFormatter("api").format(record)
    assert "\n" not in line and "\r" not in line and "\x1b" not in line
    assert "ERROR forged" in line
