"""How a service of a .proto file is bound to functions.

The messages come from the descriptors in protos/protocols.binpb, which `make protos` writes from
the .proto files beside it. They live in a pool of their own, not in generated modules: a client in
the same process may know other versions of these protocols, and generated modules would demand the
protobuf version of the compiler that wrote them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.http.limits import parse_json

Fields = dict[str, Any]
Unary = Callable[[RequestContext, Fields], Awaitable[Fields]]
Stream = Callable[[RequestContext, Fields], AsyncGenerator[Fields, None]]
DESCRIPTORS = files(__package__) / "protos" / "protocols.binpb"


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        pool.Add(file)
    return pool


POOL = _pool()


@dataclass(frozen=True, kw_only=True)
class Rpc:
    """One of `unary` and `stream` answers. `route`: the path that decides, as over HTTP, which key
    is needed. `json`: fields of the request whose text is a JSON document. `runs`: it needs the
    engine of a model (false: what the model is; None: neither)."""

    route: str
    unary: Unary | None = None
    stream: Stream | None = None
    json: Collection[str] = ()
    runs: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RpcService:
    """A service by its full name, and its methods by name."""

    full_name: str
    methods: Mapping[str, Rpc]

    @property
    def described(self) -> Mapping[str, Any]:
        """The descriptors of its methods by name."""
        methods: Mapping[str, Any] = POOL.FindServiceByName(self.full_name).methods_by_name
        return methods

    def request(self, method: str) -> Any:
        """The class of a method's request."""
        return message_factory.GetMessageClass(self.described[method].input_type)

    def response(self, method: str) -> Any:
        """The class of its response, or of each of them where they stream."""
        return message_factory.GetMessageClass(self.described[method].output_type)


def fields_of(message: Any, *, json: Collection[str] = ()) -> Fields:
    """The fields that were set; those named in `json` as the values that their texts are,
    InvalidRequest where they are none."""
    fields = {field.name: _value(field, value) for field, value in message.ListFields()}
    for name in fields.keys() & set(json):
        value = fields[name]
        is_list = isinstance(value, list)
        fields[name] = [_parsed(name, one) for one in value] if is_list else _parsed(name, value)
    return fields


def _value(field: Any, value: Any) -> Any:
    if field.message_type is None:
        is_single = isinstance(value, str | bytes | bool | int | float)
        return value if is_single else list(value)
    if field.message_type.GetOptions().map_entry:
        return dict(value)
    if hasattr(value, "DESCRIPTOR"):
        return fields_of(value)
    return [fields_of(one) for one in value]


def _parsed(name: str, text: str) -> Any:
    try:
        return parse_json(text.encode())
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error.message}", field=name) from None
