"""Input items: given ids, and folded into messages.

Neighbouring items of the model's turn (reasoning, text, calls) become one assistant message;
outputs of tools are messages of their own. What hosted tools left behind is passed over; a
reference is looked up among the stored items."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.calls import CUSTOM_ARGUMENT
from headrace.front.server.responses.schema import Json
from headrace.front.server.responses.tools import TOOL_SEARCH, Offered

Unseal = Callable[[str], str | None]
SUMMARY = "A summary of the conversation so far:\n"
_PREFIXES = {
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "reasoning": "rs",
    "compaction": "cmp",
    "function_call_output": "fco",
    "custom_tool_call_output": "cto",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}
_WITH_STATUS = frozenset({"message", *_PREFIXES} - {"compaction"})
"""Items whose published type has a status."""
_PASSED_OVER = re.compile(
    r"(web_search|file_search|computer|code_interpreter|image_generation|local_shell|shell|apply_patch|tool_search|mcp_"
    r"|program|additional_tools|configuration_update)\w*"
)
_OURS = re.compile(r"[a-z]+_([0-9a-f]{32})i?[0-9a-f]{4}")


def item_id(prefix: str, response: str, index: int, *, is_own: bool = False) -> str:
    """The id of an item; it tells which response it belongs to (see `response_of`)."""
    return f"{prefix}_{response.removeprefix('resp_')}{'i' if is_own else ''}{index:04x}"


def response_of(item: str) -> str | None:
    """The id of the response that an item belongs to; None if the id is not of our making."""
    match = _OURS.fullmatch(item)
    return None if match is None else f"resp_{match[1]}"


def with_ids(items: str | list[Json] | None, response: str) -> list[Json]:
    """The input as items, each with an id and a type."""
    if items is None:
        return []
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [_with_id(item, response, i) for i, item in enumerate(items)]


def _with_id(item: Json, response: str, index: int) -> Json:
    kind = item.get("type") or "message"
    prefix = _PREFIXES.get(kind, "msg") if isinstance(kind, str) else "msg"
    numbered = {"id": item_id(prefix, response, index, is_own=True), **item, "type": kind}
    if kind == "message":
        content, role = item.get("content"), item.get("role")
        part = "output_text" if role == "assistant" else "input_text"
        if isinstance(content, str):
            numbered["content"] = [{"type": part, "text": content}]
            if role == "assistant":
                numbered["content"][0]["annotations"] = []
    if kind in _WITH_STATUS and numbered.get("status") is None:
        numbered["status"] = "completed"
    if not isinstance(numbered["id"], str):
        numbered["id"] = item_id(prefix, response, index, is_own=True)
    return numbered


class ItemMessages:
    """Folds items into messages; `places` tells where each message came from."""

    def __init__(self, tools: Offered, unseal: Unseal) -> None:
        self.messages: list[Json] = []
        self.places: list[str] = []
        self._tools = tools
        self._unseal = unseal
        self._turn: Json | None = None

    def instructions(self, text: str | None) -> None:
        """The system message."""
        if text:
            self._add("instructions", {"role": "system", "content": text})

    def take(self, item: Json, at: str) -> None:
        """One item."""
        match item.get("type") or "message":
            case "message":
                self._message(item, at)
            case "reasoning":
                if text := self._reasoning(item, at):
                    self._assistant(at, "reasoning_content", text)
            case "function_call":
                self._call(item, at, _string(item, "arguments", at))
            case "custom_tool_call":
                custom = {CUSTOM_ARGUMENT: _string(item, "input", at)}
                self._call(item, at, orjson.dumps(custom).decode())
            case "function_call_output" | "custom_tool_call_output":
                ident = _string(item, "call_id", at)
                content = _output(item.get("output"), f"{at}.output")
                message = {"role": "tool", "tool_call_id": ident, "content": content}
                self._add(f"{at}.output", message)
            case "mcp_call" if item.get("server_label") in self._tools.listings:
                self._server_call(item, at)
            case "compaction":
                summary = self._unseal(_string(item, "encrypted_content", at))
                if summary is None:
                    raise _bad(f"{at}.encrypted_content", "was not made by this server for you")
                self._add(at, {"role": "system", "content": SUMMARY + summary})
            case "tool_search_call" if isinstance(item.get("call_id"), str):
                arguments = orjson.dumps(item.get("arguments") or {}).decode()
                self._call({**item, "name": TOOL_SEARCH, "namespace": None}, at, arguments)
            case "tool_search_output" if isinstance(item.get("call_id"), str):
                names = orjson.dumps({"tools": Offered().load(item, at)}).decode()
                message = {"role": "tool", "tool_call_id": item["call_id"], "content": names}
                self._add(at, message)
            case str() as kind if _PASSED_OVER.fullmatch(kind):
                pass
            case kind:
                raise _bad(f"{at}.type", f"{kind!r:.80} is not a type of item known here")

    def _add(self, at: str, message: Json) -> None:
        self._turn = None
        self.messages.append(message)
        self.places.append(at)

    def _message(self, item: Json, at: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ("user", "assistant", "system", "developer"):
            allowed = "user, assistant, system, developer"
            raise _bad(f"{at}.role", f"{role!r:.50} given; allowed: {allowed}")
        if not isinstance(content, str | list):
            raise _bad(f"{at}.content", "a text or an array of parts is needed")
        if role == "assistant":
            self._assistant(at, "content", _joined(content, f"{at}.content"))
        else:
            self._add(at, {"role": role, "content": content})

    def _assistant(self, at: str, field: str, text: str) -> None:
        """Adds to the open turn; a second text begins a new one."""
        turn = self._turn
        if turn is None or turn.get("tool_calls") or turn.get("content"):
            turn = {"role": "assistant", "content": ""}
            self._add(at, turn)
            self._turn = turn
        turn[field] = f"{turn[field]}\n{text}" if turn.get(field) else text

    def _call(self, item: Json, at: str, arguments: str) -> None:
        name = self._tools.function_of(_string(item, "name", at), item.get("namespace"))
        turn = self._turn
        if turn is None:
            turn = {"role": "assistant", "content": ""}
            self._add(at, turn)
            self._turn = turn
        call = {"id": _string(item, "call_id", at), "type": "function"}
        calls = turn.setdefault("tool_calls", [])
        calls.append({**call, "function": {"name": name, "arguments": arguments}})

    def _server_call(self, item: Json, at: str) -> None:
        """A call that was run here, and what came of it."""
        ident = _string(item, "id", at)
        named = {**item, "call_id": ident, "namespace": item["server_label"]}
        self._call(named, at, _string(item, "arguments", at))
        error, output = item.get("error"), item.get("output")
        content = f"Error: {error}" if isinstance(error, str) else output
        self._add(at, {"role": "tool", "tool_call_id": ident, "content": content or ""})

    def _reasoning(self, item: Json, at: str) -> str:
        """The text in the clear, else out of its seal, else the summary."""
        for field in ("content", "summary"):
            parts = item.get(field) or []
            if not isinstance(parts, list):
                raise _bad(f"{at}.{field}", "an array of parts is needed")
            if field == "summary" and isinstance(item.get("encrypted_content"), str):
                text = self._unseal(item["encrypted_content"])
                if text is not None:
                    return text
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            if thought := "\n".join(text for text in texts if isinstance(text, str)):
                return thought
        return ""


def _output(output: Any, at: str) -> Any:
    """What a tool gave back: a text, or parts."""
    if not isinstance(output, str | list):
        raise _bad(at, "a text or an array of parts is needed")
    return output


def _joined(content: str | list[Any], at: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part, dict) or kind not in (
            "output_text",
            "input_text",
            "text",
            "refusal",
        ):
            raise _bad(f"{at}[{i}].type", f"{kind!r:.80} given; allowed: output_text, refusal")
        texts.append(_string(part, name, f"{at}[{i}]"))
    return "".join(texts)


def _string(item: Json, name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _bad(f"{at}.{name}", "a text is needed")
    return value


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
