"""SageMaker's one route takes every kind of request (API-22)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.serving import Served

KINDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}, "object", "chat.completion"),
    ({"prompt": "Once", "max_tokens": 2}, "object", "text_completion"),
    ({"input": "Once"}, "object", "list"),
    ({"text_1": "Once", "text_2": "Twice"}, "object", "list"),
    ({"query": "Once", "documents": ["a", "b"]}, "model", "headrace-demo"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field", "value"), KINDS)
def test_the_fields_tell_what_is_asked(
    demo: Served, body: dict[str, Any], field: str, value: str
) -> None:
    answer = demo.post("/invocations", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()[field] == value


def test_a_stream_comes_and_the_rest_is_refused(demo: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
    assert demo.post("/invocations", body).text.endswith("data: [DONE]\n\n")
    for wrong in ({}, {"inputs": "x"}, {"messages": 3}):
        assert demo.post("/invocations", wrong).status_code == 400
