"""Tools of the Anthropic dialect as functions: clients' own, and the typed ones that clients carry
out themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.front.server.anthropic.schema import ToolChoice

_TEXT: Mapping[str, Any] = {"type": "string"}
_PATH: Mapping[str, Any] = {"type": "string", "description": "Path of the file or folder."}


def _one_of(*commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(commands)}


# prefix of the type -> (description, properties, required): what the client's own documentation
# asks the model for
_TYPED: Mapping[str, tuple[str, dict[str, Any], list[str]]] = {
    "bash_": (
        "Run a command in a persistent shell.",
        {"command": _TEXT, "restart": {"type": "boolean", "description": "Start a new shell."}},
        ["command"],
    ),
    "text_editor_": (
        "View, create and edit text files.",
        {
            "command": _one_of("view", "create", "str_replace", "insert"),
            "path": _PATH,
            "file_text": _TEXT,
            "old_str": _TEXT,
            "new_str": _TEXT,
            "insert_line": {"type": "integer"},
            "insert_text": _TEXT,
            "view_range": {"type": "array", "items": {"type": "integer"}},
        },
        ["command", "path"],
    ),
    "memory_": (
        "Read and write files that are kept between conversations.",
        {
            "command": _one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            "path": _PATH,
            "file_text": _TEXT,
            "old_str": _TEXT,
            "new_str": _TEXT,
            "insert_line": {"type": "integer"},
            "insert_text": _TEXT,
            "old_path": _PATH,
            "new_path": _PATH,
        },
        ["command"],
    ),
}


def to_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as functions; None where there are none."""
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or [])] or None


def changed(
    tools: list[dict[str, Any]] | None, changes: Sequence[tuple[dict[str, Any], str]]
) -> list[dict[str, Any]] | None:
    """The tools that are offered after the `changes` (blocks and where they stood) of the
    conversation."""
    if not changes:
        return tools
    known = {tool["function"]["name"]: tool for tool in tools or []}
    offered = dict(known)
    for block, at in changes:
        adds = block["type"] == "tool_addition"
        name = _changed_name(block.get("tool"), f"{at}.tool", known, adds=adds)
        if adds:
            offered[name] = known[name]
        else:
            offered.pop(name, None)
    return list(offered.values()) or None


def _changed_name(tool: Any, at: str, known: dict[str, dict[str, Any]], *, adds: bool) -> str:
    """Which tool a change is about; one that it defines becomes known."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "tool_definition" and adds:
        definition = tool.get("definition")
        if not isinstance(definition, dict):
            raise InvalidRequest(f"{at}.definition: an object is needed", field=f"{at}.definition")
        inner = _tool(definition, f"{at}.definition")
        name: str = inner["function"]["name"]
        known[name] = inner
        return name
    if kind != "tool_reference":
        allowed = "tool_reference, tool_definition" if adds else "tool_reference"
        raise InvalidRequest(
            f"{at}.type: {kind!r:.80} given; allowed: {allowed}", field=f"{at}.type"
        )
    tool_name = tool.get("name")
    if not isinstance(tool_name, str) or tool_name not in known:
        raise InvalidRequest(
            f"{at}.name: {tool_name!r:.80} is not among the tools", field=f"{at}.name"
        )
    return tool_name


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    kind, name = tool.get("type"), tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{at}.name: a text is needed", field=f"{at}.name")
    if kind in (None, "custom"):
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise InvalidRequest(
                f"{at}.input_schema: an object (JSON schema) is needed", field=f"{at}.input_schema"
            )
        description = tool.get("description")
        strict = tool.get("strict")
    else:
        description, schema = _typed(kind, at)
        strict = None
    function = {"name": name, "description": description, "parameters": schema, "strict": strict}
    fields = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": fields}


def _typed(kind: Any, at: str) -> tuple[str, dict[str, Any]]:
    for prefix, (description, properties, required) in _TYPED.items():
        if isinstance(kind, str) and kind.startswith(prefix):
            return description, {
                "type": "object",
                "properties": properties,
                "required": required,
            }
    raise InvalidRequest(
        f"{at}.type: {kind!r:.80} is a tool this server would have to run, and it runs none; "
        "allowed: tools of your own (no type, or 'custom'), bash_*, text_editor_*, memory_*",
        field=f"{at}.type",
    )


def to_choice(choice: ToolChoice | None, *, offered: bool) -> dict[str, Any]:
    """The fields `tool_choice` and `parallel_tool_calls` of the conversation."""
    if choice is None or (not offered and choice.type in ("auto", "none")):
        return {}
    fields: dict[str, Any] = {}
    match choice.type:
        case "any":
            fields["tool_choice"] = "required"
        case "tool":
            if choice.name is None:
                raise InvalidRequest(
                    "tool_choice.name: this field is required with type: tool",
                    field="tool_choice.name",
                )
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        case named:
            fields["tool_choice"] = named
    if choice.disable_parallel_tool_use and choice.type != "none":
        fields["parallel_tool_calls"] = False
    return fields
