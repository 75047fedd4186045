"""Limits that hold while bytes arrive (security P8, P9, P19, P22), against a real server."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import zstandard

from tests.api.serving import Served, serving
from tests.stopwatch import Stopwatch

MIB = 1 << 20
BODY = {"prompt": "fox", "max_tokens": 1}


@pytest.fixture(scope="module")
def strict(model: Path) -> Iterator[Served]:
    limits = (
        *("--max-body-bytes", "1MiB", "--header-timeout-s", "5", "--body-timeout-s", "5"),
        *("--max-connections", "20", "--keepalive-timeout-s", "1", "--max-requests-per-key", "4"),
    )
    with serving(model, *limits) as served:
        yield served
        assert served.at_rest()
        assert served.stop() == 0


def raw(served: Served, *parts: bytes, wait_s: float = 60) -> bytes:
    """Sends the parts on one connection and returns everything that comes back until it closes."""
    answer = b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=wait_s) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(65536):
                answer += data
        except (ConnectionResetError, BrokenPipeError):
            pass
    return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return found


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [
        *(f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"),
        *(f"Content-Length: {len(body) if length is None else length}", "Connection: close"),
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)


def test_a_chunked_body_is_accepted(strict: Served) -> None:
    body = json.dumps(BODY).encode()
    answer = raw(strict, CHUNKED, chunk(body[:5]), chunk(body[5:]), chunk(b""))
    assert status(answer) == 200


def test_a_declared_length_over_the_limit_is_refused_before_the_body(strict: Served) -> None:
    answer = raw(strict, post("/v1/completions", b"", "Expect: 100-continue", length=MIB + 1))
    assert status(answer) == 413 and error_of(answer)["code"] == "request_too_large"


def test_a_body_of_exactly_the_limit_is_read(strict: Served) -> None:
    head = json.dumps({**BODY, "user": ""}).encode()[:-2]
    fill = b" " * (MIB - len(head) - 2)
    assert status(raw(strict, post("/v1/completions", head + b'"' + fill + b"}"))) == 200
    assert status(raw(strict, post("/v1/completions", head + b'"' + fill + b" }"))) == 413


def test_an_endless_chunked_body_is_refused_without_growing(strict: Served) -> None:
    (api,) = strict.api_processes
    before = api.memory_info().rss
    answer = raw(strict, CHUNKED, *([chunk(b" " * 65536)] * 400))
    assert not answer or status(answer) == 413
    assert api.memory_info().rss - before < 12 * MIB, "it came to 25"
    assert strict.get("/health").status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_compressed_bodies_are_read_and_bombs_are_refused(strict: Served, encoding: str) -> None:
    """PLT-20, REG-126."""
    squeeze = gzip.compress if encoding == "gzip" else zstandard.ZstdCompressor().compress
    header = f"Content-Encoding: {encoding}"
    small = squeeze(json.dumps(BODY).encode())
    assert status(raw(strict, post("/v1/completions", small, header))) == 200
    (api,) = strict.api_processes
    before = api.memory_info().rss
    bomb = squeeze(b" " * (200 * MIB))
    assert len(bomb) < MIB
    answer = raw(strict, post("/v1/completions", bomb, header))
    assert status(answer) == 413
    assert api.memory_info().rss - before < 16 * MIB
    assert status(raw(strict, post("/v1/completions", small[:-4], header))) == 400
    assert status(raw(strict, post("/v1/completions", b"x" + small, header))) == 400


def test_the_members_of_a_gzip_body_are_all_read(strict: Served) -> None:
    """RFC 1952, 2.2: what followed the first one was dropped without a word."""
    body = json.dumps(BODY).encode()
    header = "Content-Encoding: gzip"
    parts = gzip.compress(body[:20]) + gzip.compress(b"") + gzip.compress(body[20:])
    assert status(raw(strict, post("/v1/completions", parts, header))) == 200
    more = gzip.compress(body) + gzip.compress(b"x")
    assert status(raw(strict, post("/v1/completions", more, header))) == 400
    assert status(raw(strict, post("/v1/completions", gzip.compress(body) + b"x", header))) == 400
    many = gzip.compress(body) + gzip.compress(b"") * 64
    answer = raw(strict, post("/v1/completions", many, header))
    assert status(answer) == 400 and b"more than 64 members" in answer
    bomb = gzip.compress(b" " * (20 * MIB)) * 8
    assert status(raw(strict, post("/v1/completions", bomb, header))) == 413


def test_an_unknown_encoding_or_type_is_415(strict: Served) -> None:
    body = json.dumps(BODY).encode()
    assert status(raw(strict, post("/v1/completions", body, "Content-Encoding: br"))) == 415
    plain = post("/v1/completions", body).replace(b"application/json", b"text/plain")
    assert status(raw(strict, plain)) == 415


def test_headers_are_bounded_in_number_and_bytes(strict: Served) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    fits = b"".join(b"x-%d: 1\r\n" % i for i in range(62))
    assert status(raw(strict, head + fits + b"\r\n")) == 200
    assert status(raw(strict, head + fits + b"x: 1\r\n\r\n")) == 431
    assert status(raw(strict, head + b"x: " + b"a" * 60000 + b"\r\n\r\n")) == 200
    answer = raw(strict, head + b"x: " + b"a" * 66000 + b"\r\n\r\n")
    assert status(answer) == 431 and b"x-request-id: req-" in answer
    assert status(raw(strict, b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n")) == 400


def test_an_endless_header_does_not_grow_the_process(strict: Served) -> None:
    (api,) = strict.api_processes
    before = api.memory_info().rss
    answer = raw(strict, b"GET / HTTP/1.1\r\nx: ", *([b"a" * 65536] * 500))
    assert not answer or status(answer) == 431
    assert api.memory_info().rss - before < 12 * MIB, "it came to 31"


@pytest.mark.serial
def test_slow_headers_and_a_body_that_pauses_are_cut_off(strict: Served) -> None:
    """All beside each other: the limit is long enough for what the other tests send, however slow the machine is."""
    body = post("/v1/completions", b'{"prompt"', length=100)
    watch = Stopwatch()
    with ThreadPoolExecutor(3) as pool:
        sent = (b"", b"GET /health HTTP/1.1\r\nHost: loc", body)
        answers = list(pool.map(partial(raw, strict), sent))
    assert list(map(status, answers)) == [408] * 3
    assert "5 s" in error_of(answers[2])["message"]
    assert watch.undisturbed_s < 8


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Bad Header: x\r\n",
    ],
)
def test_ambiguous_framing_is_refused(strict: Served, head: bytes) -> None:
    start = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    smuggled = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = raw(strict, start + head + b"\r\n" + smuggled)
    assert status(answer) == 400 and answer.count(b"HTTP/1.1 ") == 1
    assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "JSON"),
        (b"\xef\xbb\xbf{}", "JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "a", "prompt": "b"}', "twice"),
        (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "twice"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "Infinity"),
        (
            b'{"prompt": "a", "temperature": 1e400}',
            "temperature: expected `float` <= 2.0; got a number above",
        ),
        (b'{"prompt": "a", "presence_penalty": -1e400}', "got a number below -1.8e308"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "x": ' + b"[" * 70 + b"]" * 70 + b"}", "64"),
        (b'{"prompt": "a", "x": ' + b"[" * 100000 + b"]" * 100000 + b"}", "64"),
        (b'{"prompt": "a", "n": ' + b"1" * 10000 + b"}", "digits"),
        (b'{"prompt": "a", "n": 99999999999999999999}', "n"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b'{"prompt": {}}', "prompt"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": [1, "a"]}', "prompt"),
        (b'{"prompt": [[1], []]}', "prompt"),
        (b'{"prompt": [-1]}', "prompt"),
        (b'{"prompt": null}', "prompt"),
        (b"{}", "required"),
    ],
)
def test_a_malformed_body_is_400_and_says_why(strict: Served, body: bytes, said: str) -> None:
    answer = raw(strict, post("/v1/completions", body))
    assert status(answer) == 400
    assert said in error_of(answer)["message"]


def test_errors_hold_no_paths_addresses_or_traces(strict: Served) -> None:
    bodies = [b"{", b"[" * 10000, b'{"prompt": 5}', b'{"prompt": "x", "stop": 5}']
    answers = [raw(strict, post("/v1/completions", body)) for body in bodies]
    answers += [raw(strict, b"GET /etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")]
    for answer in answers:
        text = answer.decode()
        assert not re.search(r"0x[0-9a-f]{6,}|Traceback|/work|/usr|site-packages|\.py", text)


def test_a_header_cannot_write_log_lines(strict: Served) -> None:
    bad = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\rERROR forged\r\nConnection: close\r\n\r\n"
    assert status(raw(strict, bad)) in (200, 400)
    assert not any(line.startswith("ERROR forged") for line in strict.lines)


def test_wrong_methods_and_routes_keep_the_error_shape(strict: Served) -> None:
    found = strict.get("/v1/completions")
    assert found.status_code == 405 and "POST" in found.json()["error"]["message"]
    lost = strict.get("/v1/nothing")
    assert lost.status_code == 404 and lost.json()["error"]["type"] == "not_found_error"


def test_a_key_has_its_share_of_requests_in_flight(model: Path) -> None:
    with serving(model, "--max-requests-per-key", "2", step_s=0.05) as served:
        with (
            served_stream(served, max_tokens=400) as first,
            served_stream(served, max_tokens=400) as second,
        ):
            assert first and second
            refused = served.post("/v1/completions", BODY)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-should-retry"] == "true"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def served_stream(served: Served, *, max_tokens: int) -> Any:
    """An open stream that has begun."""
    return _Stream(served, max_tokens)


class _Stream:
    def __init__(self, served: Served, max_tokens: int) -> None:
        body = json.dumps({"prompt": "fox", "max_tokens": max_tokens, "stream": True}).encode()
        self.connection = socket.create_connection(("127.0.0.1", served.port), timeout=300)
        self.connection.sendall(post("/v1/completions", body))

    def __enter__(self) -> bytes:
        return self.connection.recv(65536)

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def test_no_process_listens_beside_the_port_of_the_server(strict: Served) -> None:
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in [psutil.Process(strict.process.pid), *strict.children]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", strict.port)}
