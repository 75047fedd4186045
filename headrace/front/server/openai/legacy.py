"""`functions` and `function_call`, as tools were called before: the request as one with tools, the answer under the old
names. One call at most is answered, and only a request that sent `functions` is answered so.

In the history a call has no id there; it gets its place as one, in the nine digits that every template takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.front.client.events import Events
from headrace.front.server.openai.schema import ChatRequest, FunctionName
from headrace.front.server.parsed import ParsedDelta, ParsedEnded
from headrace.front.text.parsing.parts import CallArguments, CallBegin, Part

Json = dict[str, Any]
_CALLS = frozenset({"function_call", "tool_calls"})
SENT_AS = {"tools": "functions", "tool_choice": "function_call"}
"""What the fields of the request with tools are called in the request as it was sent."""


class FunctionBegin(CallBegin, frozen=True):
    """The call begins."""


class FunctionArguments(CallArguments, frozen=True):
    """More of its arguments."""


class FunctionEnded(ParsedEnded, frozen=True, kw_only=True):
    """The end of a choice that may have called a function."""


def without_calls(request: ChatRequest) -> bool:
    """Whether neither tools nor calls stand in the request, under old names or new ones."""
    said = any(_CALLS & m.keys() or m.get("role") == "function" for m in request.messages)
    return not (said or request.tools or request.functions or request.function_call)


def with_tools(request: ChatRequest) -> ChatRequest:
    """The request with tools in the place of functions; `functions` stays, as the mark of how to answer."""
    if any(_is_old(message) for message in request.messages):
        request = msgspec.structs.replace(request, messages=_messages(request.messages))
    if request.functions is None:
        if request.function_call not in (None, "none"):
            raise InvalidRequest(
                "function_call: allowed only together with functions", field="function_call"
            )
        return request
    if request.tools is not None or request.tool_choice is not None:
        raise InvalidRequest(
            "functions: does not go with tools and tool_choice; send one kind", field="functions"
        )
    choice: Any = request.function_call
    if isinstance(choice, FunctionName):
        choice = {"type": "function", "function": {"name": choice.name}}
    tools = [_tool(function, f"functions[{i}]") for i, function in enumerate(request.functions)]
    return msgspec.structs.replace(
        request, tools=tools, tool_choice=choice, parallel_tool_calls=False
    )


def _tool(function: Json, at: str) -> Json:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{at}.name: a text is needed", field=f"{at}.name")
    return {"type": "function", "function": function}


def _is_old(message: Json) -> bool:
    return message.get("role") == "function" or message.get("function_call") is not None


def _messages(given: Sequence[Json]) -> list[Json]:
    """Calls and their results as calls of tools and their results."""
    made: list[Json] = []
    called: list[tuple[str, str]] = []  # name and id of calls without a result so far
    for i, message in enumerate(given):
        call, ident = message.get("function_call"), f"{i:09d}"
        if message.get("role") == "function":
            name = message.get("name")
            if not isinstance(name, str) or not name:
                at = f"messages[{i}].name"
                raise InvalidRequest(f"{at}: the name of the function is needed", field=at)
            found = next((each for each in called if each[0] == name), (name, ident))
            called = [each for each in called if each is not found]
            content = message.get("content")
            message = {**message, "role": "tool", "tool_call_id": found[1]}
            message["content"] = "" if content is None else content
        elif call is not None:
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or message.get("role") != "assistant":
                at = f"messages[{i}].function_call"
                raise InvalidRequest(
                    f"{at}: an object with name and arguments, in a message of the assistant, is needed",
                    field=at,
                )
            called.append((name, ident))
            message = {key: value for key, value in message.items() if key != "function_call"}
            message["tool_calls"] = [{"id": ident, "type": "function", "function": call}]
        made.append(message)
    return made


async def as_function_calls(events: Events) -> Events:
    """The events with the call marked as one that is answered under the old names."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, ParsedDelta):
                parts = [_marked(part) for part in event.parts]
                event = msgspec.structs.replace(event, parts=parts)
            elif isinstance(event, ParsedEnded):
                event = FunctionEnded(**msgspec.structs.asdict(event))
            yield event


def _marked(part: Part) -> Part:
    if isinstance(part, CallBegin):
        return FunctionBegin(part.index, part.id, part.name)
    return FunctionArguments(part.index, part.text) if isinstance(part, CallArguments) else part
