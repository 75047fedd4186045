"""Documents of many values: read in a process of their own first, and the same comes of them (security P9, P12)."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from headrace.base.errors import InvalidRequest, Unavailable
from headrace.front.server.http.body_checks import MANY_MARKS, BodyChecks
from headrace.front.text.structure.requested import MAX_FORM_BYTES

MANY = ["word"] * MANY_MARKS


@pytest.fixture(scope="module")
def checks() -> Iterator[BodyChecks]:
    made = BodyChecks(size=1, limit_s=5)
    yield made
    made.close()


def test_a_document_of_many_values_is_what_python_makes_of_it(checks: BodyChecks) -> None:
    document = {"input": MANY, "n": [1.5, None, True, {"é": '"'}]}
    assert checks.read(bytearray(json.dumps(document).encode())) == document


@pytest.mark.parametrize(
    "body, said",
    [
        (b'{"a": 1, "a": %s}' % json.dumps(MANY).encode(), "a key occurs twice"),
        (b"[" * 65 + b"1," * MANY_MARKS + b"1" + b"]" * 65, "deeper than 64"),
        (b"[%s 1]" % (b"[]," * 140_000), "objects and arrays"),
        (b'["\xff", %s 1]' % (b"1," * MANY_MARKS), "valid UTF-8"),
    ],
)
def test_what_is_wrong_with_it_is_said_as_of_any_body(
    checks: BodyChecks, body: bytes, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        checks.read(body)


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "text"])
def test_a_form_that_no_compiler_would_see_is_refused_there(checks: BodyChecks, field: str) -> None:
    """Hostile grammars of many MB: this process reads none of them."""
    values = ["v" * 16] * (MAX_FORM_BYTES // 16)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FORM_BYTES} bytes") as caught:
        checks.read(json.dumps({field: {"enum": values}}).encode())
    assert caught.value.field == field


def test_a_process_that_was_killed_costs_one_body(checks: BodyChecks) -> None:
    body = json.dumps(MANY).encode()
    with (
        pytest.raises(Unavailable, match="was killed"),
        checks._pool.borrowed(wait_s=0) as process,
    ):
        pid = process._child._process.pid
        os.kill(pid, signal.SIGSTOP)  # it answers nothing before it is killed
        threading.Timer(0.05, os.kill, (pid, signal.SIGKILL)).start()
        process.check(body)
    assert checks.read(body) == MANY


def test_long_texts_and_images_are_read_at_once() -> None:
    checks = BodyChecks()
    document = {"messages": [{"role": "user", "content": "é\n🙂 " * 500_000}]}
    assert checks.read(json.dumps(document, ensure_ascii=False).encode()) == document
    assert checks._pool.num_started == 0
