"""What is written ahead is what pytest's own import looks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bytecode import write


def test_a_file_is_rewritten_once(tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    path.write_text("def test_one():\n    assert 1 + 1 == 2\n")
    assert write(path) and not write(path)
    (cached,) = (tmp_path / "__pycache__").iterdir()
    assert sys.implementation.cache_tag in cached.name and pytest.__version__ in cached.name
