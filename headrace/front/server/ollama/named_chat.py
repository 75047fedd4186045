"""Names that /api/create has made, in chats of OpenAI's dialect: there Ollama answers them too, and
tools that know a few names of models alone are given one of these."""

from __future__ import annotations

from typing import Any

from headrace.front.server.conversation.context import RequestContext, Services
from headrace.front.server.ollama.conversation import (
    check_template,
    option_fields,
    options_of,
    stop_of,
)
from headrace.front.server.ollama.named import named_model, served_name
from headrace.front.server.state.named_models import NamedModel

Json = dict[str, Any]


async def of_served_model(context: RequestContext, document: Json) -> Json:
    """A chat of the model that its name stands for: what the name brings stands in front, where the
    chat says nothing. A name that nobody knows stays as it is."""
    services, name = context.services, document["model"]
    if (served := served_name(services, name)) is not None:
        return {**document, "model": served}
    named = await named_model(context, name)
    if named is None:
        return document
    base = served_name(services, named.base) or named.base
    brought = _fields(named, max_model_len=_context_tokens(services, base))
    fields = {field: value for field, value in document.items() if value is not None}
    if "max_completion_tokens" in fields:
        brought.pop("max_tokens", None)
    chat = {**brought, **fields, "model": base}
    if isinstance(messages := document.get("messages"), list):
        chat["messages"] = _in_front(named, messages)
    return chat


def _fields(named: NamedModel, *, max_model_len: int) -> Json:
    options = options_of(None, named)
    fields = option_fields(options, max_model_len=max_model_len)
    if stop := stop_of(options):
        fields["stop"] = list(stop)
    if template := check_template(named.template):
        fields["chat_template"] = template
    return fields


def _in_front(named: NamedModel, messages: list[Any]) -> list[Any]:
    """The messages, and the system prompt unless there is one."""
    whole = [*(dict(message) for message in named.messages), *messages]
    roles = {message.get("role") for message in whole if isinstance(message, dict)}
    if named.system and not roles & {"system", "developer"}:
        return [{"role": "system", "content": named.system}, *whole]
    return whole


def _context_tokens(services: Services, base: str) -> int:
    """Of a served model; of several the one with this name."""
    if services.models is None:
        return services.text.max_model_len
    lengths = (place.max_model_len for place in services.models.places if base in place.names)
    return next(lengths, services.text.max_model_len)
