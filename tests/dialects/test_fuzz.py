"""Hostile requests to every route: 4xx or an answer, never a failure of ours (P7, P8, P19).

Every row of the table of routes gets every field that its body may have with every bad value, and ids, queries, methods
and forms that lead nowhere (benchmarks/robustness/hostile.py, which the fuzz run beside bystanders draws from too).
Blocks, items and tools, whose inside the document does not describe, are drawn at random. A stranger is sent away
before any of it is looked at.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.robustness.hostile import (
    ANSWERED,
    Case,
    address_cases,
    field_cases,
    fields_of,
    plane_routes,
    posted,
    routes,
)
from headrace.front.server.administration.named import ADMIN as ADMINISTRATION
from headrace.front.server.openapi import ApiRoute
from headrace.front.server.table import PUBLIC
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, eventually, serving

KEY, ADMIN = "fuzz-key", "fuzz-admin-key"
ROUTES = routes()
WITH_BODY = [row for row, route in ROUTES.items() if route.bodies]
FIRST_WITH_ITS_FIELDS = {tuple(fields_of(ROUTES[row])): row for row in reversed(WITH_BODY)}.values()
"""Rows whose body no row before has. The others get an eighth of the bad values, each field other ones."""
REFUSED = {
    "/slots/{id}": 400,
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), 400),
    **dict.fromkeys(("/models/load", "/models/unload"), 409),
    **dict.fromkeys(("/api/copy", "/api/delete"), 404),
    "/infill": 400,
    **dict.fromkeys(("/start_weight_update", "/finish_weight_update"), 409),
    **dict.fromkeys(("/update_weights", "/get_weights_by_name", "/weights_checker"), 400),
    **dict.fromkeys(("/weight_checker", "/update_weights_from_disk"), 400),
    **dict.fromkeys(("/update_weights_from_tensor", "/update_weights_from_distributed"), 400),
    **dict.fromkeys(("/init_weights_update_group", "/destroy_weights_update_group"), 400),
}
"""What these servers refuse: no slot has such a number, they have no adapters (--enable-lora) and one model, nobody has
such a name, their vocabulary has no tokens for insertion, nothing is paused for new weights, and there is neither such
a file, tensor nor group."""
SIZES = ("--max-model-len", "384", "--max-queued-requests", "4096")
"""Two thousand documents of one request find room in the queue, however slow this machine is."""
SOME_OR_ALL = pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
PLANE = re.compile(r"administration: http://127\.0\.0\.1:(\d+)/")
HERE = re.escape(str(Path(__file__).resolve().parents[2]))
LEAK = re.compile(rf"0x[0-9a-f]{{6,}}|Traceback|{HERE}/|/usr/|site-packages")


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """One kept connection that sends what it is given, byte for byte: no client in between tidies paths or headers."""

    def __init__(self, port: int, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        self._headers = headers

    def send(self, case: Case) -> Answer:
        """The answer to one request."""
        headers = {**self._headers, **case.headers}
        try:
            return self._ask(case, headers)
        except (http.client.RemoteDisconnected, ConnectionError):  # an idle connection was closed
            self._connection.close()
            return self._ask(case, headers)

    def _ask(self, case: Case, headers: dict[str, str]) -> Answer:
        self._connection.request(case.method, case.path, case.body, headers)
        response = self._connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def guarded(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fuzz")
    options = ("--api-keys", KEY, "--admin-key", ADMIN, "--file-store", str(folder / "files"))
    with serving(
        model, *options, "--no-public-metrics", *SIZES, HEADRACE_CACHE_DIR=str(folder)
    ) as served:
        yield served
        _assert_unharmed(served)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model with a classification head, which answers where others refuse."""
    folder = write_model_folder(tmp_path_factory.mktemp("classes") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with serving(folder, "--api-keys", KEY, *SIZES) as served:
        yield served
        _assert_unharmed(served)


def _assert_unharmed(served: Served) -> None:
    assert len(served.cores) == 1 and len(served.api_processes) == 1
    assert not any("Traceback" in line for line in served.lines), served.lines[-50:]
    assert served.stop() == 0


@pytest.fixture(scope="module")
def wire(guarded: Served) -> Iterator[Wire]:
    with closing(Wire(guarded.port, authorization=f"Bearer {KEY}")) as made:
        yield made


def send(wire: Wire, case: Case) -> int:
    """The status, of an answer that is as it must be."""
    answer = wire.send(case)
    status, path = answer.status, case.path.partition("?")[0]
    told = (case.method, case.path[:200], case.body[:500], answer)
    assert status < 500, told
    if status >= 400 and case.method != "HEAD":
        document = json.loads(answer.body)
        cohere = path in ("/v2/chat", "/v1/tokenize", "/v1/detokenize")
        error = document if cohere and "error" not in document else document["error"]
        is_text = path.startswith("/api/") and isinstance(error, str)
        message = error if is_text else error["message"]
        assert message and (is_text or error.get("type", error is document)), told
        assert len(message) < 1100 and not LEAK.search(message), told
        parsed = case.method != "FOO"  # refused by the HTTP parser, which knows no routes
        assert ("request_id" in document) == (parsed and path.startswith("/v1/messages")), told
    return status


def some(cases: Iterable[Any], number: int, step: int) -> Iterator[Any]:
    """Every `step`th of what the row of this number gets. Neighbours get others: together they have all."""
    return itertools.islice(cases, number % step, None, step)


def test_every_row_with_a_body_has_one_that_is_answered() -> None:
    """A new row of the table belongs into ANSWERED."""
    both = [*ROUTES.values(), *plane_routes().values()]
    assert {route.path for route in both if route.bodies} == ANSWERED.keys()
    assert all(fields_of(route) for route in both if route.bodies)


@pytest.mark.parametrize("row", WITH_BODY)
def test_every_field_with_bad_values(row: str, request: pytest.FixtureRequest) -> None:
    """Each field some of them, and each row others."""
    _attack_fields(row, request, 17 if row in FIRST_WITH_ITS_FIELDS else 71)


@pytest.mark.slow
@pytest.mark.parametrize("row", WITH_BODY)
def test_every_field_with_every_bad_value(row: str, request: pytest.FixtureRequest) -> None:
    _attack_fields(row, request, 1 if row in FIRST_WITH_ITS_FIELDS else 4)


def _attack_fields(row: str, request: pytest.FixtureRequest, step: int) -> None:
    """Sends every `step`th of the row's cases."""
    path = ROUTES[row].path
    served = request.getfixturevalue("classifier" if path == "/classify" else "guarded")
    key = ADMIN if path in ADMINISTRATION else KEY
    with closing(Wire(served.port, authorization=f"Bearer {key}")) as wire:
        first = send(wire, posted(row, path, ANSWERED[path]))
        known = 404 if path == "/v1/batches" or "{" in path else 200
        refused = REFUSED.get(path, known)
        assert first == refused
        statuses = {send(wire, case) for case in field_cases(row, ROUTES[row], step=step)}
    assert 400 in statuses and statuses <= {200, 400, 403, 404, refused}


@SOME_OR_ALL
def test_every_row_of_the_administrative_plane(model: Any, step: int) -> None:
    options = ("--admin-key", ADMIN, "--admin-listen", "127.0.0.1:0")
    with serving(model, *options) as served:
        eventually(lambda: any(PLANE.search(line) for line in served.lines), within_s=5)
        (port,) = [int(found[1]) for line in served.lines if (found := PLANE.search(line))]
        with closing(Wire(port, **{"x-api-key": ADMIN})) as wire, closing(Wire(port)) as stranger:
            for number, (row, route) in enumerate(plane_routes().items()):
                cases = some(address_cases(row, route), number, step)
                _attack_plane(wire, stranger, row, route, [*cases, *_fields(row, route, step)])
                answer = served.post("/v1/completions", ANSWERED["/v1/completions"])
                assert answer.status_code == 200, (row, answer.text)
        _assert_unharmed(served)


def _fields(row: str, route: ApiRoute, step: int) -> Iterable[Case]:
    return field_cases(row, route, step=step) if route.bodies else ()


def _attack_plane(wire: Wire, stranger: Wire, row: str, route: ApiRoute, cases: list[Case]) -> None:
    """What a row gets, then the engine is woken and goes on."""
    statuses = {send(wire, case) for case in cases}
    assert 400 in statuses or not route.bodies
    assert {send(stranger, case) for case in cases if case.method != "FOO"} == {401}
    assert send(wire, posted("", "/v1/admin/wake", {})) in (200, 409)
    assert send(wire, posted("", "/v1/admin/resume", {})) == 200


@SOME_OR_ALL
@pytest.mark.parametrize("row", ROUTES)
def test_ids_queries_methods_and_forms_that_lead_nowhere(wire: Wire, row: str, step: int) -> None:
    """Every row of the table, those without a body too."""
    cases = some(address_cases(row, ROUTES[row]), list(ROUTES).index(row), step)
    statuses = {send(wire, case) for case in cases}
    assert statuses <= {200, 204, 400, 401, 403, 404, 405, 413, 415, 431}, statuses


WORDS = st.sampled_from(["x", "", "fox", "user", "assistant", "auto", "function", "<|im_start|>"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), WORDS)
KINDS = st.sampled_from(
    [
        *("text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result"),
        *("search_result", "tool_reference", "server_tool_use", "message", "reasoning"),
        *("tool_addition", "tool_removal", "tool_definition", "web_search_tool_result"),
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
        *("tool", "definition"),
    ]
)
Drawn = st.SearchStrategy[Any]


def _around(inner: Drawn) -> Drawn:
    """Lists and blocks of these. A function, not a lambda: hypothesis reads its source, and finds that of a lambda
    only by guessing from the lines around it."""
    blocks = st.builds(
        lambda kind, rest: {**rest, "type": kind},
        KINDS,
        st.dictionaries(KEYS, inner, max_size=4),
    )
    return st.one_of(st.lists(inner, max_size=3), blocks)


VALUES: Drawn = st.recursive(SCALARS, _around, max_leaves=12)
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
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_what_is_inside_the_fields_at_random(wire: Wire, path: str, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(TOP[path]))
    value = data.draw(st.one_of(VALUES, st.lists(VALUES, min_size=1, max_size=3)))
    if field == "messages" and data.draw(st.booleans()):
        role = data.draw(st.sampled_from(["user", "assistant", "system"]))
        value = [{"role": role, "content": value if isinstance(value, list) else [value]}]
    send(wire, posted(f"POST {path}", path, {**ANSWERED[path], field: value}))


def test_queries_of_a_stored_response_are_checked(wire: Wire) -> None:
    body = {"input": "fox", "max_output_tokens": 1, "background": True}
    made = wire.send(posted("", "/v1/responses", body))
    path = f"/v1/responses/{json.loads(made.body)['id']}"
    for query in ("?stream=true&starting_after=x", "?stream=true&starting_after=-1"):
        assert send(wire, Case("", "GET", path + query)) == 400
    for query in ("?limit=0", "?limit=101", "?limit=x", "?order=up", "?after=nobody"):
        assert send(wire, Case("", "GET", path + "/input_items" + query)) == 400


WAYS = [
    *("/{p}", "//{p}", "///{p}", "/{p}/", "/{p}//", "/{p}.", "/.{p}", "/./{p}", "/../{p}", "/%2f{p}"),
    *("/;/{p}", "/%2e/{p}", "/%2e%2e/{p}", "/{p}%20", "/%20{p}", "/{p};x=1", "/{p},x", "/{P}", "/{p}%2f"),
    *("/{p}?/health", "/{p}#/health", "/{p}%23", "/{p}%3f", "/{p}%00", "/{p}%0a", "/{p}%0d%0aX:y", "/{p}%c0%af"),
    *("/health/%2e%2e/{p}", "/health/../{p}", "/health,/{p}", "/health;/{p}", "/health%2f..%2f{p}", "/health/{p}"),
    *("/ui/../{p}", "/ui/%2e%2e/{p}", "/{p}/health", "/{p}/../health", "/{p}?beta=true", "/{p}?path=/health"),
    *("/ping/../{p}", "/\\{p}", "/%5c{p}", "/%252f{p}", "http://x/{p}", "/{p}~", "/{p}*", "/api/hello/../{p}"),
]  # fmt: skip


@SOME_OR_ALL
def test_without_a_key_no_route_says_anything_but_401(guarded: Served, step: int) -> None:
    """All routes of the table, and of more than 40 ways to spell them."""
    assert len(set(WAYS)) > 40
    with closing(Wire(guarded.port)) as stranger:
        for number, (row, route) in enumerate(ROUTES.items()):
            path = re.sub(r"{\w+(:path)?}", "x", route.path).removeprefix("/")
            if "/" + path in PUBLIC:
                continue
            for way in ("/{p}", *some(WAYS, number, step)):
                target = way.format(p=path, P=path.upper())
                status = stranger.send(Case(row, row.partition(" ")[0], target)).status
                assert status == 401, (row, target, status)
