from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.front.text.structure.regex import portable


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (r"\d{3}", "[0-9]{3}"),
        (r"[\d.]+\w", "[0-9.]+[A-Za-z0-9_]"),
        (r"a\\d", r"a\\d"),
        (r"\D\[\d\]", r"\D\[[0-9]\]"),
        (r"[^\s\]]", r"[^ \t\n\r\f\v\]]"),
        ("a\\", "a\\"),
        ("x(?:a[0-9]+)?y", "x(?:a[0-9]+|)y"),
        ("((a)?b)??", "((a|)b|)"),
        (r"\)?[)?]", r"\)?[)?]"),
        ("", ""),
    ],
)
def test_classes_and_optional_groups_are_spelled_out(given: str, made: str) -> None:
    assert portable(given) == made


@given(
    parts=st.lists(
        st.sampled_from([r"\d", r"\w", r"\s", r"[\d_]", r"[^\d]", r"\\", "a", r"\.", r"(?:a\d+)?"])
    ),
    text=st.text(alphabet="a1_\\. \t٣é", max_size=8),
)
def test_it_allows_what_the_ascii_reading_allows(parts: list[str], text: str) -> None:
    pattern = "".join(parts)
    wanted = re.fullmatch(pattern, text, re.ASCII)
    assert bool(re.fullmatch(portable(pattern), text)) == bool(wanted)
