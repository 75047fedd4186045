"""Custom tools: the model is given a function with one text argument; the client sees the text alone.

Their input goes out whole: it is a text inside JSON, and known once the JSON is. A regular expression for it is held
to, as a strict function's schema is; a Lark grammar is told in words, for no schema can say it of a text inside JSON.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import Any

import msgspec
import orjson

from headrace.base.errors import InvalidRequest
from headrace.front.client.events import Events
from headrace.front.server.openai.schema import ChatRequest
from headrace.front.server.parsed import ParsedDelta, ParsedEnded
from headrace.front.text.parsing.parts import CallArguments, CallBegin, CallEnd, Part

CUSTOM_ARGUMENT = "input"
Json = dict[str, Any]


class CustomBegin(CallBegin, frozen=True):
    """A call of a custom tool begins."""


class CustomInput(CallArguments, frozen=True):
    """The whole input of a custom tool's call, or as much of it as there is."""


def custom_function(name: str, description: str | None, form: Any) -> Json:
    """The function that stands for a custom tool, whose input has this form."""
    if isinstance(form, dict) and form.get("type") == "grammar":
        form = form.get("grammar") or form
    argument = {"type": "string"}
    strict = None
    if isinstance(form, dict) and isinstance(form.get("definition"), str) and form["definition"]:
        definition = form["definition"]
        description = f"{description or ''}\nThe input follows this grammar:\n{definition}".strip()
        if form.get("syntax") == "regex":
            argument["pattern"], strict = f"^(?:{definition})$", True
    schema = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: argument},
        "required": [CUSTOM_ARGUMENT],
    }
    made = {"name": name, "description": description, "parameters": schema, "strict": strict}
    return {key: value for key, value in made.items() if value is not None}


def custom_input(arguments: str) -> str:
    """The free text inside a custom tool's arguments; what is no such object is the text itself."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = found.get(CUSTOM_ARGUMENT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


_HEAD = re.compile(r'\s*\{\s*"' + CUSTOM_ARGUMENT + r'"\s*:\s*"')
_LONGEST_ESCAPE = len("\\ud83d\\ude00")


def cut_input(arguments: str) -> str:
    """The free text inside a custom tool's arguments that were cut off: as far as it had come, nothing of the JSON."""
    head = _HEAD.match(arguments)
    if head is None:
        return "" if arguments.lstrip()[:1] in ("", "{") else arguments
    rest = arguments[head.end() :]
    for missing in range(min(len(rest), _LONGEST_ESCAPE) + 1):  # the cut may be inside an escape
        text = '"' + rest[: len(rest) - missing]
        for whole in (text + '"', text):  # or behind the text
            with contextlib.suppress(orjson.JSONDecodeError):
                found: str = orjson.loads(whole)
                return found
    return ""


def with_functions(request: ChatRequest) -> tuple[ChatRequest, frozenset[str]]:
    """The request with functions in the place of custom tools and of their earlier calls, and the tools' names."""
    given = request.tools or []
    messages = request.messages
    if any(_is_custom(call) for message in messages for call in _calls(message)):
        messages = [_as_message(message) for message in messages]
        request = msgspec.structs.replace(request, messages=messages)
    tools = [_as_function(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    names = frozenset(
        made["function"]["name"]
        for made, tool in zip(tools, given, strict=True)
        if made is not tool
    )
    if not names:
        return request, names
    choice = request.tool_choice
    if isinstance(choice, dict):
        choice = _as_choice(choice)
    return msgspec.structs.replace(request, tools=tools, tool_choice=choice), names


def _as_function(tool: Json, at: str) -> Json:
    given = tool.get("custom")
    if tool.get("type") != "custom" or not isinstance(given, dict):
        return tool
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{at}.custom.name: a text is needed", field=f"{at}.custom.name")
    function = custom_function(name, given.get("description"), given.get("format"))
    return {"type": "function", "function": function}


def _as_choice(choice: Json) -> Json:
    if choice.get("type") == "custom" and isinstance(choice.get("custom"), dict):
        return {"type": "function", "function": {"name": choice["custom"].get("name")}}
    allowed = choice.get("allowed_tools")
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        tools = [_as_choice(tool) if isinstance(tool, dict) else tool for tool in allowed["tools"]]
        return {**choice, "allowed_tools": {**allowed, "tools": tools}}
    return choice


def _calls(message: Json) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _is_custom(call: Any) -> bool:
    given = call.get("custom") if isinstance(call, dict) else None
    return isinstance(given, dict) and isinstance(given.get("input"), str)


def _as_message(message: Json) -> Json:
    calls = _calls(message)
    return {**message, "tool_calls": [_as_call(call) for call in calls]} if calls else message


def _as_call(call: Any) -> Any:
    if not _is_custom(call):
        return call
    given = call["custom"]
    arguments = orjson.dumps({CUSTOM_ARGUMENT: given["input"]}).decode()
    function = {"name": given.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


async def customized(events: Events, names: Collection[str]) -> Events:
    """The events with the calls of custom tools marked as such, each with its input in one part."""
    held: dict[int, _Held] = {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, ParsedDelta):
                mine = held.setdefault(event.index, _Held(names))
                event = msgspec.structs.replace(event, parts=mine.take(event.parts))
            elif isinstance(event, ParsedEnded) and event.index in held:
                rest, thought = held.pop(event.index).rest(cut_input), event.num_reasoning
                yield ParsedDelta(index=event.index, text="", parts=rest, num_reasoning=thought)
            yield event


class _Held:
    """The open call of one choice, if it is a custom tool's."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._call: int | None = None
        self._texts: list[str] = []

    def take(self, parts: list[Part]) -> list[Part]:
        """The parts as they go out."""
        made: list[Part] = []
        for part in parts:
            if isinstance(part, CallBegin):
                made += self.rest(cut_input)
                if part.name in self._names:
                    self._call = part.index
                    part = CustomBegin(part.index, part.id, part.name)
            elif isinstance(part, CallEnd):
                made += self.rest(custom_input)
            elif isinstance(part, CallArguments) and part.index == self._call:
                self._texts.append(part.text)
                continue
            made.append(part)
        return made

    def rest(self, read: Callable[[str], str]) -> list[Part]:
        """What was held back, as `read` reads it."""
        call, text = self._call, "".join(self._texts)
        self._call, self._texts = None, []
        return [] if call is None else [CustomInput(call, read(text))]
