"""A name that /api/create has made, in requests of every dialect: what it brings stands where they say nothing
(BEY-43)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.front.server.anthropic.schema import CountTokensRequest, MessagesRequest
from headrace.front.server.cohere.schema import CohereChatRequest
from headrace.front.server.conversation.own_names import base_of
from headrace.front.server.conversation.request import ChatRequest, CompletionRequest
from headrace.front.server.ollama.named_requests import standing_for
from headrace.front.server.openai.batch import BatchChatRequest
from headrace.front.server.pooling.schema import CohereEmbedRequest, EmbeddingRequest
from headrace.front.server.responses.schema import ResponsesRequest
from headrace.front.server.state.database import open_database
from headrace.front.server.state.named_models import NamedModel, NamedModelStore

ASKED: Any = [{"role": "user", "content": "Hi"}]
BEGUN: Any = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Mario."}]
SYSTEM: Any = {"role": "system", "content": "Be short."}
MARIO = NamedModel(
    name="mario",
    base="demo:latest",
    system="Be short.",
    parameters={"temperature": 0.5, "num_predict": 900, "stop": ["a", "b"], "repeat_penalty": 1.5},
    messages=tuple(BEGUN),
)
BROUGHT = {
    "model": "demo",
    "temperature": 0.5,
    "max_tokens": 256,
    "stop": ["a", "b"],
    "repetition_penalty": 1.5,
}


MESSAGES: Any = [*BEGUN, *ASKED]
NO_PENALTY = {name: BROUGHT[name] for name in ("model", "temperature")}


@pytest.mark.parametrize(
    ("schema", "sent", "served"),
    [
        (ChatRequest, {"messages": ASKED}, {**BROUGHT, "messages": [SYSTEM, *MESSAGES]}),
        (
            ChatRequest,
            {"messages": [{**SYSTEM, "role": "developer"}], "temperature": 0},
            {**BROUGHT, "messages": [*BEGUN, {**SYSTEM, "role": "developer"}], "temperature": 0},
        ),
        (
            ChatRequest,
            {"messages": "?", "max_completion_tokens": 3, "stop": None},
            {
                **{name: value for name, value in BROUGHT.items() if name != "max_tokens"},
                **{"messages": "?", "max_completion_tokens": 3},
            },
        ),
        (
            BatchChatRequest,
            {"messages": [ASKED, ASKED]},
            {**BROUGHT, "messages": [[SYSTEM, *MESSAGES]] * 2},
        ),
        (CompletionRequest, {"prompt": "a"}, {**BROUGHT, "prompt": "a"}),
        (
            MessagesRequest,
            {"messages": ASKED, "max_tokens": 9},
            {
                **NO_PENALTY,
                **{"messages": MESSAGES, "max_tokens": 9},
                **{"system": "Be short.", "stop_sequences": ["a", "b"]},
            },
        ),
        (
            CountTokensRequest,
            {"messages": ASKED, "system": "Be long."},
            {"model": "demo", "messages": MESSAGES, "system": "Be long."},
        ),
        (
            CohereChatRequest,
            {"messages": ASKED},
            {
                **NO_PENALTY,
                **{"messages": [SYSTEM, *MESSAGES], "max_tokens": 256},
                "stop_sequences": ["a", "b"],
            },
        ),
        (
            ResponsesRequest,
            {"input": "Hi"},
            {
                **NO_PENALTY,
                **{"input": MESSAGES, "max_output_tokens": 256, "instructions": "Be short."},
            },
        ),
        (
            ResponsesRequest,
            {"input": "Hi", "previous_response_id": "resp_1", "instructions": "Be long."},
            {
                **NO_PENALTY,
                **{"input": "Hi", "max_output_tokens": 256, "instructions": "Be long."},
                "previous_response_id": "resp_1",
            },
        ),
        (EmbeddingRequest, {"messages": ASKED}, {"model": "demo", "messages": ASKED}),
        (CohereEmbedRequest, {"texts": ["a"]}, {"model": "demo", "texts": ["a"]}),
    ],
)
async def test_what_a_name_brings_stands_in_front(
    schema: Any, sent: dict[str, Any], served: dict[str, Any], tmp_path: Path
) -> None:
    """Under the names of the request's own dialect; what it has no field for is left out."""
    database = open_database(f"sqlite:{tmp_path / 'names'}", folder=tmp_path)
    store = NamedModelStore(database)
    await store.put(MARIO, "one")
    services: Any = SimpleNamespace(
        all_names=["demo"],
        models=None,
        text=SimpleNamespace(max_model_len=256),
        store=SimpleNamespace(named_models=store),
    )
    own: Any = SimpleNamespace(services=services, tenant="one")
    other: Any = SimpleNamespace(services=services, tenant="two")
    of_served_model = standing_for(schema)
    for name in ("mario", "mario:latest"):
        asked = {**sent, "model": name}
        assert await of_served_model(own, asked) == served
        assert await base_of(own, name) == "demo"
        assert await of_served_model(other, asked) == asked and await base_of(other, name) == name
    plain = {**sent, "model": "demo:latest"}
    assert await of_served_model(other, plain) == {**sent, "model": "demo"}
    nobody = {**sent, "model": "luigi"}
    assert await of_served_model(own, nobody) == nobody
    await database.close()
