"""The generated pages are what their tables say now; `make docs` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.docs import PAGES
from headrace.front.text.parsing.families_reasoning import REASONING_FAMILIES
from headrace.front.text.parsing.families_tools import TOOL_FAMILIES

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_in_the_repository_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `make docs`"


def test_the_readme_counts_the_formats_that_are_there() -> None:
    counts = (
        f"tool calls in {len(TOOL_FAMILIES)} formats and reasoning in {len(REASONING_FAMILIES)}"
    )
    assert counts in (DOCS.parent / "README.md").read_text()
