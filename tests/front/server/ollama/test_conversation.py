"""Ollama's requests as chats: options, calls without ids, thinking, and what a named model brings (BEY-43)."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import ServedModel
from headrace.front.server.conversation.resolved import Conversation
from headrace.front.server.http.limits import typed
from headrace.front.server.ollama.conversation import (
    TargetModel,
    to_completion,
    to_conversation,
)
from headrace.front.server.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from headrace.front.server.state.named_models import NamedModel

SERVED = ServedModel(
    names=("m",), generation_defaults={"temperature": 0.7}, max_n=4, max_model_len=100
)
SAID: Any = [{"role": "user", "content": "hi"}]
NAMED = NamedModel(
    name="bob",
    base="m",
    system="You are Bob.",
    parameters={"temperature": 0.1, "stop": ["4"], "num_predict": 9},
    messages=({"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}),
)


def chat(target: TargetModel | None = None, **fields: Any) -> Conversation:
    request = typed({"model": "m", "messages": SAID, **fields}, OllamaChatRequest)
    return to_conversation(request, SERVED, id="id", target=target or TargetModel(name="m"))


def prompted(target: TargetModel | None = None, **fields: Any) -> Conversation:
    request = typed({"model": "m", "prompt": "hi", **fields}, OllamaGenerateRequest)
    return to_conversation(request, SERVED, id="id", target=target or TargetModel(name="m"))


def test_options_are_sampling_parameters() -> None:
    options = {
        **{"temperature": 0.2, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3},
        **{"num_predict": 7, "repeat_penalty": 1.3, "presence_penalty": 0.5, "stop": ["a", "b"]},
        **{"mirostat": 2, "mirostat_tau": 4.0, "num_ctx": 100, "num_gpu": 99, "use_mmap": True},
    }
    params = chat(options=options).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.2, 5, 0.5, 0.1)
    assert (params.seed, params.max_tokens, params.stop) == (3, 7, ("a", "b"))
    assert (params.repetition_penalty, params.presence_penalty) == (1.3, 0.5)
    assert (params.mirostat, params.mirostat_tau) == (2, 4.0)
    plain = chat(options={"num_predict": -1, "seed": -1, "repeat_penalty": 1.3, "repeat_last_n": 0})
    assert (plain.params.max_tokens, plain.params.seed) == (None, None)
    assert (plain.params.temperature, plain.params.repetition_penalty) == (0.7, 1.0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"options": {"temperature": 9}}, "options.temperature"),
        ({"options": {"num_ctx": 101}}, "options.num_ctx"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"warmth": 1}}, "options"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"think": True}, "think"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{**SAID[0], "images": ["aGVs"]}]}, "messages[0].images"),
        ({"messages": [*SAID, {"role": "tool", "content": "5"}]}, "messages[1].tool_name"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content"),
    ],
)
def test_what_cannot_be_is_refused_by_its_own_name(fields: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.field == field and refused.value.message.startswith(field)


def test_results_of_tools_belong_to_the_calls_of_their_names() -> None:
    def call(name: str) -> Any:
        return {"function": {"name": name, "arguments": {"x": 1}}}

    said = [
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [call("f"), call("g")],
        },
        {"role": "tool", "tool_name": "g", "content": "of g"},
        {"role": "tool", "content": "of f"},
    ]
    _, assistant, first, second = chat(messages=[*SAID, *said]).prompt.messages
    ids = [one["id"] for one in assistant["tool_calls"]]
    assert len(set(ids)) == 2 and all(len(ident) == 9 and ident.isdigit() for ident in ids)
    assert [first["tool_call_id"], second["tool_call_id"]] == ids[::-1]
    assert assistant["reasoning_content"] == "hm"


def test_thinking_is_asked_of_the_template_and_refused_to_the_rest() -> None:
    thinker = TargetModel(name="m", thinks=True)
    assert chat(thinker, think=True).prompt.kwargs == {"enable_thinking": True}
    silent = chat(thinker, think=False)
    assert silent.prompt.kwargs == {"enable_thinking": False} and not silent.shows_reasoning
    assert chat(thinker, think="high").prompt.kwargs["reasoning_effort"] == "high"


def test_a_named_model_stands_in_front_and_gives_way() -> None:
    bob = TargetModel(name="m", named=NAMED)
    told = chat(bob)
    roles = [message["role"] for message in told.prompt.messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert told.prompt.messages[0]["content"] == "You are Bob."
    assert (told.params.temperature, told.params.max_tokens, told.params.stop) == (0.1, 9, ("4",))
    own = [{"role": "system", "content": "You are Eve."}, *SAID]
    other = chat(bob, messages=own, options={"temperature": 1.5})
    systems = [m["content"] for m in other.prompt.messages if m["role"] == "system"]
    assert systems == ["You are Eve."] and other.params.temperature == 1.5


def test_a_prompt_is_a_chat_unless_it_is_raw() -> None:
    sees = TargetModel(name="m", sees=True)
    resolved = prompted(sees, system="Be short.", images=["aGVs"])
    system, user = resolved.prompt.messages
    assert system == {"role": "system", "content": "Be short."}
    assert user == {"role": "user", "content": "hi", "images": ["aGVs"]}
    raw = typed({"prompt": "hi", "raw": True, "options": {"stop": "x"}}, OllamaGenerateRequest)
    translated = to_completion(raw, TargetModel(name="m"), max_model_len=100)
    assert translated.document == {"model": "m", "prompt": "hi", "max_tokens": 100}
    assert translated.stop == ("x",)
    for field, value in (("system", "s"), ("images", ["a"]), ("template", "t")):
        request = typed({"prompt": "a", "raw": True, field: value}, OllamaGenerateRequest)
        with pytest.raises(InvalidRequest, match=f"^{field}: does not go with raw"):
            to_completion(request, TargetModel(name="m"), max_model_len=100)
    with pytest.raises(InvalidRequest, match=r"^context: "):
        prompted(context=[1, 2])
    with pytest.raises(InvalidRequest, match="Go's template language"):
        prompted(template="{{ .System }} {{ .Prompt }}")


def test_a_schema_is_a_response_format() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    asked = chat(format=schema).form.asked
    assert asked is not None and asked.json == schema
    assert chat(format="json").form.asked is not None and chat(format="").form.asked is None
