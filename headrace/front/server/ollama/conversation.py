"""to_request: a chat or a prompt of Ollama's dialect as the fields of a chat (or, raw, of a
completion).

What a named model brings (named_models.py) stands in front: its messages, its system prompt where
the request has none, its options where the request says nothing. Calls have no ids in this dialect:
a call gets its place as one, and a result belongs to the first call of its name that has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import ServedModel
from headrace.front.server.conversation.resolved import Conversation, TranslatedRequest, resolved
from headrace.front.server.http.limits import typed
from headrace.front.server.ollama.schema import (
    OllamaChatRequest,
    OllamaCommon,
    OllamaGenerateRequest,
    OllamaOptions,
)
from headrace.front.server.state.named_models import NamedModel

Json = dict[str, Any]
_SAMPLING = {
    "repetition_penalty": "repeat_penalty",
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty"),
            *("frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta"),
        )
    },
}
"""The sampling fields of a chat by the options that say them."""
_NAMES = {
    **{field: f"options.{option}" for field, option in _SAMPLING.items()},
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "seed": "options.seed",
    "response_format": "format",
    "reasoning_effort": "think",
    "chat_template": "template",
}


@dataclass(frozen=True, kw_only=True)
class TargetModel:
    """Who answers: the served model `name`, and what the name that was asked for brings. `thinks`:
    its answers may have reasoning; `sees`: it takes images."""

    name: str
    named: NamedModel | None = None
    thinks: bool = False
    sees: bool = False


class _WithOptions(msgspec.Struct, frozen=True, kw_only=True):
    """So that errors name them as options."""

    options: OllamaOptions


def options_of(asked: Json | None, named: NamedModel | None = None) -> OllamaOptions:
    """The options of a request over those of its named model; what is none is refused."""
    parameters = {} if named is None else named.parameters
    document = {**parameters, **(asked or {})}

    return typed({"options": document}, _WithOptions).options


def to_request(
    request: OllamaChatRequest | OllamaGenerateRequest,
    target: TargetModel,
    *,
    max_model_len: int,
) -> TranslatedRequest:
    """The request as a chat."""
    options = options_of(request.options, target.named)
    begun, places = _begun(target.named)
    own = _prompted(request) if isinstance(request, OllamaGenerateRequest) else _said(request)
    messages = [*begun, *(message for message, _ in own)]
    places += [place for _, place in own]
    system = "" if target.named is None else target.named.system
    if isinstance(request, OllamaGenerateRequest) and request.system is not None:
        system = request.system
    if system and not any(message.get("role") == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
        places.insert(0, "system")
    _check_images(messages, places, target)
    document = {
        "model": target.name,
        "messages": messages,
        "tools": (request.tools or None) if isinstance(request, OllamaChatRequest) else None,
        "chat_template": _template(request, target),
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        **_thinking(request, target),
        **sampling_fields(request, options, max_model_len=max_model_len),
    }
    fields = {key: value for key, value in document.items() if value is not None}
    return TranslatedRequest(document=fields, places=places, names=_NAMES, stop=stop_of(options))


def to_conversation(
    request: OllamaChatRequest | OllamaGenerateRequest,
    served: ServedModel,
    *,
    id: str,
    target: TargetModel,
) -> Conversation:
    """The request, resolved."""
    translated = to_request(request, target, max_model_len=served.max_model_len)
    return resolved(translated.typed(), served, id=id, sent=translated)


def to_completion(
    request: OllamaGenerateRequest, target: TargetModel, *, max_model_len: int
) -> TranslatedRequest:
    """A prompt that goes to the model as it is, as the fields of a completion."""
    for name in ("images", "system", "template", "think"):
        if getattr(request, name):
            why = "raw" if request.raw else "suffix"
            raise InvalidRequest(
                f"{name}: does not go with {why}, which uses no chat template", field=name
            )
    options = options_of(request.options, target.named)
    fields = sampling_fields(request, options, max_model_len=max_model_len)
    fields.setdefault("max_tokens", max_model_len)
    document = {
        "model": target.name,
        "prompt": request.prompt or "",
        "suffix": request.suffix or None,
        "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        **fields,
    }
    known = {key: value for key, value in document.items() if value is not None}
    return TranslatedRequest(document=known, names=_NAMES, stop=stop_of(options))


def sampling_fields(request: OllamaCommon, options: OllamaOptions, *, max_model_len: int) -> Json:
    """The fields of chats and completions for a request with these options; those without a value
    are left out."""
    fields = option_fields(options, max_model_len=max_model_len)
    if request.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(request.format, dict):
        schema = {"name": "answer", "schema": request.format, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def option_fields(options: OllamaOptions, *, max_model_len: int) -> Json:
    """The same of options alone."""
    if options.num_ctx is not None and options.num_ctx > max_model_len:
        raise InvalidRequest(
            f"options.num_ctx: {options.num_ctx} given; this model's context has {max_model_len} "
            "tokens",
            field="options.num_ctx",
        )
    fields: Json = {field: getattr(options, name) for field, name in _SAMPLING.items()}
    fields["repetition_penalty"] = _repetition(options)
    if options.seed is not None and options.seed >= 0:
        fields["seed"] = options.seed
    if options.num_predict is not None and options.num_predict >= 0:
        fields["max_tokens"] = min(options.num_predict, max_model_len)
    return {name: value for name, value in fields.items() if value is not None}


def _repetition(options: OllamaOptions) -> float | None:
    """Penalties look at the whole text: a shorter stretch is refused where it would matter."""
    penalty, stretch = options.repeat_penalty, options.repeat_last_n
    others = (options.presence_penalty, options.frequency_penalty)
    if stretch == 0 and not any(others):
        return 1.0
    if stretch in (None, -1) or (penalty in (None, 1.0) and not any(others)):
        return penalty
    raise InvalidRequest(
        f"options.repeat_last_n: {stretch} given; penalties look at all of the text here; "
        "allowed: -1",
        field="options.repeat_last_n",
    )


def stop_of(options: OllamaOptions) -> tuple[str, ...]:
    """The texts that end an answer."""
    stop = options.stop or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _template(
    request: OllamaChatRequest | OllamaGenerateRequest, target: TargetModel
) -> str | None:
    own = request.template if isinstance(request, OllamaGenerateRequest) else None
    named = None if target.named is None else target.named.template
    return check_template(own or named or "") or None


def check_template(template: str) -> str:
    """Templates of this server are Jinja's; one in Go's language is refused."""
    if "{{" in template and "{%" not in template and ("{{ ." in template or "{{." in template):
        raise InvalidRequest(
            "template: it is one in Go's template language; this server's are in Jinja's, over "
            "messages and tools",
            field="template",
        )
    return template


def _thinking(request: OllamaCommon, target: TargetModel) -> Json:
    if request.think is None:
        return {}
    if request.think and not target.thinks:
        raise InvalidRequest(
            f"think: {request.think!r} given; this model's answers have no thinking", field="think"
        )
    if isinstance(request.think, str):
        return {"reasoning_effort": request.think}
    kwargs = {"chat_template_kwargs": {"enable_thinking": request.think}}
    return kwargs if request.think else {**kwargs, "include_reasoning": False}


def _begun(named: NamedModel | None) -> tuple[list[Json], list[str]]:
    """The messages that every conversation of this name begins with, and what errors call them."""
    messages = [] if named is None else [dict(message) for message in named.messages]
    return messages, [f"the model's messages[{i}]" for i in range(len(messages))]


def _prompted(request: OllamaGenerateRequest) -> list[tuple[Json, str]]:
    if request.context:
        raise InvalidRequest(
            "context: answers of this server have no such tokens; send the earlier messages to "
            "api/chat",
            field="context",
        )
    message: Json = {"role": "user", "content": request.prompt or ""}
    if request.images:
        message["images"] = request.images
    return [(message, "prompt")]


def _said(request: OllamaChatRequest) -> list[tuple[Json, str]]:
    calls: list[tuple[str, str]] = []  # name and id of those without a result so far
    said = []
    for i, message in enumerate(request.messages or []):
        place = f"messages[{i}]"
        said.append((_message(message, place, i, calls), place))
    return said


def _message(message: Json, place: str, number: int, calls: list[tuple[str, str]]) -> Json:
    role, content = message.get("role"), message.get("content")
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise _bad(f"{place}.content", "a text is needed; images stand in images")
    fields: Json = {"role": role, "content": content}
    match role:
        case "user":
            if message.get("images"):
                fields["images"] = message["images"]
        case "assistant":
            thinking = message.get("thinking")
            if thinking:
                fields["reasoning_content"] = thinking
            if message.get("tool_calls"):
                fields["tool_calls"] = _calls(message["tool_calls"], place, number, calls)
        case "tool":
            fields["tool_call_id"] = _answered(message, place, calls)
        case "system":
            pass
        case _:
            allowed = "'system', 'user', 'assistant', 'tool'"
            raise _bad(f"{place}.role", f"{role!r:.50} given; allowed: {allowed}")
    return fields


def _calls(sent: Any, place: str, number: int, calls: list[tuple[str, str]]) -> list[Json]:
    if not isinstance(sent, list):
        raise _bad(f"{place}.tool_calls", "an array of calls is needed")
    converted = []
    for j, call in enumerate(sent):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise _bad(f"{place}.tool_calls[{j}].function", "an object with name and arguments")
        ident = call.get("id")
        if not isinstance(ident, str) or not ident:
            ident = f"{number % 10**6:06d}{j % 1000:03d}"  # nine digits, which every template takes
        calls.append((name, ident))
        function = {"name": name, "arguments": function.get("arguments") or {}}
        converted.append({"id": ident, "type": "function", "function": function})
    return converted


def _answered(message: Json, place: str, calls: list[tuple[str, str]]) -> str:
    """The id of the call that a result belongs to."""
    ident, name = message.get("tool_call_id"), message.get("tool_name")
    if isinstance(ident, str) and ident:
        match = next((call for call in calls if call[1] == ident), (name, ident))
    else:
        mine = [call for call in calls if name is None or call[0] == name]
        if not mine:
            raise _bad(f"{place}.tool_name", f"no call of {name!r:.80} is open")
        match = mine[0]
    if match in calls:
        calls.remove(match)
    return str(match[1])


def _check_images(messages: list[Json], places: list[str], target: TargetModel) -> None:
    for message, place in zip(messages, places, strict=True):
        if message.get("images") and not target.sees:
            field = "images" if place == "prompt" else f"{place}.images"
            raise _bad(field, "this model takes no images")


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
