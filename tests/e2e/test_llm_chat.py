"""LLM.chat on the bundled model: what it thinks, says and asks for are told apart."""

from __future__ import annotations

import json

from headrace import LLM, SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def test_reasoning_and_calls_are_not_text() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=120)
    with LLM(max_running=4) as llm:
        (asked,) = llm.chat(
            [{"role": "user", "content": "What is the weather in Paris?"}],
            greedy,
            tools=[WEATHER],
            progress=False,
        )
        (call,) = asked.outputs[0].tool_calls
        assert call.name == "get_weather" and json.loads(call.arguments)["city"] == "Paris"
        assert "tool_call" not in asked.text
        (thought,) = llm.chat(
            [{"role": "user", "content": "What is 17 + 25?"}],
            greedy,
            template_arguments={"enable_thinking": True},
            progress=False,
        )
        assert "42" in thought.text and "think>" not in thought.text + thought.outputs[0].reasoning
        assert "carry" in thought.outputs[0].reasoning or "42" in thought.outputs[0].reasoning
