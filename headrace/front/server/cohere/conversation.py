"""to_request: messages of the Cohere dialect as fields of a chat.

Documents go to the chat template, which the model was trained with; a template without a place for
them refuses the request. A tool plan, which the model wrote before its calls, is the text of that
message."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.base.errors import InvalidRequest
from headrace.front.server.cohere.schema import CohereChatRequest
from headrace.front.server.conversation.context import ServedModel
from headrace.front.server.conversation.resolved import Conversation, TranslatedRequest, resolved

_NAMES = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "top_k": "k",
    "top_p": "p",
    "thinking_token_budget": "thinking.token_budget",
}
_CHOICES = {"REQUIRED": "required", "NONE": "none"}


def to_request(request: CohereChatRequest, *, max_model_len: int) -> TranslatedRequest:
    """The request as a chat."""
    places = [f"messages[{i}]" for i in range(len(request.messages))]
    messages = [_message(m, at) for m, at in zip(request.messages, places, strict=True)]
    document: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "stream": request.stream,
        "tools": _tools(request),
        "tool_choice": _CHOICES.get(request.tool_choice or ""),
        "documents": _documents(request.documents),
        "response_format": _format(request),
        "temperature": request.temperature,
        "seed": request.seed,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "top_k": request.k,
        "top_p": request.p,
        "logprobs": request.logprobs,
        "priority": request.priority,
        **_template_arguments(request),
    }
    if request.max_tokens is not None:  # the context is the bound of a small model
        document["max_tokens"] = min(request.max_tokens, max_model_len)
    fields = {key: value for key, value in document.items() if value is not None}
    stop = tuple(request.stop_sequences or ())
    return TranslatedRequest(document=fields, places=places, names=_NAMES, stop=stop)


def to_conversation(request: CohereChatRequest, served: ServedModel, *, id: str) -> Conversation:
    """The request, resolved."""
    translated = to_request(request, max_model_len=served.max_model_len)
    return resolved(translated.typed(), served, id=id, sent=translated)


def _template_arguments(request: CohereChatRequest) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    fields: dict[str, Any] = {"chat_template_kwargs": arguments}
    if request.safety_mode is not None:
        arguments["safety_mode"] = request.safety_mode
    if request.thinking is not None:
        arguments["enable_thinking"] = request.thinking.type == "enabled"
        if request.thinking.type == "enabled":
            fields["thinking_token_budget"] = request.thinking.token_budget
    return fields if arguments else {}


def _tools(request: CohereChatRequest) -> list[dict[str, Any]] | None:
    tools = request.tools or None
    if tools is None or not request.strict_tools:
        return tools
    return [_strict(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _strict(tool: dict[str, Any], at: str) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _bad(f"{at}.function", "an object with name and parameters is needed")
    return {**tool, "function": {**function, "strict": True}}


def _documents(documents: list[str | dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """As templates know them: an object of texts each."""
    return [_document(one, f"documents[{i}]") for i, one in enumerate(documents or [])] or None


def _document(document: str | dict[str, Any], at: str) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document}
    data = document.get("data")
    if isinstance(data, str):
        data = {"text": data}
    if not isinstance(data, dict):
        raise _bad(f"{at}.data", "an object of texts is needed")
    ident = document.get("id")
    return data if ident is None else {"id": ident, **data}


def _format(request: CohereChatRequest) -> dict[str, Any] | None:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return None
    schema = asked.json_schema or asked.schema
    if schema is None:
        return {"type": "json_object"}
    json_schema = {"name": "output", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": json_schema}


def _message(message: dict[str, Any], at: str) -> dict[str, Any]:
    match message.get("role"):
        case "user" | "system" as role:
            return {"role": role, "content": _content(message.get("content"), f"{at}.content")}
        case "assistant":
            return _assistant(message, at)
        case "tool":
            ident = message.get("tool_call_id")
            if not isinstance(ident, str):
                raise _bad(f"{at}.tool_call_id", "a text is needed")
            content = _result(message.get("content"), f"{at}.content")
            return {"role": "tool", "tool_call_id": ident, "content": content}
        case role:
            allowed = "'user', 'assistant', 'system', 'tool'"
            raise _bad(f"{at}.role", f"{role!r:.50} given; allowed: {allowed}")


def _content(content: Any, at: str) -> Any:
    """A text, or parts, which are checked as every chat's are."""
    if not isinstance(content, str | list):
        raise _bad(at, "a text or an array of parts is needed")
    return content


def _assistant(message: dict[str, Any], at: str) -> dict[str, Any]:
    content = message.get("content")
    texts: list[str] = []
    thoughts: list[str] = []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(parts, list):
        raise _bad(f"{at}.content", "a text or an array of parts is needed")
    for j, part in enumerate(parts):
        place = f"{at}.content[{j}]"
        match part.get("type") if isinstance(part, dict) else None:
            case "text":
                texts.append(_text(part, "text", place))
            case "thinking":
                thoughts.append(_text(part, "thinking", place))
            case kind:
                raise _bad(f"{place}.type", f"{kind!r:.50} given; allowed: 'text', 'thinking'")
    if message.get("tool_plan") is not None:
        texts.insert(0, _text(message, "tool_plan", at))
    fields: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts)
    if message.get("tool_calls"):
        fields["tool_calls"] = message["tool_calls"]
    return fields


def _result(content: Any, at: str) -> str:
    """What a tool said: texts, and documents as their JSON."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(at, "a text or an array of parts is needed")
    return "\n".join(_result_part(part, f"{at}[{j}]") for j, part in enumerate(content))


def _result_part(part: Any, at: str) -> str:
    match part.get("type") if isinstance(part, dict) else None:
        case "text":
            return _text(part, "text", at)
        case "document":
            document = part.get("document")
            if not isinstance(document, dict):
                raise _bad(f"{at}.document", "an object with data is needed")
            data = document.get("data")
            return data if isinstance(data, str) else orjson.dumps(data).decode()
        case kind:
            raise _bad(f"{at}.type", f"{kind!r:.50} given; allowed: 'text', 'document'")


def _text(part: dict[str, Any], name: str, at: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise _bad(f"{at}.{name}", "a text is needed")
    return value


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
