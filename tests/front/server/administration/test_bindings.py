"""One table of operations, and three ways to ask that offer all of it: HTTP, gRPC, the command."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor import FieldDescriptor

from headrace.cli.admin import parser
from headrace.front.server.administration.named import NAMED
from headrace.front.server.administration.operations import OPERATIONS, PREFIX
from headrace.front.server.administration.parameters import parameters_of
from headrace.front.server.grpc.admin import SERVICE, method_name
from headrace.front.server.table import admin_routes
from tests.api.model_folder import write_model_folder
from tests.api.serving import eventually, serving

KEY = "admin-key-1"
GRPC_KINDS = {
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_INT32: int,
}


def commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = [action.choices for action in parser()._actions if action.choices]
    return dict(choices)


def test_all_three_offer_every_operation() -> None:
    names = [operation.name for operation in OPERATIONS]
    assert len(set(names)) == len(names)
    routes = {(route.path, *route.described) for route in admin_routes()}
    assert routes == {(f"{PREFIX}/{one.path or one.name}", one.method) for one in OPERATIONS}
    assert set(SERVICE.described) == {method_name(one) for one in OPERATIONS}
    assert set(commands()) == set(names)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_all_three_take_the_same_fields(operation: Any) -> None:
    wanted = parameters_of(operation.parameters)
    message = SERVICE.described[method_name(operation)].input_type
    assert [
        (field.name, list if field.is_repeated else GRPC_KINDS[field.type])
        for field in message.fields
    ] == [(parameter.name, parameter.kind) for parameter in wanted]
    actions = {action.dest: action for action in commands()[operation.name]._actions}
    assert set(actions) - {"help", "address", "ca_file"} == {parameter.name for parameter in wanted}
    for parameter in wanted:
        assert parameter.doc, "its help, in every description"
        assert tuple(actions[parameter.name].choices or ()) == parameter.choices
        assert bool(actions[parameter.name].option_strings) is not parameter.required


def test_a_name_of_another_server_leads_to_an_operation() -> None:
    for route in NAMED:
        known = {*route.operation.parameters.__struct_fields__}
        assert {*route.fixed, *route.reads.__struct_fields__} <= known, route.path
        assert route.operation.doc


def over_grpc(channel: grpc.Channel, method: str, **fields: Any) -> Any:
    stub = channel.unary_unary(
        f"/{SERVICE.full_name}/{method}",
        request_serializer=SERVICE.request(method).SerializeToString,
        response_deserializer=SERVICE.response(method).FromString,
    )
    metadata = [("authorization", f"Bearer {KEY}")]
    return json.loads(stub(SERVICE.request(method)(**fields), metadata=metadata, timeout=300).json)


def test_what_one_changes_the_others_see(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "tiny")
    place = f"unix:{tmp_path}/admin.sock"
    options = ("--admin-listen", place, "--grpc-port", "0", "--admin-key", KEY)
    with serving(model, *options, HEADRACE_ADMIN_KEY=KEY) as served:
        eventually(lambda: any("serves gRPC" in line for line in served.lines), within_s=5)
        address = next(line.split()[-1] for line in served.lines if "serves gRPC" in line)

        def command(*words: str) -> tuple[int, Any]:
            ended = subprocess.run(
                [sys.executable, "-m", "headrace", "admin", *words, "--address", place],
                capture_output=True,
                text=True,
                env={**os.environ, "HEADRACE_ADMIN_KEY": KEY},
            )
            return ended.returncode, json.loads(ended.stdout) if ended.stdout else ended.stderr

        http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(tmp_path / "admin.sock")),
            base_url="http://localhost" + PREFIX,
            headers={"authorization": f"Bearer {KEY}"},
            timeout=300,
        )
        with http, grpc.insecure_channel(address) as channel:
            health = http.get("/health").json()
            assert over_grpc(channel, "Health") == health == command("health")[1]
            assert command("pause", "--mode", "keep", "--no-clear-cache") == (
                0,
                {"status": "paused", "mode": "keep"},
            )
            assert over_grpc(channel, "IsPaused") == {"is_paused": True}
            assert over_grpc(channel, "Resume") == {"status": "resumed"}
            assert http.get("/is_paused").json() == {"is_paused": False}
            for tried in (
                lambda: http.post("/pause?mode=nap").raise_for_status(),
                lambda: over_grpc(channel, "Pause", mode="nap"),
            ):
                with pytest.raises((httpx.HTTPStatusError, grpc.RpcError)):
                    tried()
            code, text = command("pause", "--mode", "nap")
            assert code == 2 and "invalid choice: 'nap'" in text
            assert command("requests", "gen-" + "0" * 32)[0] == 1
            assert command("is_paused") == (0, {"is_paused": False})
            assert command("shutdown") == (0, {"status": "shutting down"})
        assert served.process.wait(300) == 0
