"""Names for served models, made, copied and deleted: POST /api/create and /api/copy, DELETE
/api/delete. A name belongs to the key that made it, and is seen by no other.

No weights are made here: a Modelfile's FROM names a served model (or another name), and what would
make others is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import Conflict, Forbidden, InvalidRequest, ModelNotFound, Unsupported
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.own_names import named_model, served_name
from headrace.front.server.conversation.pipeline import streamed
from headrace.front.server.http.limits import typed
from headrace.front.server.http.line_stream import LineStream
from headrace.front.server.http.sse import Chunks
from headrace.front.server.ollama.conversation import check_template, options_of
from headrace.front.server.ollama.failures import SHAPE
from headrace.front.server.ollama.modelfile import ROLES, read_modelfile
from headrace.front.server.ollama.models import wanted_name
from headrace.front.server.ollama.named import store_of
from headrace.front.server.ollama.schema import (
    OllamaCopyRequest,
    OllamaCreateRequest,
    OllamaModelRequest,
)
from headrace.front.server.state.named_models import NamedModel

Json = dict[str, Any]
_NO_WEIGHTS = {
    "files": "weights are not taken from clients; name a served model in from",
    "adapters": "adapters are loaded by the server (--lora-modules) and asked for by their names",
    "quantize": "weights are quantized when the server starts (--quantization)",
    "quantization": "weights are quantized when the server starts (--quantization)",
}


async def post_create(context: RequestContext, document: Any) -> Response:
    """A name for a served model with prompts and options of its own, from a Modelfile or its
    fields."""
    request = typed(document, OllamaCreateRequest)
    name = wanted_name(request.model, request.name)
    for field, why in _NO_WEIGHTS.items():
        if getattr(request, field):
            raise Unsupported(f"{field}: {why}", field=field)
    if request.modelfile is not None:
        fields = read_modelfile(request.modelfile)
        request = typed({**msgspec.to_builtins(request), **fields}, OllamaCreateRequest)
    if not request.base:
        raise InvalidRequest("from: this field is required", field="from")
    await _keep(context, await _model(context, request, name))
    if request.stream is False:
        return json_response({"status": "success"})
    return await streamed(context, _statuses(), shape=SHAPE, kind=LineStream)


async def _statuses() -> Chunks:
    for status in ("reading model metadata", "writing manifest", "success"):
        yield orjson.dumps({"status": status}) + b"\n"


async def _model(context: RequestContext, request: OllamaCreateRequest, name: str) -> NamedModel:
    """What the request makes, over what its `from` stands for."""
    assert request.base is not None
    template = check_template(request.template or "")
    if template and not context.services.server.trust_request_chat_template:
        raise Forbidden(
            "template: this server does not take templates from requests", field="template"
        )
    base = await _source(context, request.base, field="from")
    texts = [request.license] if isinstance(request.license, str) else request.license or []
    model = NamedModel(
        name=name,
        base=base.base,
        system=base.system if request.system is None else request.system,
        template=template or base.template,
        license=tuple(texts) or base.license,
        parameters={**base.parameters, **(request.parameters or {})},
        messages=_messages(request.messages) or base.messages,
    )
    options_of(None, model)
    return model


def _messages(messages: list[Json] | None) -> tuple[Json, ...]:
    kept = []
    for i, message in enumerate(messages or []):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise InvalidRequest(
                f"messages[{i}]: a role ({', '.join(ROLES)}) and a text are needed",
                field="messages",
            )
        kept.append({"role": role, "content": content})
    return tuple(kept)


async def _source(context: RequestContext, name: str, *, field: str) -> NamedModel:
    """What an existing name stands for."""
    base = served_name(context.services, name)
    if base is not None:
        return NamedModel(name=base, base=base)
    named = await named_model(context, name)
    if named is None:
        raise ModelNotFound(
            f"{field}: {name[:200]!r} is neither served nor a name of yours; served: "
            f"{', '.join(context.services.all_names)}",
            field=field,
        )
    return named


async def _keep(context: RequestContext, model: NamedModel) -> None:
    if served_name(context.services, model.name) is not None:
        raise Conflict(f"model: {model.name!r} is a model of this server", field="model")
    await store_of(context).put(model, context.tenant)


async def post_copy(context: RequestContext, document: Any) -> Response:
    """The same under another name."""
    request = typed(document, OllamaCopyRequest)
    source = await _source(context, request.source, field="source")
    await _keep(context, msgspec.structs.replace(source, name=request.destination))
    return Response(status_code=200)


async def delete_model(context: RequestContext, document: Any) -> Response:
    """Forgets a name; what is served is not deleted."""
    request = typed(document, OllamaModelRequest)
    name = wanted_name(request.model, request.name)
    named = await named_model(context, name)
    if named is None:
        if served_name(context.services, name) is not None:
            raise Forbidden(
                f"model: {name!r} is a model of this server, and is not deleted by its clients",
                field="model",
            )
        raise ModelNotFound(f"model: there is no name {name[:200]!r}", field="model")
    await store_of(context).delete(named.name, context.tenant)
    return Response(status_code=200)


async def refuse(context: RequestContext, request: Request) -> Response:
    """Weights are neither taken from clients nor sent away: refused by name."""
    raise Unsupported(
        "models are neither uploaded to this server nor pushed by it: one is fetched by api/pull, and "
        "named by api/create"
    )
