"""Another number of engine cores while the server runs, by the names that scripts for vLLM use."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.base.errors import Conflict
from headrace.front.client.replicas import Replicas
from headrace.front.server.administration.parameters import NoParameters
from headrace.front.server.conversation.context import RequestContext


class ScaleParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How many engine cores there are to be, and how long those that go may take to finish."""

    new_data_parallel_size: Annotated[int, Meta(ge=1, description="engine cores")]
    drain_timeout: Annotated[
        float, Meta(ge=0, le=86_400, description="seconds for what runs on those that go")
    ] = 120.0


async def scale(context: RequestContext, asked: ScaleParameters) -> dict[str, Any]:
    """Brings engine cores in or lets them go, up to --max-replicas; answers once they are there or
    gone. The others serve meanwhile."""
    count = asked.new_data_parallel_size
    await _replicas(context).scale(count, drain_s=asked.drain_timeout)
    return {"message": f"Scaled to {count} data parallel engines"}


async def is_scaling(context: RequestContext, asked: NoParameters) -> dict[str, Any]:
    """Whether this API process is changing the number of engine cores."""
    replicas = context.services.replicas
    return {"is_scaling_elastic_ep": replicas is not None and replicas.scaling}


def _replicas(context: RequestContext) -> Replicas:
    replicas = context.services.replicas
    if replicas is None:
        raise Conflict("this server has several models, each with one engine core")
    return replicas
