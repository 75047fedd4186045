"""Tool calls: which function to call, with which arguments, and what to say when the result is in.

Half of the tools are fixed, with natural requests; the other half is made up on the spot from verbs,
nouns and typed parameters, so the model learns to read the tools it is given rather than to know
them.
"""
# ruff: noqa: SIM905 - a word list reads best as text

from __future__ import annotations

import json
from random import Random

from demo.tasks import words
from demo.tasks.item import (
    Conversation,
    FunctionCall,
    Message,
    Tool,
    answer,
    user,
)
from demo.tasks.json_objects import field_value
from demo.tasks.tool_catalog import CATALOG, KnownTool
from headrace.bench.held_out import AnswerCheck

_INVENTED_FIELDS = (
    "name age city color animal fruit job size count active day language room level score owner "
    "key label id title user year"
).split()
_INVENTED_ASKS = (
    "Call {f} with {a}.", "Please call {f} with {a}.", "Use {f} with {a}.", "Run {f} with {a}.",
    "{v} the {n} with {a}.", "I want to {v} a {n} with {a}.", "Can you {v} the {n} with {a}?",
    "Please {v} the {n}: {a}.", "Use the tool {f}: {a}.",
)  # fmt: skip


def tool_call(rng: Random) -> Conversation:
    """One or two calls of the right function with the right arguments."""
    if rng.random() < 0.4:
        request, calls, tool = _invented_request(rng)
        offered = [tool]
    else:
        known = rng.choice(CATALOG)
        request, calls = _known_request(rng, known)
        offered = [known.tool]
    tools = _offer(rng, offered)
    expected = json.loads(json.dumps(calls))
    return Conversation(
        task="tool_call",
        messages=[user(request), _calling(calls)],
        keys=(request,),
        expected=expected,
        check=AnswerCheck.TOOL_CALL,
        tools=tools,
        plain=False,
    )


def tool_answer(rng: Random) -> Conversation:
    """The call, its result from the role `tool`, and the answer that uses the result."""
    known = rng.choice([known for known in CATALOG if known.result])
    arguments = known.draw(rng)
    request = rng.choice(known.asks).format(**arguments)
    result, text = known.results(rng, arguments)
    calls: list[FunctionCall] = [{"name": known.name, "arguments": known.shown(arguments)}]
    messages: list[Message] = [
        user(request),
        _calling(calls),
        {"role": "tool", "content": json.dumps(result, ensure_ascii=False)},
        answer(text, "The tool gave me the result."),
    ]
    return Conversation(
        task="tool_answer",
        messages=messages,
        keys=(request + text, request),
        tools=_offer(rng, [known.tool]),
        plain=False,
    )


def with_unused_tools(rng: Random, conversation: Conversation) -> Conversation:
    """The same question with tools at hand that do not help."""
    from dataclasses import replace

    known = [tool for tool in CATALOG if tool.name != "calculator"]
    tools = [tool.tool for tool in rng.sample(known, rng.randint(1, 3))]
    return replace(conversation, tools=tools, plain=False)


def _calling(calls: list[FunctionCall]) -> Message:
    names = " and ".join(dict.fromkeys(call["name"] for call in calls))
    message = answer("", f"I call {names}.")
    message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return message


def _offer(rng: Random, offered: list[Tool]) -> list[Tool]:
    taken = {_name(tool) for tool in offered}
    for _ in range(rng.randint(0, 3)):
        other = rng.choice(CATALOG).tool if rng.random() < 0.6 else _invent(rng)[0]
        if _name(other) not in taken:
            taken.add(_name(other))
            offered.append(other)
    rng.shuffle(offered)
    return offered


def _name(tool: Tool) -> str:
    function = tool["function"]
    assert isinstance(function, dict)
    return str(function["name"])


def _known_request(rng: Random, known: KnownTool) -> tuple[str, list[FunctionCall]]:
    arguments = known.draw(rng)
    calls: list[FunctionCall] = [{"name": known.name, "arguments": known.shown(arguments)}]
    request = rng.choice(known.asks).format(**arguments)
    if known.pairs and rng.random() < 0.2:
        other = known.draw(rng)
        if other != arguments:
            request = rng.choice(known.pairs).format(a=arguments, b=other)
            calls.append({"name": known.name, "arguments": known.shown(other)})
    return _soften(rng, request), calls


def _soften(rng: Random, request: str) -> str:
    kind = rng.random()
    if kind < 0.1:
        return "Please " + request[0].lower() + request[1:]
    if kind < 0.15:
        return "Hi! " + request
    if kind < 0.2:
        return request + " Thanks!"
    return request


def _invented_request(rng: Random) -> tuple[str, list[FunctionCall], Tool]:
    tool, verb, noun, names = _invent(rng)
    arguments = {name: field_value(rng, name) for name in names}
    form = rng.choice(("{k} {v}", "{k}={v}", "{k} = {v}", "{k} set to {v}"))
    parts = [
        form.format(k=k, v=json.dumps(v) if isinstance(v, bool) else v)
        for k, v in arguments.items()
    ]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    ask = rng.choice(_INVENTED_ASKS).format(f=_name(tool), v=verb, n=noun, a=listed)
    request = ask[0].upper() + ask[1:] if not ask.startswith(_name(tool)) else ask
    return request, [{"name": _name(tool), "arguments": arguments}], tool


def _invent(rng: Random) -> tuple[Tool, str, str, list[str]]:
    verb, noun = rng.choice(words.VERBS), rng.choice(words.EVERY_NOUN)
    names = rng.sample(_INVENTED_FIELDS, rng.randint(1, 4))
    properties: dict[str, object] = {}
    for name in names:
        value = field_value(rng, name)
        kind = {bool: "boolean", int: "integer", float: "number"}.get(type(value), "string")
        properties[name] = {"type": kind}
        if rng.random() < 0.5:
            properties[name] = {"type": kind, "description": f"The {name} of the {noun}"}
    tool: Tool = {
        "type": "function",
        "function": {
            "name": f"{verb}_{noun}",
            "description": rng.choice((f"{verb.capitalize()} the {noun}", f"{verb} a {noun}.")),
            "parameters": {"type": "object", "properties": properties, "required": names},
        },
    }
    return tool, verb, noun, names
