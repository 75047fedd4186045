"""The .proto files: what is packaged is what they say, and what other projects' clients know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from headrace.base.errors import InvalidRequest
from headrace.front.server.grpc import engine, render
from headrace.front.server.grpc.rpc import DESCRIPTORS, POOL, fields_of


def test_the_packaged_descriptors_are_those_of_the_proto_files(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is needed, of the dev extra")
    source, target = Path(str(DESCRIPTORS)).parent, tmp_path / "again.binpb"
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(source), "--include_imports"),
        f"--descriptor_set_out={target}",
        *sorted(map(str, source.glob("*.proto"))),
    ]
    subprocess.run(command, check=True, timeout=300)
    packaged, again = (
        descriptor_pb2.FileDescriptorSet.FromString(data)
        for data in (DESCRIPTORS.read_bytes(), target.read_bytes())
    )
    assert packaged == again, "the .proto files have changed: make protos"


@pytest.mark.parametrize("theirs", [vllm_engine_pb2, common_pb2], ids=["engine", "common"])
def test_fields_have_the_numbers_and_types_that_gateways_send(theirs: Any) -> None:
    package = theirs.DESCRIPTOR.package
    ours = POOL.FindFileByName(theirs.DESCRIPTOR.name)
    assert ours.package == package
    for name, message in ours.message_types_by_name.items():
        known = theirs.DESCRIPTOR.message_types_by_name[name].fields_by_number
        for number, field in ((field.number, field) for field in message.fields):
            assert _signature(field) == _signature(known[number]), (name, number)
    for name, service in ours.services_by_name.items():
        known = theirs.DESCRIPTOR.services_by_name[name].methods_by_name
        assert set(service.methods_by_name) == set(known)
        for method in service.methods:
            assert _call(method) == _call(known[method.name])


UNREAD = {"kv_transfer_params", "mm_inputs", "media_refs", "extra_mm_inputs"}
"""Messages at the gateways, bytes here, which is the same on the wire: they are refused unread."""


def _signature(field: Any) -> tuple[Any, ...]:
    if field.name in UNREAD:
        return field.name, field.is_repeated
    kind = field.message_type.full_name if field.message_type else field.type
    oneof = field.containing_oneof.name if field.containing_oneof else None
    return field.name, kind, field.is_repeated, field.has_presence, oneof


def _call(method: Any) -> tuple[Any, ...]:
    asked, answered = method.input_type.full_name, method.output_type.full_name
    return asked, answered, method.client_streaming, method.server_streaming


def test_a_message_is_the_fields_that_were_set() -> None:
    message = engine.SERVICE.request("Generate")(
        tokenized={"input_ids": [1, 2]},
        sampling_params={"temperature": 0.0, "logit_bias": {5: 1.5}, "stop": ["a", "b"]},
    )
    assert fields_of(message) == {
        "tokenized": {"input_ids": [1, 2]},
        "sampling_params": {"temperature": 0.0, "logit_bias": {5: 1.5}, "stop": ["a", "b"]},
    }


def test_fields_that_hold_json_are_values_or_refused_by_name() -> None:
    message = render.SERVICE.request("RenderChat")(messages=['{"b": 1, "a": 2.0}'], sampling="{}")
    fields = fields_of(message, json=("messages", "sampling"))
    assert fields == {"messages": [{"b": 1, "a": 2.0}], "sampling": {}}
    assert list(fields["messages"][0]) == ["b", "a"], "a template shows the order"
    with pytest.raises(InvalidRequest, match="tools"):
        fields_of(render.SERVICE.request("RenderChat")(tools=["{"]), json=("tools",))
