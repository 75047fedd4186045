"""What a gRPC method is here: a function over an context, and the HTTP route whose keys open it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory

from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.grpc.wire import POOL, Protocol

Fields = dict[str, Any]
Unary = Callable[[RequestContext, Fields], Awaitable[Fields]]
Stream = Callable[[RequestContext, Fields], AsyncGenerator[Fields, None]]


@dataclass(frozen=True, kw_only=True)
class Rpc:
    """One of `unary` and `stream` answers. `route`: the path that decides, as over HTTP, which key
    is needed."""

    route: str
    unary: Unary | None = None
    stream: Stream | None = None


@dataclass(frozen=True, kw_only=True)
class RpcService:
    """A service of a protocol, and its methods by name."""

    protocol: Protocol
    name: str
    methods: Mapping[str, Rpc]

    @property
    def full_name(self) -> str:
        """With the package."""
        return f"{self.protocol.package}.{self.name}"

    def message(self, name: str) -> Any:
        """The class of a message of the protocol, or of one that it imports."""
        return message_factory.GetMessageClass(POOL.FindMessageTypeByName(self.protocol.full(name)))
