"""Hostile requests to every route of the dialects: 4xx or an answer, never a failure of ours (P7, P8, P19).

The fields come from the OpenAPI document; every field is given every bad value. Blocks, items and tools, whose inside
the document does not describe, are drawn at random. A stranger is sent away before any of it is looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.front.server.auth import PUBLIC
from headrace.front.server.table import table
from tests.api.serving import NO_TLS, Served, serving

KEY = "fuzz-key"
SAID = [{"role": "user", "content": "fox"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": SAID, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/v1/responses": {"input": "fox", "max_output_tokens": 1, "store": False},
    "/v1/responses/input_tokens": {"input": "fox"},
    "/v1/responses/compact": {"input": "fox"},
}
BAD: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -1.5, 1e308, "", "x"),
    *("\ud7ff\x00\u202e", "a" * 70_000, [], [None], [[]], ["x"] * 2000, {}, {"type": None}),
    *({"type": "x"}, {"": {}}, [{"type": "function"}], [{"type": 5}], {"a": [{"b": None}]}),
]
LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|/work/|/usr/|site-packages")


@pytest.fixture(scope="module")
def guarded(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cache = str(tmp_path_factory.mktemp("fuzz"))
    with serving(
        model, "--api-keys", KEY, "--max-model-len", "384", HEADRACE_CACHE_DIR=cache
    ) as served:
        yield served
        assert len(served.cores) == 1 and len(served.api_processes) == 1
        assert not any("Traceback" in line for line in served.lines), served.lines[-50:]
        assert served.stop() == 0


@pytest.fixture(scope="module")
def http(guarded: Served) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=30, verify=NO_TLS) as client:
        yield client


def send(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    data = json.dumps(body).encode()
    answer = http.post(path, content=data, headers={"content-type": "application/json"})
    assert answer.status_code < 500, (path, data[:500], answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"] and error["type"], answer.text
        assert len(error["message"]) < 1100 and not LEAK.search(error["message"]), answer.text
        assert ("request_id" in answer.json()) == path.startswith("/v1/messages")
    return answer


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_with_every_bad_value(http: httpx.Client, path: str) -> None:
    document = http.get("/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = [
        *document["components"]["schemas"][name]["properties"],
        "metadata",
        "top_k",
        "conversation",
    ]
    assert len(fields) > 8
    statuses = {
        send(http, path, {**ROUTES[path], field: value}).status_code
        for field in fields
        for value in BAD
    }
    assert statuses <= {200, 400, 404} and {200, 400} <= statuses
    for body in BAD:
        send(http, path, body)


WORDS = st.sampled_from(["x", "", "fox", "user", "assistant", "auto", "function", "<|im_start|>"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), WORDS)
KINDS = st.sampled_from(
    [
        *("text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result"),
        *("search_result", "tool_reference", "server_tool_use", "message", "reasoning"),
        *("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
        *("item_reference", "compaction", "web_search_call", "input_text", "output_text"),
        *("function", "custom", "namespace", "web_search", "bash_20250124", "input_image"),
        *("base64", "content", "enabled", "json_schema", "allowed_tools", "tool", "any"),
    ]
)
KEYS = st.sampled_from(
    [
        *("text", "content", "source", "data", "thinking", "signature", "id", "name", "input"),
        *("tool_use_id", "is_error", "call_id", "arguments", "output", "summary", "role", "title"),
        *("encrypted_content", "namespace", "tools", "parameters", "input_schema", "format"),
        *("schema", "budget_tokens", "display", "effort", "strict", "mode", "status", "refusal"),
    ]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(
            lambda kind, rest: {**rest, "type": kind},
            KINDS,
            st.dictionaries(KEYS, inner, max_size=4),
        ),
    ),
    max_leaves=12,
)
TOP = {
    "/v1/messages": (
        *("messages", "system", "tools", "tool_choice", "thinking", "output_config", "metadata"),
    ),
    "/v1/responses": (
        *("input", "tools", "tool_choice", "text", "reasoning", "instructions", "include"),
    ),
}


@pytest.mark.parametrize("path", TOP)
@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_what_is_inside_the_fields_at_random(
    http: httpx.Client, path: str, data: st.DataObject
) -> None:
    field = data.draw(st.sampled_from(TOP[path]))
    value = data.draw(st.one_of(VALUES, st.lists(VALUES, min_size=1, max_size=3)))
    if field == "messages" and data.draw(st.booleans()):
        role = data.draw(st.sampled_from(["user", "assistant", "system"]))
        value = [{"role": role, "content": value if isinstance(value, list) else [value]}]
    send(http, path, {**ROUTES[path], field: value})


@pytest.mark.parametrize(
    "path",
    ["/v1/responses/x", "/v1/responses/x/input_items", "/v1/responses/%00", "/v1/responses/" + "y" * 3000],
)  # fmt: skip
def test_ids_and_queries_that_lead_nowhere(http: httpx.Client, path: str) -> None:
    for query in ("", "?stream=true", "?stream=true&starting_after=-1", "?limit=x&order=y&after=z"):
        for method in ("GET", "DELETE", "POST", "PUT", "PATCH"):
            answer = http.request(method, path + query)
            assert answer.status_code in (400, 404, 405, 415), (method, path, answer.text)


def test_queries_of_a_stored_response_are_checked(http: httpx.Client) -> None:
    made = send(http, "/v1/responses", {"input": "fox", "max_output_tokens": 1, "background": True})
    path = f"/v1/responses/{made.json()['id']}"
    for query in ("?stream=true&starting_after=x", "?stream=true&starting_after=-1"):
        assert http.get(path + query).status_code == 400
    for query in ("?limit=0", "?limit=101", "?limit=x", "?order=up", "?after=nobody"):
        assert http.get(path + "/input_items" + query).status_code == 400


def test_without_a_key_no_route_says_anything_but_401(guarded: Served) -> None:
    """All routes of the table, and 20 ways to spell each of them."""
    ways = [
        *("/{p}", "//{p}", "/{p}/", "/{p}.", "/.{p}", "/%2f{p}", "/;/{p}"),
        *("/%2e/{p}", "/{p}%20", "/{p};x=1", "/{p},x", "/{P}", "/{p}?/health", "/{p}%2f"),
        *("/health/%2e%2e/{p}", "/health,/{p}", "/{p}?beta=true", "/{p}/health", "/health;/{p}"),
    ]
    with httpx.Client(base_url=guarded.url, timeout=10, verify=NO_TLS) as stranger:
        for route in table():
            path = route.path.replace("{id:path}", "x").replace("{id}", "x").removeprefix("/")
            if "/" + path in PUBLIC or path == "metrics":
                continue
            for way in ways:
                target = httpx.URL(guarded.url).copy_with(
                    raw_path=way.format(p=path, P=path.upper()).encode()
                )
                for method in route.described:
                    status = stranger.request(method, target).status_code
                    assert status == 401, (method, target, status)
