"""GET /v1/models and /v1/models/{id}.

Where a server has several models each card says what becomes of its model: `status` as llama.cpp's
router writes it (its value: unloaded, loading, loaded, asleep, failed ...), and what of our own
there is to say beside it."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import ModelNotFound
from headrace.base.wire.models import ModelPlace, ServedModelState
from headrace.front.server.conversation.context import RequestContext, Services, json_response
from headrace.front.server.conversation.own_names import own_names, served_name

Json = dict[str, Any]


def _card(services: Services, name: str) -> Json:
    base = services.text.model_names[0]
    adapts = name not in services.text.model_names
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "headrace",
        "root": name if adapts else base,
        "parent": base if adapts else None,
        "max_model_len": services.context_tokens,
        "permission": [],
    }


async def _cards(services: Services) -> list[Json]:
    if services.models is None:
        return [_card(services, name) for name in services.all_names]
    cards = []
    for place, state in await services.models.states():
        for name in place.names:
            cards.append(_pooled_card(services, name, place, state))
    return cards


def _pooled_card(services: Services, name: str, place: ModelPlace, state: ServedModelState) -> Json:
    about = msgspec.to_builtins(state)
    status = {"value": about.pop("status"), "why": about.pop("why")}
    del about["name"]
    return {
        **{"id": name, "object": "model", "created": services.created, "owned_by": "headrace"},
        **{"root": place.name, "parent": None, "max_model_len": place.max_model_len},
        "permission": [],
        "status": status,
        **about,
    }


async def get_models(context: RequestContext, request: Request) -> Response:
    """All names that are served, and those that this key has made (/api/create); of several models
    also what becomes of each."""
    data = [*await _cards(context.services), *await _named_cards(context)]
    return json_response({"object": "list", "data": data})


async def _named_cards(context: RequestContext) -> list[Json]:
    """Names of a served model that the key of this request has made."""
    return [
        {
            **{"id": named.name, "object": "model", "created": int(named.changed_at)},
            **{"owned_by": "headrace", "root": named.base, "parent": named.base},
            "permission": [],
        }
        for named in await own_names(context)
    ]


async def get_model(context: RequestContext, request: Request) -> Response:
    """One of them; 404 with code model_not_found otherwise."""
    services, name = context.services, request.path_params["id"]
    for card in await _named_cards(context):
        if card["id"] == name:
            return json_response(card)
    name = served_name(services, name) or name
    if services.models is None:
        return json_response(_card(services, services.model_name(name)))
    services.models.check(name)
    for card in await _cards(services):
        if card["id"] == name:
            return json_response(card)
    raise ModelNotFound(f"model: {name!r:.200} is not served", field="model")
