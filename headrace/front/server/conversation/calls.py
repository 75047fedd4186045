"""Tools of every kind as functions, and the answer's calls in the kind that the client sent:
functions, custom tools (one text argument, of which the client sees the text alone), and
`functions` / `function_call`, as tools were called before.

Every route that takes a chat that has any goes through here (`resolved.called`): what generates,
what renders, what turns ids back into an answer. The input of a custom tool goes out whole: it is a
text inside JSON, and known once the JSON is. A regular expression for it is held to, as a strict
function's schema is; a Lark grammar is told in words, for no schema can say it of a text inside
JSON. In the history a call under the old names has no id; it gets its place as one, in the nine
digits that every template takes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import orjson

from headrace.base.errors import InvalidRequest
from headrace.front.client.events import Events
from headrace.front.server.conversation.request import ChatRequest, FunctionName
from headrace.front.server.conversation.stages import ParsedDelta, ParsedEnded
from headrace.front.text.parsing.engine import CallArguments, CallBegin, CallEnd, Part

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
    fields = {"name": name, "description": description, "parameters": schema, "strict": strict}
    return {key: value for key, value in fields.items() if value is not None}


def custom_input(arguments: str) -> str:
    """The free text inside a custom tool's arguments; what is no such object is the text itself."""
    try:
        document = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = document.get(CUSTOM_ARGUMENT) if isinstance(document, dict) else None
    return text if isinstance(text, str) else arguments


_HEAD = re.compile(r'\s*\{\s*"' + CUSTOM_ARGUMENT + r'"\s*:\s*"')


_LONGEST_ESCAPE = len("\\ud83d\\ude00")


def cut_input(arguments: str) -> str:
    """The free text inside a custom tool's arguments that were cut off: as far as it had come,
    nothing of the JSON."""
    head = _HEAD.match(arguments)
    if head is None:
        return "" if arguments.lstrip()[:1] in ("", "{") else arguments
    rest = arguments[head.end() :]
    for missing in range(min(len(rest), _LONGEST_ESCAPE) + 1):  # the cut may be inside an escape
        text = '"' + rest[: len(rest) - missing]
        for whole in (text + '"', text):  # or behind the text
            with contextlib.suppress(orjson.JSONDecodeError):
                whole_text: str = orjson.loads(whole)
                return whole_text
    return ""


def with_functions(request: ChatRequest) -> tuple[ChatRequest, frozenset[str]]:
    """The request with functions in the place of custom tools and of their earlier calls, and the
    tools' names."""
    sent_tools = request.tools or []
    messages = request.messages
    if any(_is_custom(call) for message in messages for call in _calls(message)):
        messages = [_as_message(message) for message in messages]
        request = msgspec.structs.replace(request, messages=messages)
    tools = [_as_function(tool, f"tools[{i}]") for i, tool in enumerate(sent_tools)]
    names = frozenset(
        function["function"]["name"]
        for function, tool in zip(tools, sent_tools, strict=True)
        if function is not tool
    )
    if not names:
        return request, names
    choice = request.tool_choice
    if isinstance(choice, dict):
        choice = _as_choice(choice)
    return msgspec.structs.replace(request, tools=tools, tool_choice=choice), names


def _as_function(tool: Json, at: str) -> Json:
    definition = tool.get("custom")
    if tool.get("type") != "custom" or not isinstance(definition, dict):
        return tool
    name = definition.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{at}.custom.name: a text is needed", field=f"{at}.custom.name")
    function = custom_function(name, definition.get("description"), definition.get("format"))
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
    definition = call.get("custom") if isinstance(call, dict) else None
    return isinstance(definition, dict) and isinstance(definition.get("input"), str)


def _as_message(message: Json) -> Json:
    calls = _calls(message)
    return {**message, "tool_calls": [_as_call(call) for call in calls]} if calls else message


def _as_call(call: Any) -> Any:
    if not _is_custom(call):
        return call
    definition = call["custom"]
    arguments = orjson.dumps({CUSTOM_ARGUMENT: definition["input"]}).decode()
    function = {"name": definition.get("name"), "arguments": arguments}
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
                yield ParsedDelta(
                    index=event.index, text="", parts=rest, num_reasoning=thought, last=True
                )
            yield event


class _Held:
    """The open call of one choice, if it is a custom tool's."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._call: int | None = None
        self._texts: list[str] = []

    def take(self, parts: list[Part]) -> list[Part]:
        """The parts as they go out."""
        outgoing: list[Part] = []
        for part in parts:
            if isinstance(part, CallBegin):
                outgoing += self.rest(cut_input)
                if part.name in self._names:
                    self._call = part.index
                    part = CustomBegin(part.index, part.id, part.name)
            elif isinstance(part, CallEnd):
                outgoing += self.rest(custom_input)
            elif isinstance(part, CallArguments) and part.index == self._call:
                self._texts.append(part.text)
                continue
            outgoing.append(part)
        return outgoing

    def rest(self, read: Callable[[str], str]) -> list[Part]:
        """What was held back, as `read` reads it."""
        call, text = self._call, "".join(self._texts)
        self._call, self._texts = None, []
        return [] if call is None else [CustomInput(call, read(text))]


SENT_AS = {"tools": "functions", "tool_choice": "function_call"}
"""What the fields of the request with tools are called in the request as it was sent."""


class FunctionBegin(CallBegin, frozen=True):
    """The call begins."""


class FunctionArguments(CallArguments, frozen=True):
    """More of its arguments."""


class FunctionEnded(ParsedEnded, frozen=True, kw_only=True):
    """The end of a choice that may have called a function."""


def with_tools(request: ChatRequest) -> ChatRequest:
    """The request with tools in the place of functions; `functions` stays, as the mark of how to
    answer."""
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


def _messages(messages: Sequence[Json]) -> list[Json]:
    """Calls and their results as calls of tools and their results."""
    converted: list[Json] = []
    called: list[tuple[str, str]] = []  # name and id of calls without a result so far
    for i, message in enumerate(messages):
        call, ident = message.get("function_call"), f"{i:09d}"
        if message.get("role") == "function":
            name = message.get("name")
            if not isinstance(name, str) or not name:
                at = f"messages[{i}].name"
                raise InvalidRequest(f"{at}: the name of the function is needed", field=at)
            earlier_call = next((each for each in called if each[0] == name), (name, ident))
            called = [each for each in called if each is not earlier_call]
            content = message.get("content")
            message = {**message, "role": "tool", "tool_call_id": earlier_call[1]}
            message["content"] = "" if content is None else content
        elif call is not None:
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or message.get("role") != "assistant":
                at = f"messages[{i}].function_call"
                raise InvalidRequest(
                    f"{at}: an object with name and arguments, in a message of the assistant, "
                    "is needed",
                    field=at,
                )
            called.append((name, ident))
            message = {key: value for key, value in message.items() if key != "function_call"}
            message["tool_calls"] = [{"id": ident, "type": "function", "function": call}]
        converted.append(message)
    return converted


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
