from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.base.errors import Conflict, ContextTooLong, InvalidRequest, Unavailable
from headrace.front.server.anthropic.failures import SHAPE as ANTHROPIC
from headrace.front.server.http.auth import client_label
from headrace.front.server.http.error_names import ERROR_NAMES
from headrace.front.server.http.failures import clean, failure_of


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("at 0x7f1234567890 now", "at <address> now"),
        ("open /etc/passwd failed", "open <path> failed"),
        ("see /usr/lib/python3/x.py:3", "see <path>:3"),
        ("use /v1/completions", "use /v1/completions"),
        ("a/b and 3/4 stay", "a/b and 3/4 stay"),
        ("one\r\ntwo\x1b[31m", "one  two [31m"),
    ],
)
def test_messages_lose_what_is_internal(said: str, shown: str) -> None:
    assert clean(said) == shown


@pytest.mark.parametrize(
    ("ours", "openai"),
    [
        (
            "prompt is too long: 90 tokens > 63 maximum (the context is 64)",
            "This model's maximum context length is 64 tokens. However, your prompt has 90 tokens. "
            "Please shorten it.",
        ),
        (
            "input is too long: 90 tokens > 64 maximum (at least: it has 900 characters)",
            "This model's maximum context length is 64 tokens. However, your input has 90 tokens "
            "(at least: it has 900 characters). Please shorten it.",
        ),
        ("90 tokens need 6 KV blocks, 4 are available", None),
    ],
)
def test_a_prompt_that_is_too_long_is_told_in_the_words_of_each_dialect(
    ours: str, openai: str | None
) -> None:
    failure = failure_of(ContextTooLong(ours, field="messages"), request_id="r")
    error = json.loads(failure.body())["error"]
    assert (error["message"], error["param"]) == (openai or ours, "messages")
    assert error["code"] == "context_length_exceeded"
    body = json.loads(ANTHROPIC.body(failure, "r"))
    assert body["error"]["message"] == ours, "agents look for it"


def test_messages_are_capped() -> None:
    assert len(clean("x" * 10**6)) < 1100


def test_waiting_is_jittered_and_at_least_a_second() -> None:
    error = Unavailable("full", retry_after_s=8)
    waits = {
        int(dict(failure_of(error, request_id="r").headers())[b"retry-after"]) for _ in range(200)
    }
    assert min(waits) >= 8 and max(waits) <= 10 and len(waits) > 1


def test_the_sdks_are_told_whether_to_retry() -> None:
    for error, retry in (
        (InvalidRequest("x"), b"false"),
        (Conflict("x"), b"false"),
        (Unavailable("x"), b"true"),
    ):
        assert dict(failure_of(error, request_id="r").headers())[b"x-should-retry"] == retry


def test_the_body_has_the_four_fields_of_the_contract() -> None:
    body = json.loads(failure_of(InvalidRequest("bad", field="n"), request_id="r").body())
    assert body == {
        "error": {"message": "bad", "type": "invalid_request_error", "param": "n", "code": None}
    }


@pytest.mark.parametrize("bad", [b"", b"a" * 129, b"a b", b"a\r\nb", b"\xff", None])
def test_a_client_id_is_a_label_only_if_it_is_harmless(bad: bytes | None) -> None:
    assert client_label(bad) is None
    assert client_label(b"abc-1:2") == "abc-1:2"


def test_the_documentation_has_every_name_of_an_error() -> None:
    documented = (Path(__file__).parents[4] / "docs/SERVING.md").read_text()
    for row in ERROR_NAMES.values():
        code = f"`{row.code}`" if row.code else "null"
        assert f"| `{row.type}`, {code} | `{row.vllm_type}` |" in documented
