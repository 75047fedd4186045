"""The OpenAPI document: every route is in it, its schemas are schemas, and they take what the clients send."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from headrace.front.server.table import PUBLIC, table
from tests.api.serving import NO_TLS, Served
from tests.dialects import agent
from tests.dialects.conftest import KEY


@pytest.fixture(scope="module")
def document(bundled: Served) -> Any:
    assert bundled.get("/openapi.json").status_code == 401
    return bundled.get("/openapi.json", **{"x-api-key": KEY}).json()


def test_every_route_is_in_it(document: Any) -> None:
    told = {(path, method) for path, item in document["paths"].items() for method in item}
    routes = table()
    wanted = {
        (route.path.replace(":path", ""), method.lower())
        for route in routes
        for method in route.described
    }
    assert told == wanted and len(told) >= 30
    assert all(route.doc.strip() for route in routes), "every handler says what it does"
    names = [item[m]["operationId"] for item in document["paths"].values() for m in item]
    assert len(set(names)) == len(names)
    for route in routes:
        open_to_all = document["paths"][route.path.replace(":path", "")]
        for operation in open_to_all.values():
            assert (operation.get("security") == []) == (route.path in PUBLIC)


def test_its_schemas_are_valid_and_every_reference_leads_somewhere(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references and references <= set(schemas)
    assert not any("headrace" in name for name in schemas), "names are those of the requests"


def test_fields_of_a_query_are_parameters(document: Any) -> None:
    (mode, clear) = document["paths"]["/pause"]["post"]["parameters"]
    assert (mode["name"], mode["in"], mode["required"]) == ("mode", "query", False)
    assert mode["schema"]["default"] == "abort" and "keep" in mode["schema"]["enum"]
    assert clear["name"] == "clear_cache" and clear["schema"]["type"] == "boolean"
    for item in document["paths"].values():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                jsonschema.Draft202012Validator.check_schema(parameter["schema"])
    assert "parameters" not in document["paths"]["/resume"]["post"]


SAID: Any = [{"role": "user", "content": "x"}]
BODIES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"model": "m", "messages": SAID}),
    ("/v2/chat", {"max_tokens": 5, "messages": SAID}),
    ("/v1/messages", {"max_tokens": 5, "messages": SAID, "tools": agent.for_messages()}),
    ("/v1/responses", {"model": "m", "input": "x", "tools": agent.for_responses()}),
    ("/v1/responses", {"input": SAID, "reasoning": {"effort": "low"}}),
    ("/tokenize", {"prompt": "x"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_its_schemas_take_what_clients_send(document: Any, path: str, body: Any) -> None:
    given = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**given, "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(body)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(whole).validate([body])


WRONG: list[tuple[str, Any]] = [
    ("/v1/messages", {}),
    ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": 7}]}),
    ("/v1/messages", {"max_tokens": 5, "messages": SAID, "model": "nobody"}),
    ("/v1/messages/count_tokens", {"messages": []}),
    ("/v1/chat/completions", {"messages": SAID, "temperature": 9}),
    ("/v1/completions", {"prompt": "word " * 9000}),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_no"}),
    ("/v2/chat", {"messages": []}),
    ("/tokenize", {"prompt": 7}),
]


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize(("path", "body"), WRONG)
def test_what_is_refused_has_the_declared_shape(
    bundled: Served, document: Any, path: str, body: Any, keyed: bool
) -> None:
    """Also /v1/messages, whose errors have Anthropic's names."""
    headers = {"x-api-key": KEY} if keyed else {}
    answer = httpx.post(bundled.url + path, json=body, headers=headers, verify=NO_TLS, timeout=300)
    assert 400 <= answer.status_code < 500
    declared = document["paths"][path]["post"]["responses"]["default"]
    schema = declared["content"]["application/json"]["schema"]
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(answer.json())
    if path.startswith("/v1/messages"):
        assert answer.json()["type"] == "error" and answer.json()["request_id"]
