"""Bodies of many clients at once against a real server: what they may take together (security P9, P21)."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from headrace.front.server.grpc import render
from tests.api.serving import NO_TLS, Served, eventually, serving

MIB = 1 << 20
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Authorization: Bearer {key}\r\nContent-Length: {size}\r\n\r\n"
)
GRPC = re.compile(r"headrace serves gRPC: (\S+)")
SMALL = {"prompt": "fox", "max_tokens": 1}
LARGE = {**SMALL, "user": "u", "x": " " * (300 * 1024)}


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    """Bodies of 1 MiB, two of them together, one of a key."""
    limits = ("--max-body-bytes", "1MiB", "--body-budget-bytes", "2MiB", "--api-keys", "a,b,c")
    limits += ("--grpc-port", "0")
    with serving(model, *limits) as server:
        yield server
        assert server.stop() == 0


@contextmanager
def unfinished(served: Served, key: str) -> Iterator[None]:
    """A body of 1 MiB of which almost nothing comes."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=300) as connection:
        connection.sendall(HEAD.format(key=key, size=MIB).encode() + b'{"prompt": "')
        yield


def asked(served: Served, key: str, document: object) -> httpx.Response:
    url = served.url + "/v1/completions"
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(url, json=document, headers=headers, timeout=300, verify=NO_TLS)


def is_refused(served: Served, key: str, status: int) -> bool:
    """Whether a large body of this key is refused by now."""
    answer = asked(served, key, LARGE)
    assert answer.status_code in (200, status), answer.text
    if answer.status_code == 200:
        return False
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"
    assert "bodies hold" in answer.json()["error"]["message"]
    return True


def test_large_bodies_are_bounded_together_and_small_ones_pass(served: Served) -> None:
    with ExitStack() as open_bodies:
        open_bodies.enter_context(unfinished(served, "a"))
        eventually(lambda: is_refused(served, "a", 429), within_s=30)
        assert asked(served, "a", SMALL).status_code == 200, "the first 64 KiB are free"
        assert asked(served, "b", LARGE).status_code == 200, "one key's bodies are not another's"
        open_bodies.enter_context(unfinished(served, "b"))
        eventually(lambda: is_refused(served, "c", 503), within_s=30)
        assert all(asked(served, key, SMALL).status_code == 200 for key in "abc")
    for key in "abc":
        eventually(lambda key=key: asked(served, key, LARGE).status_code == 200, within_s=30)


def test_a_stream_holds_no_room_while_it_runs(served: Served) -> None:
    long = {**LARGE, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with ExitStack() as streams:
        for _ in range(4):  # together more than a key's half
            client = streams.enter_context(httpx.Client(timeout=300, verify=NO_TLS))
            headers = {"Authorization": "Bearer a"}
            stream = client.stream(
                "POST", served.url + "/v1/completions", json=long, headers=headers
            )
            answer = streams.enter_context(stream)
            assert answer.status_code == 200
            next(answer.iter_lines())
        assert asked(served, "a", LARGE).status_code == 200


def test_a_body_that_is_compressed_is_counted_as_it_is_read(served: Served) -> None:
    body = gzip.compress(json.dumps(LARGE).encode())
    headers = {"Authorization": "Bearer a", "Content-Encoding": "gzip"}
    headers["Content-Type"] = "application/json"
    with unfinished(served, "a"):

        def refused() -> bool:
            answer = httpx.post(
                served.url + "/v1/completions",
                content=body,
                headers=headers,
                timeout=300,
                verify=NO_TLS,
            )
            assert answer.status_code in (200, 429)
            return answer.status_code == 429

        eventually(refused, within_s=30)


def tokenized(channel: grpc.Channel, key: str) -> grpc.StatusCode:
    """What becomes of a gRPC call with a message of 300 KiB."""
    path = f"/{render.SERVICE.full_name}/Tokenize"
    request, response = (
        kind("Tokenize") for kind in (render.SERVICE.request, render.SERVICE.response)
    )
    stub = channel.unary_unary(path, request.SerializeToString, response.FromString)
    metadata = [("authorization", f"Bearer {key}")]
    try:
        stub(request(prompt="fox " * (75 * 1024)), metadata=metadata, timeout=300)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def test_messages_of_grpc_count_among_the_bodies(served: Served) -> None:
    eventually(lambda: any(map(GRPC.search, served.lines)), within_s=30)
    address = next(found[1] for line in served.lines if (found := GRPC.search(line)))
    with grpc.insecure_channel(address) as channel:
        with unfinished(served, "a"):
            eventually(lambda: is_refused(served, "a", 429), within_s=30)
            assert tokenized(channel, "a") is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert tokenized(channel, "b") is grpc.StatusCode.OK
        eventually(lambda: tokenized(channel, "a") is grpc.StatusCode.OK, within_s=30)
