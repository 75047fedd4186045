"""Conversations with the official client: kept, changed, continued by responses, bounded, its owner's (contract 4)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.front.server.state.database import open_database
from headrace.front.server.state.responses import Record, ResponseStore
from tests.api.clients import openai_client
from tests.api.serving import Served, serving
from tests.dialects.conftest import OTHER

SAID: list[Any] = [
    {"role": "user", "content": "My name is Ada."},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello Ada."}]},
]  # fmt: skip
ASK: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 40}


def test_a_conversation_is_made_told_changed_and_deleted(gpt: openai.OpenAI) -> None:
    made = gpt.conversations.create(items=SAID, metadata={"topic": "names"})
    assert made.object == "conversation" and made.id.startswith("conv_") and made.created_at
    assert gpt.conversations.retrieve(made.id).metadata == {"topic": "names"}
    assert gpt.conversations.update(made.id, metadata={"topic": "mills"}).metadata == {
        "topic": "mills"
    }
    assert gpt.conversations.retrieve(made.id).metadata == {"topic": "mills"}
    gone = gpt.conversations.delete(made.id)
    assert gone.deleted and gone.object == "conversation.deleted"
    for method in (gpt.conversations.retrieve, gpt.conversations.delete):
        with pytest.raises(openai.NotFoundError):
            method(made.id)


def test_items_are_added_listed_and_deleted(gpt: openai.OpenAI) -> None:
    made = gpt.conversations.create()
    assert list(gpt.conversations.items.list(made.id)) == []
    added = gpt.conversations.items.create(made.id, items=SAID)
    assert [item.type for item in added.data] == ["message", "message"]
    for number in range(5):
        gpt.conversations.items.create(
            made.id, items=[{"role": "user", "content": f"number {number}"}]
        )
    listed: list[Any] = list(gpt.conversations.items.list(made.id, limit=2, order="asc"))
    assert [item.content[0].text for item in listed] == [
        *("My name is Ada.", "Hello Ada."),
        *(f"number {number}" for number in range(5)),
    ]
    latest: Any = next(iter(gpt.conversations.items.list(made.id, limit=1)))
    assert latest.content[0].text == "number 4"
    one: Any = gpt.conversations.items.retrieve(listed[3].id, conversation_id=made.id)
    assert one.content[0].text == "number 1"
    assert gpt.conversations.items.delete(listed[3].id, conversation_id=made.id).id == made.id
    left = [item.id for item in gpt.conversations.items.list(made.id, order="asc")]
    assert left == [item.id for item in listed if item.id != listed[3].id]
    with pytest.raises(openai.NotFoundError):
        gpt.conversations.items.retrieve(listed[3].id, conversation_id=made.id)


@pytest.mark.parametrize("how", ["plain", "stream", "background"])
@pytest.mark.parametrize("form", ["id", "object"])
def test_responses_read_a_conversation_and_add_to_it(
    how: str, form: str, gpt: openai.OpenAI
) -> None:
    talk = gpt.conversations.create(items=SAID)
    given: Any = talk.id if form == "id" else {"id": talk.id}
    more: Any = {"conversation": given, "input": "What is 17 + 25?"}
    if how == "stream":
        with gpt.responses.stream(**ASK, **more) as stream:
            answer = stream.get_final_response()
    elif how == "background":
        begun = gpt.responses.create(**ASK, **more, background=True)
        last: Any = list(gpt.responses.retrieve(begun.id, stream=True))[-1]
        answer = last.response
    else:
        answer = gpt.responses.create(**ASK, **more)
    assert answer.conversation is not None and answer.conversation.id == talk.id
    by_hand = [*SAID, {"role": "user", "content": "What is 17 + 25?"}]
    same = gpt.responses.create(**ASK, input=by_hand)
    assert answer.output_text == same.output_text and same.conversation is None
    assert answer.usage is not None and same.usage is not None
    assert answer.usage.input_tokens == same.usage.input_tokens
    counted = gpt.responses.input_tokens.count(model="demo", conversation=talk.id, input="And 1?")
    items: list[Any] = list(gpt.conversations.items.list(talk.id, order="asc"))
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant"]
    assert items[3].content[0].text == answer.output_text
    second = gpt.responses.create(**ASK, conversation=given, input="And 1?")
    assert second.usage is not None and second.usage.input_tokens == counted.input_tokens
    assert len(list(gpt.conversations.items.list(talk.id))) == 6


def test_a_failed_response_adds_nothing(gpt: openai.OpenAI) -> None:
    talk = gpt.conversations.create(items=SAID)
    with pytest.raises(openai.BadRequestError):
        gpt.responses.create(**ASK, conversation=talk.id, input="mill " * 20_000)
    assert len(list(gpt.conversations.items.list(talk.id))) == 2


def test_a_conversation_is_its_owners(gpt: openai.OpenAI, bundled: Served) -> None:
    """P12: whatever is asked of it, to another key it is not there. A response is no conversation, nor the reverse."""
    talk = gpt.conversations.create(items=SAID)
    (first, _) = gpt.conversations.items.list(talk.id)
    answer = gpt.responses.create(**ASK, input="What is 17 + 25?")
    with openai_client(bundled.url, OTHER) as other:
        attempts = [
            lambda: other.conversations.retrieve(talk.id),
            lambda: other.conversations.update(talk.id, metadata={}),
            lambda: other.conversations.delete(talk.id),
            lambda: other.conversations.items.create(talk.id, items=SAID),
            lambda: list(other.conversations.items.list(talk.id)),
            lambda: other.conversations.items.delete(first.id, conversation_id=talk.id),
            lambda: other.responses.create(**ASK, conversation=talk.id, input="x"),
            lambda: gpt.responses.retrieve(talk.id),
            lambda: gpt.responses.delete(talk.id),
            lambda: gpt.conversations.retrieve(answer.id),
            lambda: gpt.conversations.delete(answer.id),
        ]
        for attempt in attempts:
            with pytest.raises(openai.NotFoundError):
                attempt()
    with pytest.raises(openai.BadRequestError):
        gpt.responses.create(**ASK, previous_response_id=talk.id, input="x")
    assert len(list(gpt.conversations.items.list(talk.id))) == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ({"items": []}, "items"),
        ({}, "items"),
        ({"items": [{"type": "teleport"}]}, "items[0].type"),
        ({"items": [{"role": "boss", "content": "x"}]}, "items[0].role"),
        ({"items": [{"role": "user", "content": "x", "id": "a"}] * 2}, "items"),
    ],
)
def test_items_that_cannot_be_kept_are_named(
    body: dict[str, Any], field: str, gpt: openai.OpenAI
) -> None:
    talk = gpt.conversations.create()
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.post(f"/conversations/{talk.id}/items", body=body, cast_to=object)
    assert caught.value.param == field
    assert list(gpt.conversations.items.list(talk.id)) == []


@pytest.mark.slow
def test_a_conversation_is_bounded_and_survives_a_restart(model: Path, tmp_path: Path) -> None:
    options = ("--max-body-bytes", "4096", "--response-store", f"sqlite:{tmp_path}/kept.sqlite3")
    with serving(model, *options) as served, openai_client(served.url) as client:
        talk = client.conversations.create()
        with pytest.raises(openai.BadRequestError) as caught:
            for _ in range(10):
                item: Any = {"role": "user", "content": "x" * 1000}
                client.conversations.items.create(talk.id, items=[item])
        assert caught.value.param == "items" and "4096" in caught.value.message
        num_items = len(list(client.conversations.items.list(talk.id)))
        assert 2 <= num_items <= 3
        assert served.stop() == 0
    with serving(model, *options) as served, openai_client(served.url) as client:
        assert len(list(client.conversations.items.list(talk.id))) == num_items


async def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """Two processes with a connection each, as two API processes have."""
    stores = []
    for _ in range(2):
        where = f"sqlite:{tmp_path}/kept.sqlite3"
        store = ResponseStore(open_database(where, folder=tmp_path), max_bytes=1 << 20, ttl_s=60)
        await store.start()
        stores.append(store)
    await stores[0].put(Record(id="conv_1", owner="a", previous=None, response=b"{}", input=b""))

    def longer(record: Record) -> Record:
        return Record(**{**_fields(record), "input": record.input + b"x"})

    found = await asyncio.gather(*(stores[i % 2].change("conv_1", "a", longer) for i in range(40)))
    assert all(found) and await stores[0].change("conv_1", "b", longer) is None
    kept = await stores[1].get("conv_1", "a")
    assert kept is not None and kept.input == b"x" * 40
    for store in stores:
        await store.close()


def _fields(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in Record.__struct_fields__}
