"""Frameworks that people put between themselves and a server, each in the ways it can ask.

    headrace serve --port 8000 --api-keys KEY --served-model-name demo
    python -m tests.frameworks.check http://127.0.0.1:8000 KEY [langchain agents instructor pydantic_ai litellm lm_eval]

By hand, in an environment of their own: they exclude each other's versions of the official clients and are too many to
install for every change. The bundled model answers; a check that its answer decides is one that it was trained for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pydantic

MODEL = "demo"
SUM, WEATHER = "What is 17 + 25?", "What is the weather in Paris?"
ANN = "A person named Ann, aged 30."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Person(pydantic.BaseModel):
    """What structured answers are read into."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    assert city, "the call names a city"
    return json.dumps({"city": city, "temperature": 21, "condition": "sunny"})


def langchain(url: str, key: str) -> None:
    """Chat, Responses and Messages: whole, streamed, with tools, structured, in an agent's loop; embeddings."""
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    base: dict[str, Any] = {"model": MODEL, "base_url": f"{url}/v1", "api_key": key}
    claude: dict[str, Any] = {**base, "base_url": url, "max_tokens": 200}
    weather = tool(get_weather)
    models = [ChatOpenAI(**base, temperature=0, use_responses_api=flag) for flag in (False, True)]
    for model in (*models, ChatAnthropic(**claude, temperature=0)):
        answer = model.invoke(SUM)
        assert answer.text == "42" and answer.usage_metadata["output_tokens"] > 0
        assert "".join(chunk.text for chunk in model.stream(SUM)) == "42"
        for choice in (None, "any"):
            (call,) = model.bind_tools([weather], tool_choice=choice).invoke(WEATHER).tool_calls
            assert call["args"] == {"city": "Paris"}
        assert model.with_structured_output(Person).invoke(ANN).age == 30
        seen = create_agent(model, [weather]).invoke({"messages": [("user", WEATHER)]})["messages"]
        assert [message.type for message in seen] == ["human", "ai", "tool", "ai"]
    assert models[0].with_structured_output(Person, method="function_calling").invoke(ANN).age == 30
    assert isinstance(OpenAI(**base, max_tokens=8).invoke("Once upon"), str)
    embeddings = OpenAIEmbeddings(**base, check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["a", "b"])) == 2


def agents(url: str, key: str) -> None:
    """OpenAI's agents: turns with a tool over both dialects, whole and streamed; a typed result."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    settings = ModelSettings(temperature=0)

    async def run(kind: Any) -> None:
        model = kind(MODEL, AsyncOpenAI(base_url=f"{url}/v1", api_key=key))
        tools: Any = [function_tool(get_weather)]
        agent = Agent("weather", model=model, tools=tools, model_settings=settings)
        whole = await Runner.run(agent, WEATHER, max_turns=4)
        kinds = [item.type for item in whole.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        streamed = Runner.run_streamed(agent, WEATHER, max_turns=4)
        assert [event.type async for event in streamed.stream_events()]
        assert streamed.final_output == whole.final_output
        typed = Agent("person", model=model, output_type=Person, model_settings=settings)
        assert (await Runner.run(typed, ANN)).final_output.age == 30

    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        asyncio.run(run(kind))


def instructor(url: str, key: str) -> None:
    """Typed answers by its modes for OpenAI's clients."""
    import instructor as library
    import openai

    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
        plain = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
        client = library.from_openai(plain, mode=getattr(library.Mode, mode))
        found: Any = client.chat.completions.create(
            model=MODEL,
            response_model=Person,
            temperature=0,
            max_retries=1,
            messages=[{"role": "user", "content": ANN}],
        )
        assert found.age == 30


def pydantic_ai(url: str, key: str) -> None:
    """Agents with a tool and with a typed result over the three dialects."""
    import anthropic
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    gpt = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    claude = AnthropicProvider(anthropic_client=anthropic.AsyncAnthropic(base_url=url, api_key=key))
    models = [
        OpenAIChatModel(MODEL, provider=gpt),
        OpenAIResponsesModel(MODEL, provider=gpt),
        AnthropicModel(MODEL, provider=claude),
    ]
    for model in models:
        seen = Agent(model, tools=[get_weather], model_settings={"temperature": 0})
        parts = [p for m in seen.run_sync(WEATHER).all_messages() for p in m.parts]
        assert "tool-return" in [part.part_kind for part in parts]
        assert Agent(model, output_type=Person).run_sync(ANN).output.age == 30


def litellm(url: str, key: str) -> None:
    """Its routes to servers of this kind: whole, streamed, tools, Responses, embeddings, rerank, errors."""
    import litellm as library

    library.suppress_debug_info = True
    asked: dict[str, Any] = {"api_key": key, "temperature": 0, "max_tokens": 60, "num_retries": 0}
    base: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": key}

    def said(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    for kind, at in (("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", "")):
        here = {"model": f"{kind}/{MODEL}", "api_base": url + at, **asked}
        whole = library.completion(messages=said(SUM), **here)
        assert whole.choices[0].message.content == "42"
        chunks = library.completion(messages=said(SUM), stream=True, **here)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "42"
        (call,) = (
            library.completion(messages=said(WEATHER), tools=[TOOL], **here)
            .choices[0]
            .message.tool_calls
        )
        assert json.loads(call.function.arguments) == {"city": "Paris"}
    found = library.responses(model=f"openai/{MODEL}", input=SUM, **base)
    assert found.output[-1].content[0].text == "42"
    assert library.embedding(model=f"openai/{MODEL}", input=["a"], **base).data[0]["embedding"]
    ranked = library.rerank(model=f"hosted_vllm/{MODEL}", query="a", documents=["b", "a"], **base)
    assert ranked.results[0]["index"] == 1
    for model, text, error in (
        ("other", SUM, library.NotFoundError),
        (MODEL, "a b " * 20_000, library.BadRequestError),
    ):
        try:
            library.completion(messages=said(text), **{**asked, **base, "model": f"openai/{model}"})
        except error:
            continue
        raise AssertionError(f"{error.__name__} was due")


def lm_eval(url: str, key: str) -> None:
    """The evaluation harness: log-likelihoods from ids and from text, and generated answers."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    os.environ["OPENAI_API_KEY"] = key
    at = {"model": MODEL, "base_url": f"{url}/v1/completions", "tokenizer": "demo/model"}
    pairs = [("Once upon a", " time"), ("Once upon a", " zebra")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    by_ids, by_text = (
        LocalCompletionsAPI(**at, tokenized_requests=ids).loglikelihood(asked)
        for ids in (True, False)
    )
    assert by_ids == by_text and by_ids[0][0] > by_ids[1][0]
    chat = JsonChatStr(json.dumps([{"role": "user", "content": SUM}]))
    ending = {"until": ["."], "max_gen_toks": 20, "temperature": 0}
    client = LocalChatCompletion(model=MODEL, base_url=f"{url}/v1/chat/completions")
    assert client.generate_until([Instance("generate_until", {}, (chat, ending), 0)]) == ["42"]


CHECKS: dict[Callable[[str, str], None], tuple[str, ...]] = {
    langchain: ("langchain", "langchain-openai", "langchain-anthropic"),
    agents: ("openai-agents",),
    instructor: ("instructor",),
    pydantic_ai: ("pydantic-ai-slim",),
    litellm: ("litellm",),
    lm_eval: ("lm-eval",),
}


def main(url: str, key: str, *names: str) -> int:
    """Runs the checks of these names, or of what is installed; 1 if one failed."""
    warnings.simplefilter("ignore")
    failed = 0
    for check, packages in CHECKS.items():
        try:
            versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
        except metadata.PackageNotFoundError as missing:
            if check.__name__ in names:
                raise
            print(f"{check.__name__}: not checked, {missing.name} is not installed")
            continue
        if names and check.__name__ not in names:
            continue
        try:
            check(url, key)
            print(f"{versions}: passed", flush=True)
        except Exception as error:
            failed = 1
            print(f"{versions}: FAILED: {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
