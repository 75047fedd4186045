"""The generated pages are what their tables say now; `make docs` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.docs import PAGES

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_in_the_repository_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `make docs`"
