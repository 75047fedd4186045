"""Structured output as clients see it: the official SDK, the real server, the bundled model."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.api.clients import openai_client
from tests.api.serving import NO_TLS
from tests.stopwatch import Stopwatch

ASK: Any = [{"role": "user", "content": "Make a JSON object with name Bob and age 30."}]
HELLO: Any = [{"role": "user", "content": "Hello! Who are you?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
        },
    },
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["x"],
        },
        "strict": True,
    },
}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai_client(base_url) as made:
        yield made


# Between two parts of a JSON document may stand a line break and 40 spaces, each maybe a token of its own: what is
# drawn under a schema gets as many tokens as the longest document of that schema takes, and ends whatever the draw.
ANY_ARRAY, ANY_CALL, ANY_PERSON = 400, 400, 2000


def chat(client: openai.OpenAI, messages: Any = ASK, **fields: Any) -> Any:
    fields = {"model": "headrace-demo", "max_tokens": 200, **fields}
    return client.chat.completions.create(messages=messages, **fields)


def structured(client: openai.OpenAI, **fields: Any) -> str:
    answer = chat(client, extra_body={"structured_outputs": fields}, max_tokens=ANY_ARRAY)
    assert answer.choices[0].finish_reason == "stop"
    content: str = answer.choices[0].message.content
    return content


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=8)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    pets: list[Pet] = Field(max_length=2)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_sdk_parses_an_answer_into_its_model(client: openai.OpenAI, temperature: float) -> None:
    parsed = client.chat.completions.parse(
        model="headrace-demo", messages=ASK, response_format=Person, max_tokens=ANY_PERSON,
        temperature=temperature, seed=3,
    )  # fmt: skip
    person = parsed.choices[0].message.parsed
    assert isinstance(person, Person) and parsed.choices[0].finish_reason == "stop"
    if temperature == 0:
        assert (person.name, person.age) == ("Bob", 30)


def test_the_sdks_stream_accumulates_the_same_model(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="headrace-demo", messages=ASK, response_format=Person, max_tokens=300, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    plain = chat(client, response_format=_format(Person), max_tokens=300, temperature=0)
    assert final.choices[0].message.content == plain.choices[0].message.content
    assert isinstance(final.choices[0].message.parsed, Person)


def _format(model: type[BaseModel]) -> Any:
    schema = model.model_json_schema()
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def test_json_object_gives_an_object(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, temperature=0)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_every_kind_of_structured_outputs(client: openai.OpenAI) -> None:
    """API-24."""
    assert structured(client, choice=["red", "green"]) in ("red", "green")
    assert re.fullmatch(r"[a-z]{3}-\d\d", structured(client, regex=r"[a-z]{3}-\d\d"))
    assert re.fullmatch(r"x[0-9]{3}", structured(client, grammar='start: "x" /[0-9]{3}/'))
    assert re.fullmatch("a[0-9]{2}b", structured(client, grammar='root ::= "a" [0-9]{2} "b"'))
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
    jsonschema.validate(json.loads(structured(client, json=schema)), schema)
    jsonschema.validate(json.loads(structured(client, json=json.dumps(schema))), schema)
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag", "begin": "<n>", "end": "</n>",
            "content": {"type": "regex", "pattern": "[0-9]{2}"},
        },
    }  # fmt: skip
    assert re.fullmatch("<n>[0-9]{2}</n>", structured(client, structural_tag=tag))


@pytest.mark.parametrize(
    "field",
    [{"guided_choice": ["yes", "no"]}, {"guided_regex": "yes|no"},
     {"guided_json": {"enum": ["yes", "no"]}}, {"guided_grammar": 'start: "yes" | "no"'}],
)  # fmt: skip
def test_the_old_names_still_work(client: openai.OpenAI, field: dict[str, Any]) -> None:
    answer = chat(client, extra_body=field)
    assert answer.choices[0].message.content.strip('"') in ("yes", "no")


def test_a_completion_can_be_structured_with_n_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="headrace-demo", prompt="Say", n=4, logprobs=2, temperature=1, seed=1, max_tokens=40,
        extra_body={"structured_outputs": {"choice": ["north", "south", "west"]}},
    )  # fmt: skip
    assert {choice.text for choice in answer.choices} <= {"north", "south", "west"}
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.finish_reason == "stop"
        assert "".join(choice.logprobs.tokens or []) == choice.text


def test_stop_strings_cut_a_structured_answer(client: openai.OpenAI) -> None:
    answer = chat(client, stop=["age"], response_format=_format(Person), temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content.startswith('{"name"')
    assert "age" not in answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_required_means_a_call_of_an_offered_tool(client: openai.OpenAI, stream: bool) -> None:
    asked: Any = {"tools": [WEATHER, ADD], "tool_choice": "required", "temperature": 0}
    name, arguments, reason = "", "", ""
    if stream:
        for chunk in chat(client, HELLO, stream=True, **asked):
            for choice in chunk.choices:
                assert not choice.delta.content
                reason = choice.finish_reason or reason
                for call in choice.delta.tool_calls or []:
                    if call.index == 0:
                        name += call.function.name or ""
                        arguments += call.function.arguments or ""
    else:
        choice = chat(client, HELLO, **asked).choices[0]
        reason, call = choice.finish_reason, choice.message.tool_calls[0]
        name, arguments = call.function.name, call.function.arguments
    tool = {"get_weather": WEATHER, "add": ADD}[name]
    if reason != "length":
        assert reason == "tool_calls"
        jsonschema.validate(json.loads(arguments), tool["function"]["parameters"])


def test_a_response_format_beside_a_forced_call_is_about_no_text(client: openai.OpenAI) -> None:
    asked: Any = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    choice = chat(client, HELLO, response_format={"type": "json_object"}, **asked).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "add" and choice.message.content is None


def test_a_forced_call_is_written_in_the_models_own_tokens(client: openai.OpenAI) -> None:
    """API-12: markup of a forced call is the token the model was trained on, so that the model stays what it is."""
    ask: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    body = {"return_token_ids": True}
    asked: Any = {"tools": [WEATHER, ADD], "temperature": 0, "extra_body": body}
    free = chat(client, ask, tool_choice="auto", **asked).choices[0]
    told = chat(client, ask, tool_choice="required", **asked).choices[0]
    assert told.finish_reason == "tool_calls"
    assert told.token_ids == free.token_ids
    told = chat(client, ask, tool_choice="required", logprobs=True, **asked).choices[0]
    assert told.token_ids == free.token_ids, "without jumps"


def test_a_named_tool_is_called_once_whatever_was_said(client: openai.OpenAI) -> None:
    for seed in range(4):
        choice = chat(
            client, HELLO, tools=[WEATHER, ADD], seed=seed, temperature=1, max_tokens=ANY_CALL,
            tool_choice={"type": "function", "function": {"name": "add"}},
        ).choices[0]  # fmt: skip
        (call,) = choice.message.tool_calls
        assert call.function.name == "add" and choice.message.content is None
        assert 0 <= json.loads(call.function.arguments)["x"] <= 999


def test_allowed_tools_narrow_what_may_be_called(client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = chat(
        client, HELLO, tools=[WEATHER, ADD], tool_choice=choice, parallel_tool_calls=False
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["add"]


def test_auto_with_strict_tools_leaves_the_choice_and_holds_the_arguments(
    client: openai.OpenAI,
) -> None:
    free = chat(client, HELLO, tools=[ADD], temperature=0).choices[0]
    assert free.message.content and not free.message.tool_calls
    strict: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    ask: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = chat(client, ask, tools=[strict], temperature=0).choices[0]
    (call,) = called.message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_the_grammar_begins_behind_the_reasoning(client: openai.OpenAI) -> None:
    """API-05, API-12: thinking is free, the answer is not; the budget ends the thinking."""
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    for budget in (None, 0, 3):
        body = {**thinking, "structured_outputs": {"choice": ["alpha", "beta"]}}
        if budget is not None:
            body["thinking_token_budget"] = budget
        answer = chat(client, HELLO, extra_body=body, temperature=0)
        assert answer.choices[0].message.content in ("alpha", "beta")
        reasoning = answer.usage.completion_tokens_details.reasoning_tokens
        if budget is not None:
            assert reasoning <= budget + 4, "the tag itself may be several tokens"


def test_all_of_it_at_once_streamed_and_in_full(client: openai.OpenAI) -> None:
    """API-12: thinking with a budget, a schema, tools beside it, a stop text, two choices with log-probabilities."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
    }
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    wanted = {"name": "person", "schema": schema, "strict": True}
    fields: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": wanted},
        "tools": [strict],
        "parallel_tool_calls": False,
        "max_tokens": ANY_PERSON,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["@@never@@"],
        "temperature": 1.0,
        "seed": 5,
        "extra_body": {
            "chat_template_kwargs": {"enable_thinking": True},
            "thinking_token_budget": 6,
        },
    }
    full = chat(client, **fields)
    assert full.usage.completion_tokens_details.reasoning_tokens <= 2 * (6 + 4)
    folded: dict[int, list[str]] = {0: ["", "", ""], 1: ["", "", ""]}
    for chunk in chat(client, stream=True, **fields):
        for choice in chunk.choices:
            said = folded[choice.index]
            said[0] += choice.delta.content or ""
            said[1] += getattr(choice.delta, "reasoning", None) or ""
            said[2] += "".join(c.function.arguments or "" for c in choice.delta.tool_calls or [])
    for choice in full.choices:
        message = choice.message
        calls = message.tool_calls or []
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        if calls:
            assert all(set(json.loads(call.function.arguments)) == {"city"} for call in calls)
        else:
            found = json.loads(message.content)
            jsonschema.validate(found, {**schema, "additionalProperties": False})
        assert choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        arguments = "".join(call.function.arguments for call in calls)
        assert folded[choice.index] == [message.content or "", message.reasoning or "", arguments]


def test_a_budget_alone_shortens_the_thinking(client: openai.OpenAI) -> None:
    ask: Any = [{"role": "user", "content": "What is 17 + 25?"}]
    body = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 2}
    answer = chat(client, ask, extra_body=body, temperature=0)
    assert answer.usage.completion_tokens_details.reasoning_tokens <= 4
    assert answer.choices[0].message.content


def test_reasoning_can_be_left_out_of_the_answer(client: openai.OpenAI) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    seen = chat(client, HELLO, extra_body=body, temperature=0)
    unseen = chat(client, HELLO, extra_body={**body, "include_reasoning": False}, temperature=0)
    assert seen.choices[0].message.reasoning
    assert "reasoning" not in unseen.choices[0].message.model_extra
    assert unseen.choices[0].message.content == seen.choices[0].message.content
    assert unseen.usage == seen.usage


def test_an_effort_turns_thinking_on_and_none_turns_it_off(client: openai.OpenAI) -> None:
    on = chat(client, HELLO, reasoning_effort="high", temperature=0)
    off = chat(client, HELLO, reasoning_effort="none", temperature=0)
    assert on.usage.completion_tokens_details.reasoning_tokens > 0
    assert off.usage.completion_tokens_details.reasoning_tokens == 0


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needed"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {
        "a": {"not": {}}}}}}}, "response_format.json_schema.schema", ":/properties/a/not"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "int"}}}},
     "response_format.json_schema.schema", "'int'"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed"),
    ({"structured_outputs": {"regex": "a" * 9000}}, "structured_outputs.regex", "8192"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "nothing"),
    ({"structured_outputs": {"json": {"enum": list(range(5000))}}}, "structured_outputs.json",
     "4096"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "response_format", "excludes"),
    ({"structured_outputs": {"regex": "a"}, "use_beam_search": True, "n": 2},
     "structured_outputs", "beam"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
     "tool_choice", "'sub'"),
    ({"tools": [ADD], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
     "tool_choice", "excludes"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
      "tool_choice": "required"}, "tools[0].function.parameters", "not"),
]  # fmt: skip


@pytest.mark.serial
@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_is_refused_by_name_and_soon(
    base_url: str, fields: dict[str, Any], param: str, words: str
) -> None:
    body = {"messages": HELLO, "max_tokens": 20, **fields}
    watch = Stopwatch()
    answer = httpx.post(base_url + "/v1/chat/completions", json=body, timeout=300, verify=NO_TLS)
    undisturbed_s = watch.undisturbed_s
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert words in error["message"] and error["message"].startswith(param.split(".")[0])
    assert undisturbed_s < 5.0


def test_bad_schemas_of_one_client_hold_up_nobody(base_url: str) -> None:
    """REG-109, BEY-21: others stream on while one sends what cannot or should not be compiled."""
    bombs: list[Any] = [
        {"structured_outputs": {"regex": "((a{1,900}){1,900}){1,900}b"}},
        {"structured_outputs": {"json": {"enum": [f"{i}-{'y' * 20}" for i in range(4000)]}}},
        {"structured_outputs": {"regex": "(a" * 500}},
        {"guided_grammar": 'start: ("a"|"b"|"c"){0,9999} "d"'},
    ]

    def send(fields: dict[str, Any]) -> int:
        body = {"messages": HELLO, "max_tokens": 5, **fields}
        return httpx.post(
            base_url + "/v1/chat/completions", json=body, timeout=600, verify=NO_TLS
        ).status_code

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        attacks = [pool.submit(send, bomb) for bomb in bombs * 4]
        plain = [pool.submit(send, {}) for _ in range(8)]
        assert {one.result() for one in plain} == {200}
        # 503: the machine is too busy to tell whether it is the grammar that takes so long
        assert {one.result() for one in attacks} <= {200, 400, 503}
    assert httpx.get(base_url + "/health", verify=NO_TLS, timeout=300).status_code == 200


@pytest.mark.slow
def test_fuzzed_structures_never_give_a_server_error(base_url: str) -> None:
    """P7, P12: whatever stands in these fields is the sender's error, or works."""
    import random

    random_ = random.Random(7)
    values: list[Any] = [None, 0, -1, 1.5, "", "x", [], {}, [[]], {"type": "object"}, True, "\ud800",
                         {"type": "json_schema"}, {"json_schema": 1}, ["a", 1], {"a" * 300: {}},
                         {"$ref": "#"}, {"type": ["string", 3]}, '{"type":', "(" * 400]  # fmt: skip
    keys = ["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
            "guided_grammar", "tools", "tool_choice", "thinking_token_budget",
            "reasoning_effort"]  # fmt: skip
    inner = ["json", "regex", "choice", "grammar", "structural_tag", "json_object", "type",
             "json_schema", "schema", "function", "name", "parameters"]  # fmt: skip

    def value(depth: int) -> Any:
        if depth and random_.random() < 0.5:
            return {random_.choice(inner): value(depth - 1) for _ in range(random_.randint(1, 2))}
        return random_.choice(values)

    statuses = []
    with httpx.Client(base_url=base_url, timeout=300, verify=NO_TLS) as http:
        for _ in range(250):
            chosen = random_.sample(keys, random_.randint(1, 2))
            body = {"messages": HELLO, "max_tokens": 3, **{key: value(3) for key in chosen}}
            statuses.append(
                http.post("/v1/chat/completions", content=json.dumps(body),
                          headers={"content-type": "application/json"}).status_code
            )  # fmt: skip
    assert set(statuses) <= {200, 400}, sorted(set(statuses))
    assert statuses.count(400) > 50


@pytest.mark.slow
def test_scripts_have_it_too() -> None:
    """`LLM`: the same field of SamplingParams."""
    from headrace import LLM, SamplingParams, StructuredOutputs

    with LLM(max_running=4) as llm:
        asked = StructuredOutputs(choice=("left", "right"))
        outputs = llm.generate(
            ["Turn", "Go"], SamplingParams(structured_outputs=asked, n=2), progress=False
        )
        texts = [answer.text for output in outputs for answer in output.outputs]
        assert len(texts) == 4 and set(texts) <= {"left", "right"}
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                  "additionalProperties": False}  # fmt: skip
        # No max_tokens: see ANY_PERSON.
        params = SamplingParams(structured_outputs=StructuredOutputs(json=schema))
        answer = llm.chat([{"role": "user", "content": "JSON please"}], params, progress=False)
        assert answer[0].outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer[0].text), schema)
