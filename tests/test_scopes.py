"""Which tests one worker gets."""

from __future__ import annotations

from tests.scopes import FEW, scopes_of

TESTS = [
    "tests/api/test_auth.py::test_a",
    "tests/core/test_core.py::test_a[x]",
    "tests/tokens/test_grpc.py::test_a",
    "tests/core/kv/test_pool.py::test_a",
    "tests/api/test_limits.py::test_a",
    "tests/core/test_core.py::test_b[tests/api/x]",
]


def test_files_stay_whole_and_some_folders_too() -> None:
    assert scopes_of(TESTS, FEW) == [[0, 4], [1, 5], [2], [3]]


def test_folders_are_spread_over_many_workers() -> None:
    assert scopes_of(TESTS, FEW + 1) == [[0], [1, 5], [2], [3], [4]]
