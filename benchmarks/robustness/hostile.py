"""Hostile requests to every row of the server's table of routes (P7, P8, P19): what the fuzz run and the tests send.

A row's fields come from the structs its body may be. Each row with a body has one here that is answered: the requests
are that one with fields spoiled, bodies that are none, ids and queries that lead nowhere. A row that is not listed here
fails the tests.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from headrace.front.server.openapi import ApiRoute
from headrace.front.server.table import admin_routes, table

JSON = {"Content-Type": "application/json"}
SAID = [{"role": "user", "content": "fox"}]
CHAT = {"messages": SAID, "max_tokens": 1}
PAIR = {"text_1": "fox", "text_2": "dog"}
RANKED = {"query": "fox", "documents": ["dog"]}
ANSWER = {"choices": [{"token_ids": [5], "finish_reason": "stop"}]}

ANSWERED: dict[str, dict[str, Any]] = {
    "/scale_elastic_ep": {"new_data_parallel_size": 1},
    "/abort_requests": {"request_ids": ["x"]},
    "/inference/v1/abort_requests": {"request_ids": ["x"]},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/collective_rpc": {"method": "status"},
    "/slots/{id}": {"action": "save", "filename": "x"},
    "/models/load": {"model": "x"},
    "/models/unload": {"model": "x"},
    "/init_weight_transfer_engine": {"init_info": {}},
    "/start_weight_update": {"is_checkpoint_format": True},
    "/update_weights": {"update_info": {"path": "/nowhere"}},
    "/finish_weight_update": {"weight_version": "x"},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AAAAAAAAAAB7fQ=="]},
    "/init_weights_update_group": {"master_address": "localhost", "master_port": 9, "world_size": 2},
    "/destroy_weights_update_group": {"group_name": "x"},
    "/update_weights_from_distributed": {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]},
    "/update_weight_version": {"new_version": "x"},
    "/get_weights_by_name": {"name": "x"},
    "/weights_checker": {"action": "checksum"},
    "/weight_checker": {"action": "checksum"},
    "/v1/admin/update_weights": {"model": "/nowhere"},
    "/apply-template": {"messages": SAID},
    "/infill": {"input_prefix": "fox", "n_predict": 1},
    "/v1/chat/completions/{id}": {"metadata": {"a": "b"}},
    "/v1/tokenize": {"text": "fox"},
    "/v1/detokenize": {"tokens": [5]},
    "/api/chat": {"messages": SAID, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "fox", "raw": True, "options": {"num_predict": 1}},
    "/api/embed": {"input": "fox"},
    "/api/embeddings": {"prompt": "fox"},
    "/api/show": {"model": "tiny"},
    "/api/create": {"model": "x", "from": "tiny", "parameters": {"seed": 5}},
    "/api/copy": {"source": "nobody", "destination": "y"},
    "/api/delete": {"model": "nobody"},
    "/api/pull": {"model": "tiny"},
    "/v1/messages/batches": {"requests": [{"custom_id": "a", "params": {"max_tokens": 1}}]},
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"messages": [SAID], "max_tokens": 1},
    "/v1/completions": {"prompt": "fox", "max_tokens": 1},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": SAID},
    "/v1/responses": {"input": "fox", "max_output_tokens": 1, "store": False},
    "/v1/responses/input_tokens": {"input": "fox"},
    "/v1/responses/compact": {"input": "fox"},
    "/v1/conversations": {"items": SAID, "metadata": {"a": "b"}},
    "/v1/conversations/{id}": {"metadata": {"a": "b"}},
    "/v1/conversations/{id}/items": {"items": SAID},
    "/v1/embeddings": {"input": "fox"},
    "/v2/chat": CHAT,
    "/v2/embed": {"texts": ["fox"], "input_type": "search_query", "embedding_types": ["float"]},
    "/pooling": {"input": "fox"},
    "/classify": {"input": "fox"},
    "/score": PAIR,
    "/v1/score": PAIR,
    "/rerank": RANKED,
    "/v1/rerank": RANKED,
    "/v2/rerank": RANKED,
    "/generative_scoring": {"query": "fox", "items": ["dog"], "label_token_ids": [5]},
    "/v1/decisions": {"input": "fox", "questions": [{"type": "predicate", "instructions": "dog"}]},
    "/v1/systemone": {"state": "fox", "questions": {"a": {"type": "noul", "instructions": "dog"}}},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/v1/chat/completions/render": CHAT,
    "/v1/chat/completions/derender": {"request": CHAT, "response": ANSWER},
    "/v1/completions/render": {"prompt": "fox"},
    "/v1/messages/render": CHAT,
    "/v1/responses/render": {"input": "fox"},
    "/invocations": CHAT,
    "/v1/completions/derender": {"request": {"prompt": "fox"}, "response": ANSWER},
    "/tokenize": {"prompt": "fox"},
    "/detokenize": {"tokens": [5]},
    "/v1/admin/pause": {"mode": "keep"},
    "/v1/admin/drain": {"mode": "abort"},
    "/v1/admin/reload_model": {"mode": "abort"},
    "/v1/admin/load_model": {"model": "x"},
    "/v1/admin/unload_model": {"model": "x"},
    "/v1/admin/sleep": {"level": 1},
    "/v1/admin/wake": {"tags": ["weights"]},
    "/v1/admin/reset_prefix_cache": {"reset_running_requests": False},
    "/v1/admin/abort": {"request_ids": ["x"]},
    "/v1/admin/profile": {"action": "stop"},
    "/v1/admin/log_level": {"level": "info"},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
}  # fmt: skip
"""Path -> a small body that is answered; that of /v1/batches names a file, which is not there, as a path with {id} does
what it names."""

MORE_FIELDS = {"/v1/messages": ["metadata", "top_k"], "/v1/responses": ["metadata", "prompt"]}
"""Fields that clients send and the structs do not have."""

BAD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -1.5, 1e308, "", "x",
    "\ud7ff\x00\u202e", "a" * 70_000, [], [None], [[]], ["x"] * 2000, {}, {"type": None},
    {"type": "x"}, {"": {}}, [{"type": "function"}], [{"type": 5}], {"a": [{"b": None}]},
]  # fmt: skip

RAW_BODIES = [
    b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 5000, b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500,
    b'{"messages": NaN}', b'{"temperature": Infinity}', b'{"a": 1, "a": 2}', b'\xef\xbb\xbf{}', b'{"a": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "\\u0000"}]}', b"0" * 100_000, b'{"n": 1e999}',
]  # fmt: skip

IDS = [
    "x",
    "%00",
    "%2e%2e",
    "..;",
    "x" * 3000,
    "%ff%fe",
    "%F0%9F%A6%8A",
    "resp_x",
    "a%2fb",
    "-1",
    "'%22%20or",
]
QUERIES = [
    "", "?", "?stream=true", "?stream=true&starting_after=-1", "?limit=x&order=y&after=z", "?limit=0", "?limit=-1",
    "?limit=1&limit=2", "?mode=nap", "?%00=%00", "?purpose=x&purpose=y", "?a=" + "b" * 3000, "?include[]=x&=&&",
    "?limit=%C2%B2", "?limit=" + "0" * 4500 + "1",
]  # fmt: skip
METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "FOO"]

_PART = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
_FILE = _PART % (b"file", b'; filename="x.jsonl"', b"{}")
FORMS = [
    b"", b"--b--\r\n", b"--b\r\n", b"no form at all", _FILE, _FILE + b"--b--\r\n",
    _PART % (b"purpose", b"", b"x") + _FILE + b"--b--\r\n", _PART % (b"purpose", b"", b"\xff") + b"--b--\r\n",
    _PART % (b"file", b'; filename="../../x"', b"\x00" * 5000) + b"--b--\r\n",
    _PART % (b"p" * 9000, b"", b"x") + b"--b--\r\n", (_PART % (b"a", b"", b"b")) * 200 + b"--b--\r\n",
]  # fmt: skip


class Case(NamedTuple):
    """One request; `row` says which row of the table it is for, as "METHOD path"."""

    row: str
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = {}


def routes() -> dict[str, ApiRoute]:
    """Every row of the table, by "METHOD path"."""
    return _rows(table())


def plane_routes() -> dict[str, ApiRoute]:
    """Every row of the admin API, which has a listener of its own, but the one that ends the server."""
    rows = _rows(admin_routes())
    del rows["POST /v1/admin/shutdown"]
    return rows


def _rows(found: list[ApiRoute]) -> dict[str, ApiRoute]:
    return {f"{method} {route.path}": route for route in found for method in route.described}


def fields_of(route: ApiRoute) -> list[str]:
    """The fields a body of this route may have."""
    known = [field.encode_name for body in route.bodies for field in msgspec.structs.fields(body)]
    return list(dict.fromkeys([*known, *MORE_FIELDS.get(route.path, [])]))


def posted(row: str, path: str, body: object) -> Case:
    """A JSON body, by the row's method; POST where there is none."""
    method = row.partition(" ")[0] or "POST"
    return Case(row, method, path, json.dumps(body).encode(), JSON)


def field_cases(row: str, route: ApiRoute, *, step: int = 1) -> Iterator[Case]:
    """Every field with every bad value, or with every `step`-th; every bad value in place of the body, or a quarter of
    them, another one for a name of another length."""
    whole = ANSWERED[route.path]
    spoiled = itertools.product(fields_of(route), BAD)
    for field, value in itertools.islice(spoiled, 0, None, step):
        yield posted(row, route.path, {**whole, field: value})
    part = (len(row) % 4, None, 4) if step > 8 else (0, None, 1)
    for value in itertools.islice(BAD, *part):
        yield posted(row, route.path, value)
    for raw in itertools.islice(RAW_BODIES, *part):
        yield Case(row, row.partition(" ")[0], route.path, raw, JSON)


def address_cases(row: str, route: ApiRoute) -> Iterator[Case]:
    """Ids, queries, methods and kinds of bodies that lead nowhere."""
    method = row.partition(" ")[0]
    for path in _filled(route.path):
        for query in QUERIES:
            yield Case(row, method, path + query)
        for other in METHODS:
            yield Case(row, other, path, b"{}" if other in ("POST", "PUT") else b"", JSON)
    for form in FORMS:
        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        yield Case(row, "POST", next(_filled(route.path)), form, kind)


def _filled(path: str) -> Iterator[str]:
    if "{" not in path:
        yield path
        return
    yield from (re.sub(r"\{[^}]*\}", lambda _, ident=ident: ident, path) for ident in IDS)


def any_case(random_: random.Random, row: str, route: ApiRoute) -> Case:
    """One of the requests above to this row, or one with several fields spoiled at once."""
    if not route.bodies or random_.random() < 0.1:
        return random_.choice(list(address_cases(row, route)))
    if random_.random() < 0.1:
        return Case(row, row.partition(" ")[0], route.path, random_.choice(RAW_BODIES), JSON)
    fields = random_.choices(fields_of(route), k=random_.randint(1, 3))
    body = {**ANSWERED[route.path], **{field: random_.choice(BAD) for field in fields}}
    if body.get("background"):  # nobody is there whose leaving would end it
        body["max_output_tokens"] = 1
    return posted(row, route.path, body)
