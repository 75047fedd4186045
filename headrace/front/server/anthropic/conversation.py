"""to_request: messages of the Anthropic dialect as the house's conversation.

One message may become several: results of tools are messages of their own. What clients only keep
for us (signatures, sealed thinking, blocks of tools run by another server) is read where it is ours
and passed over where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from headrace.front.server.anthropic.blocks import (
    Part,
    bad,
    content_of,
    parts_of,
    string_of,
    text_of,
)
from headrace.front.server.anthropic.schema import CountTokensRequest, MessagesRequest, Thinking
from headrace.front.server.anthropic.tools import changed, to_choice, to_tools
from headrace.front.server.conversation.context import ServedModel
from headrace.front.server.conversation.resolved import Conversation, TranslatedRequest, resolved

Unseal = Callable[[str], str | None]
CHANGES = ("tool_addition", "tool_removal")
BILLING = "x-anthropic-billing-header:"
_NAMES = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}


def to_request(
    request: CountTokensRequest, *, unseal: Unseal, max_model_len: int
) -> TranslatedRequest:
    """The conversation. `unseal` opens thinking that was sealed for this client, or gives None."""
    folded = _Messages(unseal)
    folded.system(request.system)
    for i, message in enumerate(request.messages):
        folded.take(message, f"messages[{i}]")
    tools = changed(to_tools(request.tools), folded.changes)
    document: dict[str, Any] = {
        "model": request.model,
        "messages": folded.messages,
        "tools": tools,
        **to_choice(request.tool_choice, offered=tools is not None),
        **_thinking(request.thinking),
        **_output(request),
    }
    if folded.prefilled:
        document |= {"continue_final_message": True, "add_generation_prompt": False}
    stop: tuple[str, ...] = ()
    if isinstance(request, MessagesRequest):
        document |= _sampling(request, max_model_len=max_model_len)
        stop = tuple(request.stop_sequences or ())
    fields = {key: value for key, value in document.items() if value is not None}
    return TranslatedRequest(document=fields, places=folded.places, names=_NAMES, stop=stop)


def to_conversation(
    request: CountTokensRequest, served: ServedModel, *, id: str, unseal: Unseal
) -> Conversation:
    """The request, resolved."""
    translated = to_request(request, unseal=unseal, max_model_len=served.max_model_len)
    return resolved(translated.typed(), served, id=id, sent=translated)


def _sampling(request: MessagesRequest, *, max_model_len: int) -> dict[str, Any]:
    """Agents ask for more tokens than a small model has; the context is the bound then (see
    `stop_reason`)."""
    return {
        "max_tokens": min(request.max_tokens, max_model_len),
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
    }


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    """Without the field nobody asked for thinking: templates that think by default are told so."""
    on = thinking is not None and thinking.type != "disabled"
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": on, "thinking": on}}
    if thinking is not None and on and thinking.budget_tokens is not None:
        fields["thinking_token_budget"] = thinking.budget_tokens
    return fields


def _output(request: CountTokensRequest) -> dict[str, Any]:
    config = request.output_config
    if config is None:
        return {}
    fields: dict[str, Any] = {"reasoning_effort": config.effort}
    if config.format is not None:
        schema = {"name": "output", "schema": config.format.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


class _Messages:
    """Collects the messages, and where each of them came from."""

    def __init__(self, unseal: Unseal) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.prefilled = False
        self.changes: list[tuple[dict[str, Any], str]] = []
        self._unseal = unseal

    def system(self, system: str | list[dict[str, Any]] | None) -> None:
        """The system prompt. Blocks that only bill change with every turn and would spoil the
        prefix cache."""
        if system is None:
            return
        if isinstance(system, str):
            texts = [system]
        else:
            texts = [text_of(block, f"system[{i}]") for i, block in enumerate(system)]
        kept = [text for text in texts if not text.startswith(BILLING)]
        if kept:
            self._add("system", "system", content="\n\n".join(kept))

    def take(self, message: dict[str, Any], at: str) -> None:
        """One message as it was sent."""
        content = message.get("content")
        if not isinstance(content, str | list):
            raise bad(f"{at}.content", "a text or an array of blocks is needed")
        if content == [] and message.get("role") == "user":
            raise bad(f"{at}.content", "at least one block is needed")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for j, block in enumerate(blocks):
            if not isinstance(block, dict) or not isinstance(block.get("type"), str):
                raise bad(f"{at}.content[{j}]", "an object with a type is needed")
        self.prefilled = False
        match message.get("role"):
            case "user":
                self._user(blocks, at)
            case "assistant":
                self._assistant(blocks, at)
            case "system":
                self._system(blocks, at)
            case role:
                raise bad(f"{at}.role", f"{role!r:.50} given; allowed: 'user', 'assistant'")

    def _add(self, role: str, at: str, **fields: Any) -> None:
        self.messages.append({"role": role, **fields})
        self.places.append(at)

    def _system(self, blocks: list[dict[str, Any]], at: str) -> None:
        """A system message in mid-conversation; it may also change which tools are offered."""
        texts: list[str] = []
        for j, block in enumerate(blocks):
            place = f"{at}.content[{j}]"
            if block["type"] in CHANGES:
                self.changes.append((block, place))
            else:
                texts.append(text_of(block, place))
        if texts:
            self._add("system", at, content="\n\n".join(texts))

    def _user(self, blocks: list[dict[str, Any]], at: str) -> None:
        parts: list[str | Part] = []
        results = 0
        for j, block in enumerate(blocks):
            place = f"{at}.content[{j}]"
            if block["type"].endswith("_tool_result"):
                continue  # of a tool that another server ran
            if block["type"] != "tool_result":
                parts += parts_of(block, place)
                continue
            if parts:
                self._add("user", at, content=content_of(parts))
                parts = []
            self._tool_result(block, place)
            results += 1
        if parts or not results:
            self._add("user", at, content=content_of(parts))

    def _tool_result(self, block: dict[str, Any], at: str) -> None:
        ident, content = block.get("tool_use_id"), block.get("content")
        if not isinstance(ident, str):
            raise bad(f"{at}.tool_use_id", "a text is needed")
        parts: list[str | Part] = []
        if isinstance(content, list):
            for k, inner in enumerate(content):
                parts += parts_of(inner, f"{at}.content[{k}]")
        elif isinstance(content, str):
            parts.append(content)
        elif content is not None:
            raise bad(f"{at}.content", "a text or an array of blocks is needed")
        if block.get("is_error"):
            lead = [parts.pop(0)] if parts and isinstance(parts[0], str) else [""]
            parts.insert(0, f"Error: {lead[0]}")
        self._add("tool", at, tool_call_id=ident, content=content_of(parts))

    def _assistant(self, blocks: list[dict[str, Any]], at: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for j, block in enumerate(blocks):
            place = f"{at}.content[{j}]"
            match block["type"]:
                case "text":
                    texts.append(string_of(block, "text", place))
                case "thinking" | "redacted_thinking":
                    thoughts.append(self._thought(block, place))
                case "tool_use":
                    calls.append(_call(block, place))
        fields: dict[str, Any] = {"content": "".join(texts)}
        if thought := "\n".join(filter(None, thoughts)):
            fields["reasoning_content"] = thought
        if calls:
            fields["tool_calls"] = calls
        self.prefilled = not calls
        self._add("assistant", at, **fields)

    def _thought(self, block: dict[str, Any], at: str) -> str:
        """The thinking in the clear, else out of its seal; a foreign seal is passed over."""
        if block["type"] == "redacted_thinking":
            return self._unseal(string_of(block, "data", at)) or ""
        text = string_of(block, "thinking", at)
        signature = block.get("signature")
        if text or not isinstance(signature, str):
            return text
        return self._unseal(signature) or ""


def _call(block: dict[str, Any], at: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad(f"{at}.input", "an object is needed")
    function = {"name": string_of(block, "name", at), "arguments": orjson.dumps(arguments).decode()}
    return {"id": string_of(block, "id", at), "type": "function", "function": function}
