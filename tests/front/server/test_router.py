"""Where the router sends what, and what it makes of the answers (KVT-03)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.base.errors import ConfigError
from headrace.cli import route
from headrace.front.server.router import PromptRouter, Upstream, routing_app

TOLD = {"do_remote_prefill": True, "transfer_id": "chatcmpl-1"}
CHAT = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_completion_tokens": 9}


class Asked:
    """A server that answers with what it was asked."""

    def __init__(self, status: int = 200, **answer: Any) -> None:
        self.status, self.answer = status, answer
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        app = Starlette(routes=[Route("/{path:path}", self.reply, methods=["GET", "POST"])])
        self.upstream = Upstream("http://server", httpx.ASGITransport(app))

    async def reply(self, request: Request) -> Response:
        content = await request.body()
        self.bodies.append(orjson.loads(content) if content.startswith(b"{") else content)
        self.paths.append(request.scope["raw_path"].decode() + "?" + request.url.query)
        assert request.headers["host"] == "server"
        said = {"key": request.headers.get("authorization"), **self.answer}
        return Response(orjson.dumps(said), self.status, media_type="application/json")


def _client(prefill: Upstream, decode: Upstream) -> httpx.AsyncClient:
    app = routing_app(PromptRouter([prefill], [decode]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


@pytest.fixture
async def closed() -> AsyncIterator[Upstream]:
    """One that nobody listens for."""
    yield Upstream("http://127.0.0.1:1")


async def test_a_prompt_goes_to_one_server_and_the_request_to_another() -> None:
    prefill, decode = Asked(kv_transfer_params=TOLD), Asked()
    async with _client(prefill.upstream, decode.upstream) as client:
        answer = await client.post(
            "/v1/chat/completions", json=CHAT, headers={"Authorization": "Bearer k"}
        )
        assert answer.status_code == 200 and answer.json()["key"] == "Bearer k"
        asked = {"do_remote_decode": True}
        alone = {"messages": CHAT["messages"], "stream": False, "max_tokens": 1}
        assert prefill.bodies == [{**alone, "kv_transfer_params": asked}]
        assert decode.bodies == [{**CHAT, "kv_transfer_params": TOLD}]
        sampling = {"max_tokens": 7, "min_tokens": 2, "seed": 1}
        sent = {"token_ids": [1], "sampling_params": sampling}
        await client.post("/inference/v1/generate", json=sent)
        assert prefill.bodies[1]["sampling_params"] == {"max_tokens": 1, "seed": 1}
        assert decode.bodies[1] == {**sent, "kv_transfer_params": TOLD}
        for whole in ({"n": 2}, {"echo": True}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}):
            await client.post("/v1/completions", json={"prompt": "x", **whole})
        await client.post("/v1/embeddings", json={"input": "x"})
        await client.post("/v1/completions", content=b"no json")
        await client.get("/v1/models/a%2Fb?x=1")
    assert len(prefill.bodies) == 2 and decode.paths[-1] == "/v1/models/a%2Fb?x=1"
    assert prefill.upstream.busy == decode.upstream.busy == 0


async def test_an_address_in_a_path_is_no_address() -> None:
    prefill, decode = Asked(), Asked()
    async with _client(prefill.upstream, decode.upstream) as client:
        url = httpx.URL("http://router").copy_with(raw_path=b"//elsewhere/x")
        assert (await client.send(client.build_request("GET", url))).status_code == 200
    assert decode.paths == ["//elsewhere/x?"]


@pytest.mark.parametrize(
    ("status", "wanted", "decodes"), [(400, 400, 0), (429, 200, 1), (503, 200, 1)]
)
async def test_what_the_first_refuses_is_refused_and_what_it_cannot_take_is_not(
    status: int, wanted: int, decodes: int
) -> None:
    prefill, decode = Asked(status, error={}), Asked()
    async with _client(prefill.upstream, decode.upstream) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, len(decode.bodies)) == (wanted, decodes)
    assert decode.bodies == [{"prompt": "x"}] * decodes


async def test_servers_that_are_not_there(closed: Upstream) -> None:
    decode = Asked()
    async with _client(closed, decode.upstream) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 200 and decode.bodies == [{"prompt": "x"}]
    async with _client(closed, closed) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503 and answer.headers["retry-after"] in ("5", "6")
    assert closed.busy == 0


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:y", "http://x?y=1"])
def test_an_address_that_is_none_is_refused_by_its_option(url: str) -> None:
    with pytest.raises(ConfigError, match="--decode"):
        route.main(["--prefill", "localhost:1", "--decode", url])
