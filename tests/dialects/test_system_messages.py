"""System messages are text only, in every dialect (API-15, REG-104)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.serving import Served
from tests.dialects.conftest import KEY

PICTURE = "data:image/png;base64,iVBORw0KGgo="
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": PICTURE}}
USER = {"role": "user", "content": "Hi"}


def chat(role: str, part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    messages = [{"role": role, "content": [{"type": "text", "text": "Be brief."}, part]}, USER]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 4}


def responses(role: str, part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    given = {"role": role, "content": [{"type": "input_text", "text": "Be brief."}, part]}
    return "/v1/responses", {"input": [given, USER], "max_output_tokens": 4}


def messages(part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    system = [{"type": "text", "text": "Be brief."}, part]
    return "/v1/messages", {"system": system, "messages": [USER], "max_tokens": 4}


CLAUDE_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aQ=="}}  # fmt: skip
IMAGES = [
    *(chat(role, CHAT_IMAGE) for role in ("system", "developer")),
    *(responses(r, {"type": "input_image", "image_url": PICTURE}) for r in ("system", "developer")),
    messages(CLAUDE_IMAGE),
]
TEXTS = [
    *(chat(role, {"type": "text", "text": "Be kind."}) for role in ("system", "developer")),
    *(responses(r, {"type": "input_text", "text": "Be kind."}) for r in ("system", "developer")),
    messages({"type": "text", "text": "Be kind."}),
]


def post(bundled: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(bundled.url + path, json=body, headers={"x-api-key": KEY}, timeout=300)


@pytest.mark.parametrize(("path", "body"), IMAGES)
def test_an_image_in_one_is_refused(bundled: Served, path: str, body: dict[str, Any]) -> None:
    answer = post(bundled, path, body)
    assert answer.status_code == 400
    assert "image" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), TEXTS)
def test_several_texts_in_one_are_taken(bundled: Served, path: str, body: dict[str, Any]) -> None:
    answer = post(bundled, path, body)
    assert answer.status_code == 200, answer.text
