"""Which model a name of Ollama's dialect stands for: one that is served, with or without ":latest",
or one that its owner has named (/api/create)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from headrace.base.config.many_options import keep_alive_s
from headrace.base.errors import ConfigError, InvalidRequest, Unsupported
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.own_names import named_model, served_name
from headrace.front.server.ollama.conversation import TargetModel
from headrace.front.server.state.named_models import NamedModelStore


@dataclass(frozen=True, kw_only=True)
class ChosenModel:
    """The model of a request, whose services its context has. `shown`: the name it asked for;
    `load_s`: how long it waited."""

    shown: str
    target: TargetModel
    load_s: float


def store_of(context: RequestContext) -> NamedModelStore:
    """Where names are kept; Unsupported where nothing is."""
    store = context.services.store
    if store is None:
        raise Unsupported(
            "model: this server keeps no names (--response-store is off)", field="model"
        )
    return store.named_models


async def choose(
    context: RequestContext,
    name: str | None,
    *,
    keep_alive: float | str | None = None,
    runs: bool = True,
) -> ChosenModel:
    """Makes ready the model that a request names; ModelNotFound for an unknown one."""
    seconds = _seconds(keep_alive)
    services = context.services
    named = None
    base = None if name is None else served_name(services, name)
    if name is not None and base is None:
        named = await named_model(context, name)
        base = name if named is None else named.base
    document: dict[str, object] = {} if base is None else {"model": base}
    if seconds is not None:
        document["keep_alive"] = seconds
    begin = time.monotonic()
    await context.choose_model(document, runs=runs)
    load_s = time.monotonic() - begin
    services = context.services
    base = services.model_name(base)
    media = services.text.media
    target = TargetModel(
        name=base,
        named=named,
        thinks=services.answers.reasoning is not None,
        sees=media is not None and media.image_token is not None,
    )
    return ChosenModel(shown=name or base, target=target, load_s=load_s)


def _seconds(keep_alive: float | str | None) -> float | None:
    if keep_alive is None:
        return None
    try:
        return keep_alive_s(keep_alive, field="keep_alive")
    except ConfigError as error:
        raise InvalidRequest(error.message, field="keep_alive") from None
