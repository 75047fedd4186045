"""Two servers, one of which computes prompts and the other answers them, as routers ask them (KVT-03, KVT-04)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import Served, serving

pytestmark = [pytest.mark.serial, pytest.mark.slow]
TALK = [
    {"role": "system", "content": "You answer in one short sentence, and you never forget. " * 4},
    {"role": "user", "content": "Tell a story about a fox and a bridge."},
]
TEXT = "The quick brown fox jumps over the lazy dog. " * 6


def ask(served: Served, path: str, key: str = "mine", **fields: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 24, **fields}
    answer = served.post(path, body, Authorization=f"Bearer {key}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(document: dict[str, Any]) -> int:
    return document["usage"]["prompt_tokens_details"]["cached_tokens"]


def said(document: dict[str, Any]) -> Any:
    (choice,) = document["choices"]
    return choice.get("message") or choice.get("text") or choice["token_ids"]


@contextlib.contextmanager
def routing(prefill: str, decode: str) -> Iterator[str]:
    """The address of `headrace route`."""
    words = ["route", "--prefill", prefill, "--decode", decode, "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "headrace", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield line.removeprefix("headrace routes: ").strip()
        finally:
            process.terminate()


def test_a_router_has_one_compute_and_another_answer(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--kv-transfer-path", str(tmp_path), "--api-keys", "mine,yours")
    with serving(None, *options) as prefill, serving(None, *options) as decode:
        ids = decode.post("/tokenize", {"prompt": TEXT}, Authorization="Bearer mine").json()[
            "tokens"
        ]
        for path, sent in (
            ("/v1/chat/completions", {"messages": TALK}),
            ("/v1/completions", {"prompt": TEXT}),
            ("/inference/v1/generate", {"token_ids": ids[::-1]}),
        ):
            if path.startswith("/inference"):
                sent = {**sent, "sampling_params": {"temperature": 0, "max_tokens": 24}}
            first = ask(
                prefill,
                path,
                **{**sent, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
            )
            told = first["kv_transfer_params"]
            assert told["do_remote_prefill"] is True and told["remote_request_id"] == first["id"]
            stranger = ask(decode, path, "yours", **sent, kv_transfer_params=told)
            assert cached(stranger) == 0
            answer = ask(decode, path, **sent, kv_transfer_params=told)
            assert cached(answer) >= 48 and answer["kv_transfer_params"] is None
            assert said(answer) == said(ask(prefill, path, **sent)) == said(stranger)
        assert list(tmp_path.iterdir()) == []
        with routing(prefill.url, decode.url) as url:
            headers, body = (
                {"Authorization": "Bearer mine"},
                {"messages": TALK, "temperature": 0, "seed": 7},
            )
            body = {**body, "messages": [*TALK, {"role": "user", "content": "Another one."}]}
            whole = httpx.post(
                f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
            ).json()
            assert cached(whole) >= 48 and said(whole) == said(
                ask(prefill, "/v1/chat/completions", **body)
            )
            sent = {**body, "stream": True}
            streamed = httpx.post(
                f"{url}/v1/chat/completions", json=sent, headers=headers, timeout=60
            )
            assert streamed.text.rstrip().endswith("data: [DONE]")
            assert httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
        body = {"messages": TALK, "kv_transfer_params": {"do_remote_decode": True}, "stream": True}
        refused = prefill.post("/v1/chat/completions", body, Authorization="Bearer mine")
        assert refused.status_code == 400 and "streamed" in refused.json()["error"]["message"]
        for server in (prefill, decode):
            held = server.get("/v1/requests", Authorization="Bearer mine").json()["engines"][0]
            assert (held["held_blocks"], held["refcount_sum"]) == (0, 0)
