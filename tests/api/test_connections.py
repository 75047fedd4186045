"""What connections may do before and between requests (security P22), against a real server."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.api.serving import Served, serving
from tests.api.test_limits import error_of, post, raw, status

KEY = "a-key-of-the-test"
PLACES = 12
HEAD = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
WITH_KEY = HEAD + b"Authorization: Bearer %s\r\n\r\n" % KEY.encode()
PROBE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAM = json.dumps(
    {"prompt": "fox", "max_tokens": 40, "ignore_eos": True, "stream": True}
).encode()


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[Served]:
    limits = ("--max-connections", str(PLACES), "--keepalive-timeout-s", "60")
    with serving(model, *limits, "--api-keys", KEY) as served:
        yield served
        assert served.stop() == 0


@pytest.fixture(scope="module")
def keyless(model: Path) -> Iterator[Served]:
    with serving(model) as served:
        yield served
        assert served.stop() == 0


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=300)


def asked(connection: socket.socket, request: bytes) -> int:
    """The status of a request on a connection that stays."""
    connection.sendall(request)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(65536)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return status(answer)


@pytest.mark.parametrize("first", [b"", b"\r\n", PROBE, HEAD + b"\r\n"])
def test_connections_without_a_key_leave_places_to_those_with_one(
    guarded: Served, first: bytes
) -> None:
    """Silent, after an empty line, after a probe, after a refusal: none of them holds a place that is wanted."""
    with ExitStack() as stack:
        for _ in range(2 * PLACES):
            idle = stack.enter_context(closing(connected(guarded)))
            if first.strip():
                assert asked(idle, first) in (200, 401)
            elif first:
                idle.sendall(first)
            with closing(connected(guarded)) as mine:
                assert asked(mine, WITH_KEY) == 200


def test_connections_with_a_key_keep_their_places(guarded: Served) -> None:
    with ExitStack() as stack:
        mine = []
        for _ in range(PLACES // 2):
            mine.append(stack.enter_context(closing(connected(guarded))))
            assert asked(mine[-1], WITH_KEY) == 200
        for _ in range(2 * PLACES):
            stack.enter_context(closing(connected(guarded)))
        assert all(asked(each, WITH_KEY) == 200 for each in mine)


def test_an_ended_stranger_is_told_why(guarded: Served) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(closing(connected(guarded))) for _ in range(PLACES)]
        # Which of them the server saw first is its own affair: a late loop takes them in turns.
        told, _, _ = select.select(strangers, (), (), 300)
        answer = told[0].recv(65536)
        assert status(answer) == 503 and b"retry-after: " in answer


def test_a_connection_beyond_the_limit_is_told_so(guarded: Served) -> None:
    """Where every place is held by a key, the newcomer is refused."""
    with ExitStack() as stack:
        mine = []
        for _ in range(PLACES + 1):
            newcomer = stack.enter_context(closing(connected(guarded)))
            if asked(newcomer, WITH_KEY) == 503:
                break
            mine.append(newcomer)
        assert len(mine) <= PLACES
        assert all(asked(each, WITH_KEY) == 200 for each in mine)


def test_a_refusal_is_never_written_into_another_answer(keyless: Served) -> None:
    """Two requests and one with oversized headers, sent at once: two whole answers, then 431."""
    stream = post("/v1/completions", STREAM).replace(b"Connection: close\r\n", b"")
    large = b"GET /version HTTP/1.1\r\nHost: localhost\r\nx: " + b"a" * 70000 + b"\r\n\r\n"
    for pipelined in (stream + large, stream + stream + large):
        answer = raw(keyless, pipelined)
        *whole, refused = answer.split(b"HTTP/1.1 ")[1:]
        assert [one[:3] for one in whole] == [b"200"] * pipelined.count(b"POST ")
        assert all(one.count(b"data: [DONE]") == 1 and one.endswith(b"0\r\n\r\n") for one in whole)
        assert refused.startswith(b"431 ")


def test_an_oversized_header_is_answered_whatever_follows_it(keyless: Served) -> None:
    head = b"GET /version HTTP/1.1\r\nHost: localhost\r\nx: "
    for _ in range(5):
        with closing(connected(keyless)) as connection:
            for part in (head, *[b"a" * 65536] * 64):
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while data := connection.recv(65536):
                answer += data
            assert status(answer) == 431


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /version\r\n\r\n",
        b"GET /version HTTP/0.9\r\n\r\n",
        b"GET /version HTTP/2.0\r\nHost: localhost\r\n\r\n",
    ],
)
def test_requests_without_a_host_and_other_versions_are_refused(
    keyless: Served, sent: bytes
) -> None:
    answer = raw(keyless, sent)
    assert status(answer) == 400 and answer.count(b"HTTP/1.1 4") == 1
    assert error_of(answer)["type"] == "invalid_request_error"


def test_http_1_0_needs_no_host(keyless: Served) -> None:
    assert status(raw(keyless, b"GET /version HTTP/1.0\r\n\r\n")) == 200


@pytest.mark.parametrize("end", [30, -1])
def test_a_request_that_ends_too_early_is_answered(keyless: Served, end: int) -> None:
    """The client closes its sending side in the middle of the headers, or of the body."""
    with closing(connected(keyless)) as connection:
        connection.sendall(post("/v1/completions", b'{"prompt": "fox"}')[:end])
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        assert status(answer) == 400 and "before" in error_of(answer)["message"]


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--x--\r\n'
)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("https://elsewhere.example", 403),
        ("null", 403),
    ],
)
def test_pages_of_other_sites_cannot_upload_without_keys(
    keyless: Served, origin: str, expected: int
) -> None:
    sent = post("/v1/files", FORM, f"Origin: {origin}").replace(
        b"application/json", b"multipart/form-data; boundary=x"
    )
    assert status(raw(keyless, sent)) == expected
