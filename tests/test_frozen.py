"""A full collection of Python's garbage does not scan what all tests share."""

from __future__ import annotations

import gc


def test_what_was_imported_for_all_tests_is_scanned_no_more() -> None:
    assert gc.isenabled() and gc.get_freeze_count() > 10_000
