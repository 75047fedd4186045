"""Which model a name stands for that is not one of the served ones: these with ":latest" behind
them, and names that the request's key has made (/api/create). The same in every dialect."""

from __future__ import annotations

from headrace.front.server.conversation.context import RequestContext, Services
from headrace.front.server.state.named_models import NamedModel

LATEST = ":latest"


def served_name(services: Services, name: str) -> str | None:
    """The served model of this name; None if there is none."""
    for spelling in (name, name.removesuffix(LATEST)):
        if spelling in services.all_names:
            return spelling
    return None


async def named_model(context: RequestContext, name: str) -> NamedModel | None:
    """What the request's owner calls so."""
    store = context.services.store
    if store is None:
        return None
    names = [name] if not name.endswith(LATEST) else [name, name.removesuffix(LATEST)]
    for spelling in names:
        if (model := await store.named_models.get(spelling, context.tenant)) is not None:
            return model
    return None


async def base_of(context: RequestContext, name: str | None) -> str | None:
    """The served model that a name stands for; one that nobody knows stays as it is."""
    if name is None or name in context.services.all_names:
        return name
    if (served := served_name(context.services, name)) is not None:
        return served
    named = await named_model(context, name)
    return name if named is None else served_name(context.services, named.base) or named.base


async def own_names(context: RequestContext) -> list[NamedModel]:
    """The names of served models that the key of this request has made, the newest first."""
    services = context.services
    if services.store is None:
        return []
    named = await services.store.named_models.all(context.tenant)
    return [one for one in named if served_name(services, one.base) is not None]
