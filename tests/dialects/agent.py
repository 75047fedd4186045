"""A small agent's tools: offered in each dialect's own shape, carried out by plain functions."""

from __future__ import annotations

import json
import random
from typing import Any

from demo.tasks.tool_catalog import CATALOG

TOOLS = {
    tool.name: tool for tool in CATALOG if tool.name in ("get_weather", "get_time", "set_light")
}
QUESTIONS = [
    ("What is the weather in Paris?", "get_weather"),
    ("What time is it in Berlin?", "get_time"),
    ("What is the weather in Rome?", "get_weather"),
]


def carry_out(name: str, arguments: dict[str, Any]) -> str:
    """The tool's result as JSON."""
    result, _ = TOOLS[name].results(random.Random(1), arguments)
    return json.dumps(result)


def functions() -> list[dict[str, Any]]:
    return [dict(tool.tool["function"]) for tool in TOOLS.values()]


def for_messages() -> Any:
    """The tools as the Anthropic dialect has them."""
    return [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in functions()
    ]


def for_responses() -> Any:
    """The tools as the Responses dialect has them."""
    return [{"type": "function", **function} for function in functions()]
