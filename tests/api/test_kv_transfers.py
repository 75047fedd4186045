"""Two servers, one of which computes prompts and the other answers them, as routers ask them (KVT-03, KVT-04)."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.front.server.http.auth import tenant_of
from headrace.launch import kv_push
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


def num_waiting(served: Served) -> int:
    """Requests that wait in a server."""
    held = served.get("/v1/requests", Authorization="Bearer mine").json()["engines"][0]
    return int(held["waiting"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def test_kv_is_pushed_where_no_folder_is_shared(tmp_path: Path) -> None:
    """KVT-06: over TCP, with the router and without; a server that is killed costs a recomputation (REG-077)."""
    key = tmp_path / "key"
    key.write_text("a secret of the two servers, long enough")
    key.chmod(0o600)
    port, folders = free_port(), [tmp_path / name for name in ("prefill", "decode")]
    for folder in folders:
        folder.mkdir(mode=0o700)
    common = ("--device", "cpu", "--api-keys", "mine", "--kv-transfer-key-file", str(key))
    peer = f"127.0.0.1:{port}"
    computing = (*common, "--kv-transfer-path", str(folders[0]), "--kv-transfer-peers", peer)
    answering = (*common, "--kv-transfer-path", str(folders[1]), "--kv-transfer-listen", peer)
    with serving(None, *answering) as decode:
        with serving(None, *computing) as prefill:
            push = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": port}
            sent = {"prompt": TEXT}
            first = ask(prefill, "/v1/completions", **sent, max_tokens=1, kv_transfer_params=push)
            answer = ask(
                decode, "/v1/completions", **sent, kv_transfer_params=first["kv_transfer_params"]
            )
            assert cached(answer) >= 48 and said(answer) == said(
                ask(prefill, "/v1/completions", **sent)
            )
            body = {"max_tokens": 1, "kv_transfer_params": push | {"remote_host": "elsewhere"}}
            refused = prefill.post("/v1/completions", sent | body, Authorization="Bearer mine")
            assert refused.status_code == 400 and "no peer" in refused.json()["error"]["message"]
            with routing(prefill.url, f"{decode.url}={peer}") as url:
                body = {"messages": TALK, "temperature": 0, "max_tokens": 24}
                headers = {"Authorization": "Bearer mine"}
                answer = httpx.post(
                    f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
                ).json()
                assert cached(answer) >= 48
            assert [list(folder.iterdir()) for folder in folders] == [[], []]
            # announced, and killed before it is computed
            prompt = [(7 * i) % 3000 + 5 for i in range(300)]
            late = {"do_remote_prefill": True, "transfer_id": "transfer-1"}
            with ThreadPoolExecutor(2) as pool:
                ask_late = partial(
                    ask, decode, "/v1/completions", prompt=prompt, kv_transfer_params=late
                )
                waiting = pool.submit(ask_late)
                with kv_push._connected(peer) as dying:
                    tenant = tenant_of(hashlib.sha256(b"mine").hexdigest())
                    name = blake2b(f"{tenant}\0transfer-1".encode(), digest_size=20).hexdigest()
                    announcement = kv_push.Announcement(name=f"{name}.hrkv", files=1)
                    kv_push._announce(dying, announcement, key.read_bytes())
                    while not num_waiting(decode):
                        dying.sendall(b".")
                        time.sleep(0.01)
                answer = waiting.result(timeout=240)
            assert cached(answer) == 0 and "the KV of a prompt did not come" in "".join(
                decode.lines
            )
        assert said(answer) == said(ask(decode, "/v1/completions", prompt=prompt))
        assert list(folders[1].iterdir()) == [] and num_waiting(decode) == 0


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
