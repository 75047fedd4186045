"""Which tests one worker gets."""

from __future__ import annotations

from tests.scopes import FolderScheduling


def test_files_stay_whole_and_some_folders_too() -> None:
    scope_of = object.__new__(FolderScheduling)._split_scope
    assert scope_of("tests/core/test_core.py::test_a[x]") == "tests/core/test_core.py"
    assert scope_of("tests/core/kv/test_pool.py::test_a") == "tests/core/kv/test_pool.py"
    assert scope_of("tests/api/test_auth.py::test_a") == scope_of(
        "tests/api/test_limits.py::test_b"
    )
    assert scope_of("tests/api/test_auth.py::test_a") != scope_of(
        "tests/tokens/test_grpc.py::test_b"
    )
