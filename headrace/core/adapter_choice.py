"""Which adapter a request runs with: the one it names, or the one that its media stand for."""

from __future__ import annotations

import msgspec

from headrace.base.errors import ModelNotFound
from headrace.base.wire.request import EngineRequest
from headrace.core.adapters import BASE, NO_ADAPTERS, Adapters, LoadedAdapter


def adapted(
    adapters: Adapters | None, request: EngineRequest
) -> tuple[EngineRequest, LoadedAdapter]:
    """The request, naming its adapter, and the adapter."""
    if adapters is None:
        if request.adapter:
            raise ModelNotFound(f"model: {NO_ADAPTERS}", field="model")
        return request, BASE
    kinds = {one.kind for one in request.media}
    of_media = next((name for kind, name in adapters.of_kinds if kind in kinds), "")
    name = request.adapter or of_media
    if not name:
        return request, BASE
    return msgspec.structs.replace(request, adapter=name), adapters.named(name)
