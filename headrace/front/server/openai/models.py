"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace.front.server.conversation.context import RequestContext, Services, json_response


def _card(services: Services, name: str) -> dict[str, object]:
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


async def get_models(context: RequestContext, request: Request) -> Response:
    """All names that are served."""
    services = context.services
    names = (*services.text.model_names, *services.engine.adapters)
    data = [_card(services, name) for name in names]
    return json_response({"object": "list", "data": data})


async def get_model(context: RequestContext, request: Request) -> Response:
    """One of them; 404 with code model_not_found otherwise."""
    name = context.services.model_name(request.path_params["id"])
    return json_response(_card(context.services, name))
