"""Every route, every kind of key, every way to spell a path: a table of status codes (security P3, API-23, BEY-59)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.clients import openai_client
from tests.api.serving import NO_TLS, Served, eventually, serving

KEY, OTHER, ADMIN = "good-key-1", "good-key-2", "admin-key"
PUBLIC = ["/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/api/hello"]
GUARDED = [
    *("/v1/models", "/v1/models/tiny", "/v1/requests", "/v1/requests/x", "/version", "/load"),
    *("/metrics", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
    *("/v2/chat", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/x"),
    *("/v1/responses/input_tokens", "/v1/responses/compact", "/v1/responses/x/cancel"),
    *("/v1/responses/x/input_items", "/docs", "/openapi.json", "/v2/anything"),
]
KNOWN = {path for path in GUARDED if path not in ("/docs", "/v2/anything")}
ADMIN_ROUTES = [
    *("/is_paused", "/pause", "/resume", "/reset_prefix_cache", "/sleep", "/wake_up"),
    *("/is_sleeping", "/reset_mm_cache", "/server_info", "/get_world_size", "/kv_event_sources"),
    *("/abort_requests", "/collective_rpc", "/is_scaling_elastic_ep"),
]
MUTATIONS = [
    *(
        "/{p}",
        "//{p}",
        "/./{p}",
        "/v1/../{p}",
        "/health/../{p}",
        "/health//{p}",
        "/{p}/",
        "/{p}/.",
        "/{p}.",
    ),
    *(
        "/%2e/{p}",
        "/%2e%2e/{p}",
        "/health%2f..%2f{p}",
        "/{p}%20",
        "/{p}%00",
        "/{p};x=1",
        "/{p},x",
        "/{P}",
    ),
    *(
        "/health?/{p}",
        "/{p}?/health",
        "/{p}#/health",
        "/health#/{p}",
        "\\{p}",
        "/ping/../{p}",
        "/{p}%2f",
    ),
    *(
        "/health/%2e%2e/{p}",
        "/{p}/../health",
        "http://x/{p}",
        "http://x/health/../{p}",
        "/HEALTH/../{p}",
    ),
    *(
        "/{p}?key=good-key-1",
        "/;/{p}",
        "/health;/{p}",
        "/health,/{p}",
        "/{p}/health",
        "/.{p}",
        "/%2f{p}",
    ),
]
HOSTS = ["localhost", "x/?", "localhost/health?", "127.0.0.1:80", "evil.example"]


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[Served]:
    keys = ("--api-keys", f"{KEY},{OTHER}", "--admin-key", ADMIN, "--no-public-metrics")
    with serving(model, *keys) as served:
        yield served
        assert served.stop() == 0


def ask(served: Served, target: str, *headers: str, method: str = "GET") -> int:
    """The status of a request whose target goes out byte for byte; 0 if the server just closed."""
    lines = [f"{method} {target} HTTP/1.1", "Connection: close", "Content-Length: 0", *headers]
    if not any(header.lower().startswith("host:") for header in headers):
        lines.append("Host: localhost")
    with socket.create_connection(("127.0.0.1", served.port), timeout=300) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return int(answer.split(b" ", 2)[1]) if answer else 0


def test_public_routes_need_no_key(guarded: Served) -> None:
    assert {path: ask(guarded, path) for path in PUBLIC} == dict.fromkeys(PUBLIC, 200)


@pytest.mark.parametrize("path", GUARDED)
def test_a_guarded_route_asks_for_a_key(guarded: Served, path: str) -> None:
    assert ask(guarded, path) == 401
    assert ask(guarded, path, "Authorization: Bearer wrong") == 401
    assert ask(guarded, path, "Authorization: Basic " + KEY) == 401
    assert ask(guarded, path, "x-api-key: " + KEY[:-1]) == 401
    wrong_plane = 403 if path in KNOWN else 404
    assert ask(guarded, path, "Authorization: Bearer " + ADMIN) == wrong_plane
    good = {ask(guarded, path, given) for given in spellings()}
    assert len(good) == 1 and good <= {200, 404, 405}


def spellings() -> list[str]:
    return [
        *(f"Authorization: Bearer {KEY}", f"authorization: bearer {OTHER}", f"x-api-key: {KEY}"),
        *(f"X-API-Key:  {OTHER} ", f"AUTHORIZATION: BEARER  {KEY}"),
    ]


@pytest.mark.parametrize("path", ADMIN_ROUTES)
def test_an_admin_route_opens_to_the_admin_key_alone(guarded: Served, path: str) -> None:
    assert ask(guarded, path) == 401
    assert ask(guarded, path, "x-api-key: wrong") == 401
    assert ask(guarded, path, "x-api-key: " + KEY) == 403
    assert ask(guarded, path, "x-api-key: " + ADMIN) in (200, 405)


@pytest.mark.parametrize(
    "path",
    [
        *("v1/models", "v1/chat/completions", "is_paused", "metrics"),
        *("v1/messages", "v1/responses", "v1/responses/x"),
    ],
)
def test_no_spelling_of_a_path_or_host_gets_past_without_a_key(guarded: Served, path: str) -> None:
    table = {
        (mutation, host): ask(guarded, mutation.format(p=path, P=path.upper()), f"Host: {host}")
        for mutation in MUTATIONS
        for host in (HOSTS if mutation == "/{p}" else HOSTS[:2])
    }
    harmless = {"/health?/{p}", "/health#/{p}"}  # these are /health, whatever follows
    wrong = {
        at: status
        for at, status in table.items()
        if status not in ((200,) if at[0] in harmless else (400, 401, 403, 404))
    }
    assert not wrong


def test_a_wrong_key_is_an_authentication_error_of_the_client(guarded: Served) -> None:
    with (
        openai_client(guarded.url, "wrong") as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key" and caught.value.type == "authentication_error"
    assert caught.value.request_id


def test_without_keys_only_local_names_are_served_and_admin_is_off(server: Served) -> None:
    assert ask(server, "/v1/models", "Host: rebound.example") == 403
    assert ask(server, "/v1/models", "Host: 127.evil.example") == 403
    assert ask(server, "/v1/models", "Host: localhost:8000") == 200
    assert ask(server, "/v1/models", "Host: [::1]:8000") == 200
    assert ask(server, "/is_paused") == 404


def test_keys_stay_out_of_the_processes_of_the_tree_and_the_log(guarded: Served) -> None:
    for child in guarded.children:
        words = " ".join(child.cmdline())
        assert KEY not in words and ADMIN not in words
    text = guarded.get("/metrics", **{"x-api-key": KEY}).text + "".join(guarded.lines)
    assert KEY not in text and ADMIN not in text


@pytest.mark.slow
def test_keys_of_a_file_come_and_go_while_the_server_runs(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    with serving(model, "--api-key-file", str(file)) as served:
        assert status(served, "one") == 200
        assert status(served, "two") == 401
        (tmp_path / "new").write_text("two\n")
        (tmp_path / "new").replace(file)
        eventually(lambda: status(served, "two") == 200, within_s=30.0)
        assert status(served, "one") == 401
        assert served.stop() == 0


def status(served: Served, key: str) -> int:
    return ask(served, "/v1/models", f"Authorization: Bearer {key}")


@pytest.mark.slow
def test_the_ledger_shows_no_digit_of_another_keys_digest(model: Path) -> None:
    """What waits is told by tenant: of others only how much (security P3)."""
    options = ("--api-keys", "one,two", "--max-running", "1")
    body = {"prompt": "x", "max_tokens": 1500, "stream": True}
    with serving(model, *options, step_s=0.05) as served, contextlib.ExitStack() as streams:
        client = streams.enter_context(
            httpx.Client(base_url=served.url, verify=NO_TLS, timeout=300)
        )
        for key in ("two", "two"):
            headers = {"x-api-key": key}
            streams.enter_context(
                client.stream("POST", "/v1/completions", json=body, headers=headers)
            )

        def ledger(key: str) -> dict[str, Any]:
            answer = client.get("/v1/requests", headers={"x-api-key": key})
            return answer.json()["engines"][0]

        eventually(lambda: ledger("one")["waiting"] == 1, within_s=30.0)
        theirs = hashlib.sha256(b"two").hexdigest()
        own, others = ledger("two")["waiting_by_tenant"], ledger("one")["waiting_by_tenant"]
        assert [theirs.startswith(name) for name in own] == [True]
        assert list(own.values()) == list(others.values()) == [1]
        assert not any(theirs[:size] in json.dumps(others) for size in (4, 8, 16, 32))
