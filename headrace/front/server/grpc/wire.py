"""Protocols written as tables: protobuf descriptors and message classes are made from them.

So there is no generated code to keep in step, and a server with reflection tells its clients the
same tables. A message is a line of fields `name:type=number`; `type?` is optional (its absence is
told apart from zero), `type*` a list, `type/choice` one of a choice, `key>value` a map. The type
`json` is a text on the wire and a value here: protobuf's own Struct forgets the order of keys and
whether a number was an integer, and a chat template shows both.

The pool of descriptors is our own: clients in the same process may know other versions of these
protocols."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from headrace.base.errors import InvalidRequest
from headrace.front.server.http.limits import parse_json

JSON = "json"
POOL = descriptor_pool.DescriptorPool()
_FIELD = re.compile(r"(\w+):([\w.]+)(?:>([\w.]+))?(\?|\*|/\w+)?=(\d+)")
_Kinds = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    kind: getattr(_Kinds, f"TYPE_{kind.upper()}")
    for kind in ("string", "bytes", "bool", "uint32", "int32", "uint64", "int64", "float", "double")
} | {JSON: _Kinds.TYPE_STRING}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One file of a protocol. `services`: service -> method -> (request, response, whether
    responses stream); `enums`: names in the order of their numbers, from 0."""

    file: str
    package: str
    messages: Mapping[str, str]
    services: Mapping[str, Mapping[str, tuple[str, str, bool]]] = field(default_factory=dict)
    enums: Mapping[str, Sequence[str]] = field(default_factory=dict)
    imports: Sequence[Protocol] = ()

    def register(self) -> Mapping[str, Any]:
        """The message classes by name; to be called once."""
        POOL.Add(self._described())
        return {
            name: message_factory.GetMessageClass(POOL.FindMessageTypeByName(self.full(name)))
            for name in self.messages
        }

    def full(self, name: str) -> str:
        """The name of a message or a service with its package."""
        owner = next((p for p in (self, *self.imports) if name in {**p.messages, **p.enums}), self)
        return f"{owner.package}.{name}"

    def _described(self) -> descriptor_pb2.FileDescriptorProto:
        file = descriptor_pb2.FileDescriptorProto(
            name=self.file,
            package=self.package,
            syntax="proto3",
            dependency=[other.file for other in self.imports],
        )
        for name, values in self.enums.items():
            enum = file.enum_type.add(name=name)
            for number, value in enumerate(values):
                enum.value.add(name=value, number=number)
        for name, line in self.messages.items():
            message = file.message_type.add(name=name)
            for json_field in _FIELD.finditer(
                line
            ):  # those of single optional fields must come after the others
                if (manner := json_field[4] or "").startswith("/"):
                    _choice(message, manner[1:])
            for spec in line.split():
                self._add_field(message, spec)
        for name, methods in self.services.items():
            service = file.service.add(name=name)
            for method, (taken, answer_type, streams) in methods.items():
                service.method.add(
                    name=method,
                    input_type=f".{self.full(taken)}",
                    output_type=f".{self.full(answer_type)}",
                    server_streaming=streams,
                )
        return file

    def _add_field(self, message: descriptor_pb2.DescriptorProto, spec: str) -> None:
        match = _FIELD.fullmatch(spec)
        assert match is not None, spec
        name, kind, value, manner, number = match.groups()
        descriptor = message.field.add(name=name, number=int(number), label=_Kinds.LABEL_OPTIONAL)
        if value is not None:
            entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            self._add_field(entry, f"key:{kind}=1")
            self._add_field(entry, f"value:{value}=2")
            descriptor.label, descriptor.type = _Kinds.LABEL_REPEATED, _Kinds.TYPE_MESSAGE
            descriptor.type_name = f".{self.package}.{message.name}.{entry.name}"
            return
        descriptor.type = self._type(kind)
        if kind not in _SCALARS:
            descriptor.type_name = f".{self.full(kind)}"
        if manner == "*":
            descriptor.label = _Kinds.LABEL_REPEATED
        elif manner is not None:
            choice = f"_{name}" if manner == "?" else manner[1:]
            descriptor.proto3_optional = manner == "?"
            descriptor.oneof_index = _choice(message, choice)

    def _type(self, kind: str) -> Any:
        if kind in _SCALARS:
            return _SCALARS[kind]
        is_enum = any(kind in protocol.enums for protocol in (self, *self.imports))
        return _Kinds.TYPE_ENUM if is_enum else _Kinds.TYPE_MESSAGE


def _choice(message: descriptor_pb2.DescriptorProto, name: str) -> int:
    """The number of a choice of this message, new or known."""
    for index, one in enumerate(message.oneof_decl):
        if one.name == name:
            return index
    message.oneof_decl.add(name=name)
    return len(message.oneof_decl) - 1


def fields_of(message: Any, lines: Mapping[str, str]) -> dict[str, Any]:
    """The fields that were set; texts of JSON as the values they are, InvalidRequest where they are
    none."""
    line = lines.get(message.DESCRIPTOR.name, "")
    as_json = {json_names[1] for json_names in _FIELD.finditer(line) if json_names[2] == JSON}
    return {
        field.name: _value(field, value, lines, as_json=field.name in as_json)
        for field, value in message.ListFields()
    }


def _value(field: Any, value: Any, lines: Mapping[str, str], *, as_json: bool) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.message_type is not None:
        entries = [value] if hasattr(value, "DESCRIPTOR") else list(value)
        documents = [fields_of(one, lines) for one in entries]
        return documents[0] if hasattr(value, "DESCRIPTOR") else documents
    if not isinstance(value, str | bytes | bool | int | float):
        return [_parsed(field.name, item) if as_json else item for item in value]
    return _parsed(field.name, value) if as_json else value


def _parsed(name: str, text: Any) -> Any:
    try:
        return parse_json(str(text).encode())
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error.message}", field=name) from None
