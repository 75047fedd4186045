"""The protocol `headrace.render.v1`, written as a table: protobuf descriptors and message classes are made from it.

So there is no generated code to keep in step, and a server with reflection tells its clients the same table. Objects
(messages, tools, sampling fields) travel as JSON texts: protobuf's own Struct forgets the order of keys and whether a
number was an integer, and a chat template shows both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from headrace.base.errors import InvalidRequest
from headrace.front.server.json_body import parse_json

PACKAGE = "headrace.render.v1"
SERVICE = f"{PACKAGE}.RenderService"
JSON = "json"
_Field = tuple[str, str, bool]
"""Name, type (a scalar's name, JSON or a message's), whether it is a list. Numbers follow the order."""

MESSAGES: Mapping[str, tuple[_Field, ...]] = {
    "RenderChatRequest": (
        ("model", "string", False),
        ("messages", JSON, True),
        ("tools", JSON, True),
        ("tool_choice", "string", False),
        ("add_generation_prompt", "bool", False),
        ("continue_final_message", "bool", False),
        ("chat_template", "string", False),
        ("chat_template_kwargs", JSON, False),
        ("sampling", JSON, False),
        ("return_prompt_text", "bool", False),
    ),
    "RenderCompletionRequest": (
        ("model", "string", False),
        ("prompts", "string", True),
        ("add_special_tokens", "bool", False),
        ("sampling", JSON, False),
    ),
    "Rendered": (
        ("request_id", "string", False),
        ("token_ids", "uint32", True),
        ("num_tokens", "uint32", False),
        ("prompt_text", "string", False),
        ("model", "string", False),
        ("sampling_params", JSON, False),
    ),
    "RenderCompletionResponse": (("prompts", "Rendered", True),),
    "TokenizeRequest": (
        ("model", "string", False),
        ("prompt", "string", False),
        ("add_special_tokens", "bool", False),
    ),
    "TokenizeResponse": (("token_ids", "uint32", True), ("max_model_len", "uint32", False)),
    "DetokenizeRequest": (("model", "string", False), ("token_ids", "uint32", True)),
    "DetokenizeResponse": (("text", "string", False),),
    "HealthCheckRequest": (),
    "HealthCheckResponse": (("status", "string", False), ("version", "string", False)),
}
METHODS: Mapping[str, tuple[str, str]] = {
    "RenderChat": ("RenderChatRequest", "Rendered"),
    "RenderCompletion": ("RenderCompletionRequest", "RenderCompletionResponse"),
    "Tokenize": ("TokenizeRequest", "TokenizeResponse"),
    "Detokenize": ("DetokenizeRequest", "DetokenizeResponse"),
    "HealthCheck": ("HealthCheckRequest", "HealthCheckResponse"),
}
_TYPES = {
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    JSON: descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "uint32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="headrace/render/v1/render.proto",
        package=PACKAGE,
        syntax="proto3",
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field in enumerate(fields, start=1):
            _add_field(message, number, field)
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for name, (taken, given) in METHODS.items():
        service.method.add(
            name=name, input_type=f".{PACKAGE}.{taken}", output_type=f".{PACKAGE}.{given}"
        )
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, field: _Field) -> None:
    """Single fields are optional, so that a default is ours and not protobuf's."""
    name, kind, is_list = field
    kinds = descriptor_pb2.FieldDescriptorProto
    made = message.field.add(name=name, number=number)
    made.label = kinds.LABEL_REPEATED if is_list else kinds.LABEL_OPTIONAL
    made.type = _TYPES.get(kind, kinds.TYPE_MESSAGE)
    if kind not in _TYPES:
        made.type_name = f".{PACKAGE}.{kind}"
    elif not is_list:
        made.proto3_optional = True
        made.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.Default()
    pool.Add(_file())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }


CLASSES = _classes()
"""The message classes by name."""


def given_fields(message: Any) -> dict[str, Any]:
    """The fields that were set; texts of JSON as the values they are, InvalidRequest where they are none."""
    kinds = {name: kind for name, kind, _ in MESSAGES[message.DESCRIPTOR.name]}
    return {
        field.name: _value(field.name, kinds[field.name], value)
        for field, value in message.ListFields()
    }


def _value(name: str, kind: str, value: Any) -> Any:
    if not isinstance(value, str | bool | int):
        return [_value(name, kind, item) for item in value]
    if kind != JSON:
        return value
    try:
        return parse_json(str(value).encode())
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error.message}", field=name) from None
