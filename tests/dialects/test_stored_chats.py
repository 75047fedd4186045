"""Chats that are kept, with the official client (store: true); Cohere's tokens with theirs."""

from __future__ import annotations

from typing import Any

import cohere
import openai
import pytest

from tests.api.clients import openai_client
from tests.api.serving import Served
from tests.dialects.conftest import KEY, OTHER

SAID: Any = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 17 + 25?"},
]


@pytest.mark.slow
def test_a_chat_is_kept_listed_changed_and_deleted(gpt: openai.OpenAI, bundled: Served) -> None:
    chats = gpt.chat.completions
    asked: Any = {"model": "demo", "messages": SAID, "temperature": 0, "store": True}
    whole = chats.create(**asked, metadata={"kind": "sum"})
    chunks = list(chats.create(**asked, stream=True))
    streamed = chats.retrieve(chunks[0].id)
    assert streamed.choices[0].message.content == whole.choices[0].message.content == "42"
    assert streamed.choices[0].finish_reason == "stop" and streamed.usage is not None
    chats.create(**{**asked, "store": False})
    assert [one.id for one in chats.list()] == [whole.id, streamed.id]
    assert [one.id for one in chats.list(order="desc", limit=1)] == [streamed.id, whole.id]
    assert [one.id for one in chats.list(metadata={"kind": "sum"})] == [whole.id]
    assert not list(chats.list(model="other"))
    changed = chats.update(streamed.id, metadata={"kind": "other"})
    assert changed.metadata == {"kind": "other"} == chats.retrieve(streamed.id).metadata
    messages = list(chats.messages.list(whole.id))
    assert [(one.role, one.content) for one in messages] == [
        (m["role"], m["content"]) for m in SAID
    ]
    with openai_client(bundled.url, OTHER) as stranger:
        assert not list(stranger.chat.completions.list())
        with pytest.raises(openai.NotFoundError):
            stranger.chat.completions.retrieve(whole.id)
    for ident in (whole.id, streamed.id):
        assert chats.delete(ident).deleted
        with pytest.raises(openai.NotFoundError):
            chats.retrieve(ident)
    assert not list(chats.list())


@pytest.mark.slow
def test_tokens_in_coheres_form(bundled: Served) -> None:
    with cohere.ClientV2(api_key=KEY, base_url=bundled.url) as client:
        answer = client.tokenize(text="The fox", model="demo", offline=False)
        assert len(answer.tokens) == len(answer.token_strings) > 0
        assert (
            client.detokenize(tokens=answer.tokens, model="demo", offline=False).text == "The fox"
        )
        with pytest.raises(cohere.BadRequestError):
            client.detokenize(tokens=[2**30], model="demo", offline=False)
