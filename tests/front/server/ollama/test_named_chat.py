"""A name that /api/create has made, in a chat of OpenAI's dialect: what it brings stands where the chat says nothing
(BEY-43)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.front.server.ollama.named_chat import of_served_model
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


@pytest.mark.parametrize(
    ("sent", "chat"),
    [
        (
            {"model": "mario:latest", "messages": ASKED},
            {**BROUGHT, "messages": [SYSTEM, *BEGUN, *ASKED]},
        ),
        (
            {"model": "mario", "messages": [{**SYSTEM, "role": "developer"}], "temperature": 0},
            {**BROUGHT, "messages": [*BEGUN, {**SYSTEM, "role": "developer"}], "temperature": 0},
        ),
        (
            {"model": "mario", "messages": "?", "max_completion_tokens": 3, "stop": None},
            {
                **{name: value for name, value in BROUGHT.items() if name != "max_tokens"},
                **{"messages": "?", "max_completion_tokens": 3},
            },
        ),
        ({"model": "demo:latest", "messages": ASKED}, {"model": "demo", "messages": ASKED}),
        ({"model": "luigi", "messages": ASKED}, {"model": "luigi", "messages": ASKED}),
    ],
)
async def test_what_a_name_brings_stands_in_front(
    sent: dict[str, Any], chat: dict[str, Any], tmp_path: Path
) -> None:
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
    assert await of_served_model(own, sent) == chat
    other: Any = SimpleNamespace(services=services, tenant="two")
    if sent["model"].startswith("mario"):
        assert await of_served_model(other, sent) == sent
    await database.close()
