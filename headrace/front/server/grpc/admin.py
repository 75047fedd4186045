"""The service `headrace.admin.v1.Admin`: every operation of the admin API as a method, with the
same fields; the answer is the same JSON document, as text."""

from __future__ import annotations

import msgspec

from headrace.front.server.administration.api import answer
from headrace.front.server.administration.operations import OPERATIONS, Operation
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.grpc.rpc import Fields, Rpc, RpcService


def method_name(operation: Operation) -> str:
    """reload_model -> ReloadModel."""
    return operation.name.title().replace("_", "")


def _rpc(operation: Operation) -> Rpc:
    async def unary(context: RequestContext, fields: Fields) -> Fields:
        document = await answer(context, operation, fields)
        return {"json": msgspec.json.encode(document).decode()}

    # The key of a route of the same permission: the admin key, for a change or for a question.
    return Rpc(route="/pause" if operation.changes else "/server_info", unary=unary)


SERVICE = RpcService(
    full_name="headrace.admin.v1.Admin",
    methods={method_name(operation): _rpc(operation) for operation in OPERATIONS},
)
