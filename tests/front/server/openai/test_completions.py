"""The chunks of /v1/completions: what is the same in all is encoded once, and comes out as if it were not."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.config.server_options import ServerSettings
from headrace.front.client.events import Delta, Ended, Event, PromptScored, Started
from headrace.front.server.conversation.prompts import Prompt
from headrace.front.server.conversation.request import CompletionRequest, parse
from headrace.front.server.conversation.stages import joined
from headrace.front.server.http.sse import DONE
from headrace.front.server.openai.completions import CompletionReply, completion_fields, to_chunks


class Source:
    """A generation's events; `closed` tells that its work was ended."""

    def __init__(self, *events: Event) -> None:
        self.closed = False
        self.stream = self._run(events)

    async def _run(self, events: tuple[Event, ...]) -> AsyncGenerator[Event]:
        try:
            for event in events:
                yield event
        finally:
            self.closed = True


def answered(*texts: str, index: int = 0) -> list[Event]:
    deltas = [Delta(index=index, text=text, token_ids=[7]) for text in texts]
    return [Started(3), *deltas, Ended(index=index, reason="length", num_output=len(texts))]


async def chunks(sources: list[Source], **asked: object) -> list[bytes]:
    request = parse({"model": "m", "prompt": "p", "stream": True, **asked}, CompletionRequest)
    prompts = [Prompt(ids=[1, 2, 3], text="abc") for _ in sources]
    reply = CompletionReply(
        id="cmpl-1",
        model="m",
        created=5,
        request=request,
        prompts=prompts,
        fields=completion_fields(request, ServerSettings()),
    )
    return [one async for one in to_chunks(joined([s.stream for s in sources]), reply)]


def expected(index: int, text: str, **more: object) -> bytes:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m"}
    return b"data: " + orjson.dumps({**head, "choices": [choice], **more}) + b"\n\n"


@given(text=st.text())
async def test_a_plain_chunk_is_the_document_of_its_delta(text: str) -> None:
    first, end, done = await chunks([Source(*answered(text))])
    assert first == expected(0, text) and b'"finish_reason":"length"' in end and done == DONE


async def test_usage_stands_in_every_chunk_as_asked() -> None:
    usage = {"stream_options": {"include_usage": True}}
    first, _, last, done = await chunks([Source(*answered("a"))], **usage)
    assert first == expected(0, "a", usage=None) and done == DONE
    assert orjson.loads(last[6:])["usage"]["completion_tokens"] == 1
    usage["stream_options"]["continuous_usage_stats"] = True
    first, *_ = await chunks([Source(*answered("a"))], **usage)
    assert orjson.loads(first[6:])["usage"]["total_tokens"] == 4
    usage["stream_options"]["include_usage"] = False
    assert not any(b"usage" in chunk for chunk in await chunks([Source(*answered("a"))], **usage))


async def test_choices_of_several_prompts_keep_their_numbers() -> None:
    sources = [Source(*answered("x", index=1)), Source(*answered("y", index=0))]
    found = await chunks(sources, n=2, prompt=["p", "q"])
    assert expected(1, "x") in found and expected(2, "y") in found


async def test_an_echo_comes_before_the_first_delta_of_its_prompt() -> None:
    events = answered("d")
    source = Source(events[0], PromptScored([None]), *events[1:])
    found = await chunks([source], echo=True)
    assert found[:2] == [expected(0, "abc"), expected(0, "d")]


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_what_is_joined_ends_its_generations(count: int) -> None:
    sources = [Source(*answered("a", "b")) for _ in range(count)]
    events = joined([source.stream for source in sources])
    assert (await anext(events))[0] in range(count)
    await events.aclose()
    assert all(source.closed for source in sources)
