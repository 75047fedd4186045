"""200 requests beside each other, with tools, bad words and both dialects: no answer suffers from another (API-11)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.api.serving import NO_TLS, Served
from tests.dialects.conftest import KEY

NUM, AT_ONCE = 200, 50
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city"}},
        "required": ["city"],
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]


def body(number: int) -> dict[str, Any]:
    """Every request has bad words of its own, so that each of them is encoded while others are."""
    return {
        "messages": ASKED,
        "temperature": 0,
        "max_tokens": 60,
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": "required",
        "bad_words": [f"never{number}", "Berlin", "\u00fcber"],
    }


@pytest.mark.slow
def test_tool_calls_beside_each_other_are_all_answered(bundled: Served) -> None:
    limits = httpx.Limits(max_connections=AT_ONCE)
    headers = {"x-api-key": KEY}
    with httpx.Client(
        base_url=bundled.url, headers=headers, limits=limits, timeout=300, verify=NO_TLS
    ) as client:

        def one(number: int) -> tuple[int, Any]:
            found = client.post("/v1/chat/completions", json=body(number))
            choice = found.json()["choices"][0] if found.status_code == 200 else {}
            calls = choice.get("message", {}).get("tool_calls", [])
            return found.status_code, [call["function"]["arguments"] for call in calls]

        _, alone = one(0)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(one, range(NUM)))
    assert alone and '"Paris"' in alone[0]
    assert [each for each in found if each != (200, alone)] == []
