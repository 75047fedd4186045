"""The error tree: HTTP status, retry advice, the way through a process border."""

from __future__ import annotations

import pytest

from headrace.base import errors
from headrace.base.errors import (
    EngineError,
    HeadraceError,
    InvalidRequest,
    OverloadError,
    Unavailable,
    from_wire,
    to_wire,
)


def every_error() -> list[type[HeadraceError]]:
    return [
        e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, HeadraceError)
    ]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_errors_survive_the_wire(kind: type[HeadraceError]) -> None:
    again = from_wire(to_wire(kind("text", field="n", retry_after_s=2.0)))
    assert type(again) is kind
    assert (again.message, again.field, again.retry_after_s) == ("text", "n", 2.0)


def test_the_callers_mistakes_are_never_5xx_and_never_retried() -> None:
    for kind in every_error():
        if issubclass(kind, InvalidRequest):
            assert kind.status == 400 and not kind.retryable
        if issubclass(kind, OverloadError):
            assert kind.status in (429, 503, 507) and kind.retryable


def test_a_foreign_exception_crosses_without_its_text() -> None:
    again = from_wire(to_wire(RuntimeError("secret /etc/path 0xdeadbeef")))
    assert type(again) is EngineError and "secret" not in again.message


def test_retry_after_is_kept() -> None:
    assert from_wire(to_wire(Unavailable("full", retry_after_s=3))).retry_after_s == 3
