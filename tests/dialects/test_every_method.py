"""Every method of the official Python clients that has a route here, each once in its plainest form, and the others as
typed errors. What a method does in depth is tested where docs/CLIENTS.md says."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from typing import Any

import openai
import pydantic
import pytest

from tests.api.clients import anthropic
from tests.api.serving import Served
from tests.dialects.conftest import KEY

ADD: Any = [{"role": "user", "content": "What is 17 + 25?"}]
GREEDY: Any = {"model": "demo", "temperature": 0, "max_tokens": 60}
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "Once", "max_tokens": 2},
}


class Sum(pydantic.BaseModel):
    """What a structured answer is parsed into."""

    value: int


def chat(gpt: openai.OpenAI) -> None:
    whole = gpt.chat.completions.create(messages=ADD, **GREEDY)
    with gpt.chat.completions.stream(messages=ADD, **GREEDY) as stream:
        folded = stream.get_final_completion()
    assert folded.choices[0].message.content == whole.choices[0].message.content
    raw = gpt.chat.completions.with_raw_response.create(messages=ADD, **GREEDY)
    assert raw.request_id and raw.parse().choices[0].message.content == whole.choices[0].message.content  # fmt: skip
    chunks = list(gpt.chat.completions.create(messages=ADD, stream=True, **GREEDY))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content  # fmt: skip


def chat_parse(gpt: openai.OpenAI) -> None:
    answer = gpt.chat.completions.parse(messages=ADD, response_format=Sum, **GREEDY)
    assert isinstance(answer.choices[0].message.parsed, Sum)


def completions(gpt: openai.OpenAI) -> None:
    whole = gpt.completions.create(prompt="Once upon", **GREEDY)
    chunks = gpt.completions.create(prompt="Once upon", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def embeddings(gpt: openai.OpenAI) -> None:
    coded = gpt.embeddings.create(model="demo", input=["one", "two"]).data
    plain = gpt.embeddings.create(model="demo", input=["one", "two"], encoding_format="float").data
    for a, b in zip(coded, plain, strict=True):
        assert a.embedding == pytest.approx(b.embedding, abs=1e-5)


def models(gpt: openai.OpenAI) -> None:
    assert [model.id for model in gpt.models.list()] == ["demo"]
    assert gpt.models.retrieve("demo").id == "demo"


def files(gpt: openai.OpenAI) -> None:
    data = (json.dumps(LINE) + "\n").encode()
    made = gpt.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    assert gpt.files.wait_for_processing(made.id).bytes == len(data)
    assert gpt.files.retrieve(made.id).filename == "in.jsonl"
    assert made.id in [file.id for file in gpt.files.list(purpose="batch")]
    assert gpt.files.content(made.id).read() == data
    assert gpt.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        gpt.files.retrieve(made.id)


def batches(gpt: openai.OpenAI) -> None:
    file = io.BytesIO((json.dumps(LINE) + "\n").encode())
    given = gpt.files.create(file=("in.jsonl", file), purpose="batch")
    made = gpt.batches.create(
        input_file_id=given.id, endpoint="/v1/completions", completion_window="24h"
    )
    assert made.id in [batch.id for batch in gpt.batches.list()]
    while (batch := gpt.batches.retrieve(made.id)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing")
        time.sleep(0.05)
    assert batch.output_file_id
    (answer,) = gpt.files.content(batch.output_file_id).text.splitlines()
    assert json.loads(answer)["response"]["body"]["object"] == "text_completion"
    with pytest.raises(openai.APIStatusError) as caught:
        gpt.batches.cancel(made.id)
    assert caught.value.status_code in (400, 409)


def responses(gpt: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "temperature": 0, "input": "What is 17 + 25?"}
    whole = gpt.responses.create(**asked)
    with gpt.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    last: Any = list(gpt.responses.create(stream=True, **asked))[-1]
    assert last.type == "response.completed" and last.response.output_text == whole.output_text
    assert gpt.responses.retrieve(whole.id).output_text == whole.output_text
    assert gpt.responses.input_items.list(whole.id).data
    assert gpt.responses.input_tokens.count(model="demo", input=asked["input"]).input_tokens > 5
    gpt.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(whole.id)


def responses_background(gpt: openai.OpenAI) -> None:
    made = gpt.responses.create(model="demo", input="Tell me a story.", background=True)
    events = list(gpt.responses.retrieve(made.id, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert gpt.responses.cancel(made.id).id == made.id


def responses_parse(gpt: openai.OpenAI) -> None:
    answer = gpt.responses.parse(
        model="demo", input="What is 17 + 25?", text_format=Sum, temperature=0
    )
    assert isinstance(answer.output_parsed, Sum)


def responses_compact(gpt: openai.OpenAI) -> None:
    made = gpt.responses.compact(
        model="demo", input="What is 17 + 25?", extra_body={"temperature": 0}
    )
    assert made.object == "response.compaction" and made.output


OPENAI: list[Callable[[openai.OpenAI], None]] = [
    *(chat, chat_parse, completions, embeddings, models, files, batches),
    *(responses, responses_background, responses_parse, responses_compact),
]


@pytest.mark.parametrize("method", OPENAI, ids=lambda f: f.__name__)
def test_openai(method: Callable[[openai.OpenAI], None], gpt: openai.OpenAI) -> None:
    method(gpt)


ASK: Any = {"model": "demo", "max_tokens": 60, "messages": ADD, "extra_body": {"temperature": 0}}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content)


def messages(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**ASK)
    with claude.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
    events = list(claude.messages.create(stream=True, **ASK))
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    assert claude.messages.count_tokens(model="demo", messages=ADD).input_tokens > 5


def messages_parse(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.parse(output_format=Sum, **ASK)
    assert isinstance(answer.parsed_output, Sum)


def beta_messages(claude: anthropic.Anthropic) -> None:
    asked = {**ASK, "betas": ["context-management-2025-06-27"]}
    whole = claude.beta.messages.create(**asked)
    with claude.beta.messages.stream(**asked) as stream:
        assert text_of(stream.get_final_message()) == text_of(whole)
    assert claude.beta.messages.count_tokens(model="demo", messages=ADD).input_tokens > 5


def beta_tools(claude: anthropic.Anthropic) -> None:
    """The client's own loop: it carries the calls out and asks again until there is none."""
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city.

        Args:
            city: The name of the city
        """
        asked.append(city)
        return json.dumps({"city": city, "temperature": 18, "condition": "sunny"})

    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    runner = claude.beta.messages.tool_runner(
        **{**ASK, "messages": question, "max_tokens": 300}, tools=[get_weather]
    )
    last = runner.until_done()
    assert asked == ["Paris"] and last.stop_reason == "end_turn"


def models_of_claude(claude: anthropic.Anthropic) -> None:
    assert [model.id for model in claude.models.list()] == ["demo"]
    assert claude.models.retrieve("demo").id == "demo"
    assert [model.id for model in claude.beta.models.list()] == ["demo"]


ANTHROPIC: list[Callable[[anthropic.Anthropic], None]] = [
    *(messages, messages_parse, beta_messages, beta_tools, models_of_claude),
]


@pytest.mark.parametrize("method", ANTHROPIC, ids=lambda f: f.__name__)
def test_anthropic(
    method: Callable[[anthropic.Anthropic], None], claude: anthropic.Anthropic
) -> None:
    method(claude)


NOT_OPENAI: dict[str, Callable[[openai.OpenAI], Any]] = {
    "moderations.create": lambda c: c.moderations.create(input="x"),
    "images.generate": lambda c: c.images.generate(prompt="x", model="demo"),
    "audio.speech.create": lambda c: c.audio.speech.create(model="demo", voice="a", input="x"),
    "fine_tuning.jobs.list": lambda c: c.fine_tuning.jobs.list(),
    "vector_stores.list": lambda c: c.vector_stores.list(),
    "uploads.create": lambda c: c.uploads.create(
        bytes=1, filename="a", mime_type="text/plain", purpose="batch"
    ),
    "evals.list": lambda c: c.evals.list(),
    "containers.list": lambda c: c.containers.list(),
    "chat.completions.list": lambda c: c.chat.completions.retrieve("chatcmpl-1"),
}


@pytest.mark.parametrize("name", NOT_OPENAI)
def test_what_is_not_served_is_a_typed_404(name: str, gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        NOT_OPENAI[name](gpt)
    assert caught.value.type == "not_found_error" and caught.value.request_id


NOT_ANTHROPIC: dict[str, Callable[[anthropic.Anthropic], Any]] = {
    "beta.files.list": lambda c: c.beta.files.retrieve_metadata("file_1"),
    "beta.skills.list": lambda c: c.beta.skills.list(),
}


@pytest.mark.parametrize("name", NOT_ANTHROPIC)
def test_what_anthropic_serves_alone_is_a_typed_404(name: str, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        NOT_ANTHROPIC[name](claude)
    assert caught.value.request_id


async def test_the_asynchronous_clients_are_the_same(bundled: Served) -> None:
    async with openai.AsyncOpenAI(base_url=bundled.url + "/v1", api_key=KEY) as gpt:
        answer = await gpt.chat.completions.create(messages=ADD, **GREEDY)
        stream = await gpt.chat.completions.create(messages=ADD, stream=True, **GREEDY)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answer.choices[0].message.content
    async with anthropic.AsyncAnthropic(base_url=bundled.url, api_key=KEY) as claude:
        async with claude.messages.stream(**ASK) as events:
            folded = await events.get_final_message()
        assert text_of(folded) == text_of(await claude.messages.create(**ASK))
