"""Names that /api/create has made, in requests of every other dialect: what a name brings stands
where the request says nothing, under the fields that its schema has for it. Tools that know a few
names of models alone are given one of these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headrace.front.server.conversation.context import RequestContext, Services
from headrace.front.server.conversation.own_names import named_model, served_name
from headrace.front.server.ollama.conversation import (
    check_template,
    option_fields,
    options_of,
    stop_of,
)
from headrace.front.server.state.named_models import NamedModel

Json = dict[str, Any]
ALIASES = {
    "top_p": "p",
    "top_k": "k",
    "stop": "stop_sequences",
    "max_tokens": "max_output_tokens",
}
"""What dialects call the sampling fields of a chat."""
SAME = {"max_tokens": "max_completion_tokens"}
"""Fields that say the same as another of one schema."""
_GENERATE = {"temperature", "system", "instructions"}
"""A schema without any of these asks for no answer: a name brings nothing to it."""
_SYSTEM = {"system", "developer"}


def standing_for(*bodies: type[msgspec.Struct]) -> Callable[[RequestContext, Any], Awaitable[Json]]:
    """What makes a request of the served model out of one, of these schemas, that names another: a
    name that nobody knows stays as it is."""
    schemas = [set(body.__struct_fields__) for body in bodies]

    async def of_served_model(context: RequestContext, document: Json) -> Json:
        services, name = context.services, document.get("model")
        if not isinstance(name, str):
            return document
        if (served := served_name(services, name)) is not None:
            return {**document, "model": served}
        named = await named_model(context, name)
        if named is None:
            return document
        base = served_name(services, named.base) or named.base
        fields = next((one for one in schemas if _is_of(document, one)), set())
        if fields:
            brought = _fields(named, fields, max_model_len=_context_tokens(services, base))
            document = _filled(named, document, brought, fields)
        return {**document, "model": base}

    return of_served_model


def _is_of(document: Json, fields: set[str]) -> bool:
    """Whether a request is one for an answer, of this schema."""
    return bool(fields & _GENERATE and {"messages", "input", "prompt"} & fields & document.keys())


def _fields(named: NamedModel, fields: set[str], *, max_model_len: int) -> Json:
    """Its options and template, those that the schema has fields for."""
    options = options_of(None, named)
    chat = option_fields(options, max_model_len=max_model_len)
    if stop := stop_of(options):
        chat["stop"] = list(stop)
    if template := check_template(named.template):
        chat["chat_template"] = template
    names = {field: field if field in fields else ALIASES.get(field, field) for field in chat}
    return {names[field]: value for field, value in chat.items() if names[field] in fields}


def _filled(named: NamedModel, document: Json, brought: Json, fields: set[str]) -> Json:
    """The request, with what its name brings where it says nothing."""
    said = {field: value for field, value in document.items() if value is not None}
    for field, same in SAME.items():
        if same in said:
            brought.pop(field, None)
    for field in ("system", "instructions"):
        if field in fields and named.system:
            brought[field] = named.system
    filled = {**brought, **said}
    own_place = bool({"system", "instructions"} & fields)
    if isinstance(messages := said.get("messages"), list):
        filled["messages"] = _in_front(named, messages, own_place)
    elif "instructions" in fields and not {"previous_response_id", "conversation"} & said.keys():
        filled["input"] = _input(named, said.get("input"))
    return filled


def _input(named: NamedModel, sent: Any) -> Any:
    """The input of a response, behind the messages that every conversation begins with."""
    if not named.messages:
        return sent
    items = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent
    return _in_front(named, items, True) if isinstance(items, list) else sent


def _in_front(named: NamedModel, messages: list[Any], own_place: bool) -> list[Any]:
    """The messages, and the system prompt unless there is one or it has a field of its own; of
    several conversations each."""
    if messages and all(isinstance(one, list) for one in messages):
        return [_in_front(named, one, own_place) for one in messages]
    whole = [*(dict(message) for message in named.messages), *messages]
    roles = {message.get("role") for message in whole if isinstance(message, dict)}
    if named.system and not own_place and not roles & _SYSTEM:
        return [{"role": "system", "content": named.system}, *whole]
    return whole


def _context_tokens(services: Services, base: str) -> int:
    """Of a served model; of several the one with this name."""
    if services.models is None:
        return services.text.max_model_len
    lengths = (place.max_model_len for place in services.models.places if base in place.names)
    return next(lengths, services.text.max_model_len)
