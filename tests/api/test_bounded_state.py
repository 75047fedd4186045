"""What clients leave behind is bounded: a soak with unique ids reaches a plateau (P21)."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.api.serving import NO_TLS, serving

KIB, MIB = 1 << 10, 1 << 20
NUM = 120
"""Requests per half; each leaves about 2 KiB in the store."""


@pytest.mark.slow
def test_unique_requests_leave_the_store_and_the_process_at_their_bounds(
    model: Path, tmp_path: Path
) -> None:
    """Responses, conversations, cache salts, users, request ids and template arguments, each a new one every time."""
    kept = tmp_path / "kept.sqlite3"
    options = ("--response-store", f"sqlite:{kept}", "--response-store-bytes", str(256 * KIB))
    with serving(model, *options) as served:
        (api,) = served.api_processes
        with httpx.Client(base_url=served.url, verify=NO_TLS, timeout=300) as client:

            def ask(number: int) -> str:
                said = f"{number} " + "x" * 500
                client.post("/v1/conversations", json={"metadata": {"n": str(number)}})
                chat = {
                    "messages": [{"role": "user", "content": f"{number}"}],
                    "max_tokens": 1,
                    "cache_salt": f"s{number}",
                    "user": f"u{number}",
                    "prompt_cache_key": f"k{number}",
                }
                ident = {"x-request-id": f"id-{number}"}
                assert client.post("/v1/chat/completions", json=chat, headers=ident).is_success
                asked = {"input": "Hi", "instructions": said, "max_output_tokens": 1}
                made = client.post("/v1/responses", json={**asked, "metadata": {"v": said[:400]}})
                assert made.is_success, made.text
                return str(made.json()["id"])

            sizes, grown = [], []
            first = ask(0)
            for half in range(2):
                last = [ask(half * NUM + number + 1) for number in range(NUM)][-1]
                sizes.append(sum(file.stat().st_size for file in tmp_path.glob("kept*")))
                grown.append(api.memory_info().rss)
            assert client.get(f"/v1/responses/{first}").status_code == 404, "the oldest went first"
            assert client.get(f"/v1/responses/{last}").is_success
            series = len(client.get("/metrics").text.splitlines())
        assert sizes[1] < sizes[0] + 256 * KIB and max(sizes) < 8 * MIB, sizes
        assert grown[1] - grown[0] < 12 * MIB, grown
        assert series < 1000
        assert served.at_rest() and served.stop() == 0
