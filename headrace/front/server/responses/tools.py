"""Tools of the Responses dialect as functions, and the way back from a function's name to the tool
that was meant.

A namespace is flattened (`name__function`); a custom tool, whose input is free text, is a function
with one text argument. A search for tools that the client carries out is a function too, and what
it finds is offered from then on. Tools of servers that the operator names are functions
(`label__tool`) that are run here (server_tools.py). Tools that the vendor's servers run are passed
over: clients always offer some."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.calls import custom_function
from headrace.front.server.responses.schema import Json

HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell"),
    *("shell", "apply_patch", "tool_search", "computer", "programmatic_tool_calling"),
)
TOOL_SEARCH = "tool_search"
_FINDS = ("tool_search_output", "additional_tools")
"""Items that bring further tools."""
_ANY_QUERY: Json = {
    "type": "object",
    "properties": {"query": {"type": "string"}},
    "required": ["query"],
}
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """What a function's name stands for. `server`: the label of the one that has it."""

    name: str
    custom: bool = False
    search: bool = False
    namespace: str | None = None
    server: str | None = None


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The tools of a server that a request offers."""

    label: str
    tools: list[Json]


@dataclass
class Offered:
    """The tools of a request. `names` leads back from the functions' names; `listings`: of the
    servers whose tools are run here, by their labels."""

    functions: list[Json] = field(default_factory=list)
    names: dict[str, Tool] = field(default_factory=dict)
    listings: Mapping[str, Listing] = field(default_factory=dict)

    def tool(self, function: str) -> Tool:
        """The tool behind a function; a name the model made up stays as it is."""
        return self.names.get(function) or Tool(name=function)

    def function_of(self, name: str, namespace: object) -> str:
        """The function behind a call of an earlier turn."""
        return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name

    def add(self, tool: Any, at: str, namespace: str | None = None) -> None:
        """One tool as it was sent."""
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and namespace is None:
            self._namespace(tool, at)
        elif kind == "function":
            parameters = tool.get("parameters")
            if parameters is not None and not isinstance(parameters, dict):
                raise _bad(f"{at}.parameters", "an object (JSON schema) is needed")
            self._function(tool, at, namespace, parameters=parameters, strict=tool.get("strict"))
        elif kind == "custom":
            function = custom_function(_name(tool, at), tool.get("description"), tool.get("format"))
            parameters, strict = function["parameters"], function.get("strict")
            self._function(
                {**tool, **function},
                at,
                namespace,
                parameters=parameters,
                strict=strict,
                custom=True,
            )
        elif kind == "mcp" and tool.get("server_label") in self.listings:
            self._server(self.listings[tool["server_label"]], at)
        elif kind == TOOL_SEARCH and tool.get("execution") == "client":
            self._search(tool, at)
        elif isinstance(kind, str) and kind.startswith(HOSTED):
            log.warning("%s: tools of type %s are not run by this server; passed over", at, kind)
        else:
            raise _bad(f"{at}.type", f"{kind!r:.80} given; allowed: function, custom, namespace")

    def load(self, item: Json, at: str) -> list[str]:
        """The tools that an item brings; the names of their functions. One that is offered already
        stays as it is."""
        brought = Offered()
        tools = item.get("tools")
        if not isinstance(tools, list):
            raise _bad(f"{at}.tools", "an array of tools is needed")
        for i, tool in enumerate(tools):
            brought.add(tool, f"{at}.tools[{i}]")
        for function in brought.functions:
            name = function["function"]["name"]
            if name not in self.names:
                self.functions.append(function)
                self.names[name] = brought.names[name]
        return list(brought.names)

    def _search(self, tool: Json, at: str) -> None:
        parameters = tool.get("parameters")
        parameters = parameters if isinstance(parameters, dict) else _ANY_QUERY
        named = {"name": TOOL_SEARCH, "description": tool.get("description") or "Search for tools."}
        self._function(named, at, None, parameters=parameters)
        self.names[TOOL_SEARCH] = Tool(name=TOOL_SEARCH, search=True)

    def _server(self, listing: Listing, at: str) -> None:
        for tool in listing.tools:
            schema = tool["input_schema"]
            self._function(tool, at, listing.label, parameters=schema)
            flat = self.function_of(tool["name"], listing.label)
            self.names[flat] = Tool(name=tool["name"], server=listing.label)

    def _namespace(self, tool: Json, at: str) -> None:
        inside = tool.get("tools")
        if not isinstance(inside, list):
            raise _bad(f"{at}.tools", "an array of tools is needed")
        for i, each in enumerate(inside):
            self.add(each, f"{at}.tools[{i}]", _name(tool, at))

    def _function(
        self,
        tool: Json,
        at: str,
        namespace: str | None,
        *,
        parameters: Json | None,
        strict: object = None,
        custom: bool = False,
    ) -> None:
        name = _name(tool, at)
        flat = self.function_of(name, namespace)
        if flat in self.names:
            raise _bad(f"{at}.name", f"{flat!r:.80} is offered twice")
        function = {
            "name": flat,
            "description": tool.get("description"),
            "parameters": parameters,
        }
        if isinstance(strict, bool):
            function["strict"] = strict
        fields = {key: value for key, value in function.items() if value is not None}
        self.functions.append({"type": "function", "function": fields})
        self.names[flat] = Tool(name=name, custom=custom, namespace=namespace)


NOTHING_LISTED: Mapping[str, Listing] = {}


def offered(
    tools: list[Json] | None,
    items: Iterable[Json] = (),
    listings: Mapping[str, Listing] = NOTHING_LISTED,
) -> Offered:
    """The tools of a request, and those that its items brought."""
    offered_tools = Offered(listings=listings)
    for i, tool in enumerate(tools or []):
        offered_tools.add(tool, f"tools[{i}]")
    for i, item in enumerate(items):
        if item.get("type") in _FINDS:
            offered_tools.load(item, f"input[{i}]")
    return offered_tools


def to_choice(choice: str | Json | None, tools: Offered) -> Json:
    """The fields `tool_choice` and `tools` of the conversation."""
    functions = tools.functions
    if choice is None or (choice in ("auto", "none") and not functions):
        return {"tools": functions or None}
    if isinstance(choice, str):
        return {"tools": functions or None, "tool_choice": choice}
    kind = choice.get("type")
    if kind in ("function", "custom"):
        named = tools.function_of(_name(choice, "tool_choice"), choice.get("namespace"))
        picked = {"type": "function", "function": {"name": named}}
        return {"tools": functions or None, "tool_choice": picked}
    if kind == "mcp" and choice.get("server_label") in tools.listings:
        named = tools.function_of(_name(choice, "tool_choice"), choice["server_label"])
        picked = {"type": "function", "function": {"name": named}}
        return {"tools": functions or None, "tool_choice": picked}
    if kind == "allowed_tools":
        allowed = choice.get("tools")
        if not isinstance(allowed, list):
            raise _bad("tool_choice.tools", "an array of tools is needed")
        names = {tool.get("name") for tool in allowed if isinstance(tool, dict)}
        kept = [f for f in functions if tools.tool(f["function"]["name"]).name in names]
        mode = choice.get("mode", "auto")
        return {"tools": kept or None, "tool_choice": mode if kept or mode != "auto" else None}
    raise _bad("tool_choice.type", f"{kind!r:.80} given; allowed: function, custom, allowed_tools")


def _name(tool: Json, at: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise _bad(f"{at}.name", "a text is needed")
    return name


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
