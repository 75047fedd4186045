"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace.front.server.exchange import Exchange, Services, json_response


def _card(services: Services, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "headrace",
        "root": services.text.model_names[0],
        "parent": None,
        "max_model_len": services.text.max_model_len,
        "permission": [],
    }


async def get_models(exchange: Exchange, request: Request) -> Response:
    """All names that are served."""
    services = exchange.services
    data = [_card(services, name) for name in services.text.model_names]
    return json_response({"object": "list", "data": data})


async def get_model(exchange: Exchange, request: Request) -> Response:
    """One of them; 404 with code model_not_found otherwise."""
    name = exchange.services.model_name(request.path_params["id"])
    return json_response(_card(exchange.services, name))
