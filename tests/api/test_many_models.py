"""Several models in one server, over real processes: each dialect's `model` picks one, memory decides which are
loaded, waits are explained, failures stay with their model (BEY-08, BEY-42, BEY-43, BEY-51)."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import grpc
import openai
import psutil
import pytest
from websockets.sync.client import connect

from headrace.base.config.options import CommandLine
from headrace.base.errors import ConfigError
from headrace.front.server.grpc.inference import SERVICE as INFERENCE
from headrace.front.server.grpc.render import SERVICE as RENDER
from headrace.front.server.grpc.rpc import RpcService
from headrace.launch.many.catalog import CPU_PROCESS_BYTES, read_catalog
from tests.api.clients import openai_client
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, eventually, serving, slowed
from tests.models.oracle import save_oracle

ADMIN = {"authorization": "Bearer secret"}
NULL = ("--load-format", "dummy", "--executor", "null", "--kv-blocks", "300")
SLOW = "slow-0.05"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models, and one that cannot be served."""
    folder = tmp_path_factory.mktemp("many")
    for name, length in (("red", 512), ("blue", 1024), ("slow", 2048)):
        write_model_folder(folder / name, max_model_len=length)
    slowed(folder / "slow", 0.05)
    shutil.rmtree(folder / "slow")
    write_model_folder(folder / "torn")
    config = json.loads((folder / "torn" / "config.json").read_text())
    (folder / "torn" / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    options = (*NULL, "--models-dir", str(folder), "--models-max", "1", "--admin-key", "secret")
    with serving(None, *options) as served:
        yield served
        assert served.stop() == 0


def states(server: Served) -> dict[str, str]:
    cards = server.get("/v1/models").json()["data"]
    return {card["id"]: card["status"]["value"] for card in cards}


def change(server: Served, what: str, model: str) -> Any:
    return server.post(f"/models/{what}", {"model": model}, **ADMIN)


MESSAGES = [{"role": "user", "content": "hi"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v2/chat": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/v1/decisions": {
        "input": "hi",
        "questions": [{"type": "predicate", "instructions": "is it so?"}],
    },
}


def test_the_model_of_every_dialect_is_served_and_only_what_fits_is_loaded(server: Served) -> None:
    for path, body in DIALECTS.items():
        response = server.post(path, {**body, "model": "red"})
        assert response.status_code == 200, (path, response.text)
    assert states(server) == {
        "blue": "unloaded",
        "red": "loaded",
        SLOW: "unloaded",
        "torn": "failed",
    }
    assert (
        server.post("/tokenize", {"model": "blue", "prompt": "hi"}).json()["max_model_len"] == 1024
    )
    assert states(server)["blue"] == "unloaded", "text alone needs no engine"
    with openai_client(server.url) as client:
        reply = client.completions.create(model="blue", prompt="hi", max_tokens=2)
        assert reply.model == "blue" and reply.choices[0].finish_reason == "length"
        listed = client.models.list().data
        assert [card.id for card in listed] == ["blue", "red", SLOW, "torn"]
        assert client.models.retrieve("red").object == "model"
    assert states(server) == {
        "blue": "loaded",
        "red": "unloaded",
        SLOW: "unloaded",
        "torn": "failed",
    }
    assert len(server.cores) <= 2, "one that is loaded, and one spare process"


def test_names_and_keep_alive_that_are_wrong_are_refused(server: Served) -> None:
    with openai_client(server.url) as client, pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="green", prompt="hi", max_tokens=2)
    assert "available: blue, red, slow-0.05, torn" in error.value.message
    reply = server.post("/v1/completions", {"model": "torn", "prompt": "hi"})
    assert reply.status_code == 500 and "hidden_size" in reply.text
    body = {"model": "red", "prompt": "hi", "keep_alive": "soon"}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 400 and "'soon' is not a duration" in reply.text
    assert change(server, "load", "green").status_code == 404
    assert server.post("/models/load", {"model": "red"}).status_code in (401, 403)


def test_models_are_loaded_and_unloaded_by_hand_and_by_keep_alive(server: Served) -> None:
    assert change(server, "load", "red").json() == {"success": True, "model": "red"}
    assert states(server)["red"] == "loaded"
    assert change(server, "unload", "red").json()["success"]
    assert states(server)["red"] == "unloaded"
    body = {"model": "blue", "prompt": "hi", "max_tokens": 1}
    assert server.post("/v1/completions", {**body, "keep_alive": 0}).status_code == 200
    eventually(lambda: states(server)["blue"] == "unloaded", within_s=10)


def test_a_model_that_went_leaves_no_process_and_comes_again(server: Served) -> None:
    """REG-068, REG-069, of what grows and shrinks here: the socket of a core that has gone serves the next one."""
    body = {"model": "blue", "prompt": "hi", "max_tokens": 1}
    before = {core.pid for core in server.cores}  # one of them waits for the next model
    for _ in range(2):
        assert change(server, "load", "blue").json()["success"]
        assert server.post("/v1/completions", body).status_code == 200
        loaded = {core.pid for core in server.cores}
        assert change(server, "unload", "blue").json()["success"]
        eventually(lambda: len({core.pid for core in server.cores}) == len(before), within_s=30)
        gone = loaded - {core.pid for core in server.cores}
        assert len(gone) == 1 and not any(psutil.pid_exists(pid) for pid in gone), "a zombie"


def test_a_request_that_waits_for_memory_is_explained_and_served(server: Served) -> None:
    asked = {"model": SLOW, "prompt": "hi", "max_tokens": 100, "ignore_eos": True}
    replies: dict[str, Any] = {}

    def ask(name: str, body: dict[str, Any]) -> None:
        headers = {"x-request-id": name}
        replies[name] = server.post("/v1/completions", body, **headers)

    first = threading.Thread(target=ask, args=("first", asked))
    first.start()
    eventually(lambda: states(server)[SLOW] == "loaded", within_s=30)
    eventually(lambda: server.get("/v1/requests/first").status_code == 200, within_s=10)
    (slot,) = [one for one in server.get("/slots").json() if one["is_processing"]]
    assert slot["model"] == SLOW and slot["id_task"].startswith("cmpl-") and slot["n_ctx"] == 2048
    assert server.post("/slots/0?action=save", {}).status_code == 400
    second = threading.Thread(target=ask, args=("second", {"model": "red", "prompt": "hi"}))
    second.start()
    eventually(lambda: server.get("/v1/requests/second").status_code == 200, within_s=10)
    (why,) = server.get("/v1/requests/second").json()["requests"]
    assert why["state"] == "waiting for its model" and why["model"] == "red"
    assert "no memory for the model" in why["reason"] and f"{SLOW} (" in why["reason"]
    first.join()
    second.join()
    assert replies["first"].json()["usage"]["completion_tokens"] == 100
    assert replies["second"].status_code == 200


def test_a_core_that_dies_is_started_again_and_the_others_serve_on(server: Served) -> None:
    body = {"model": "blue", "prompt": "hi", "max_tokens": 1}
    assert server.post("/v1/completions", body).status_code == 200
    for core in server.cores:  # also the one that waits for the next model
        core.kill()
    eventually(lambda: server.post("/v1/completions", body).status_code == 200, within_s=20)
    assert server.post("/v1/completions", {**body, "model": "red"}).status_code == 200


def test_what_cannot_be_served_is_refused_at_start(folder: Path, tmp_path: Path) -> None:
    cases = {
        "model red: it needs 256.": {"models": [{"name": "red", "path": str(folder / "red")}]},
        "two models have the name 'red'": [{"name": "red", "path": str(folder / "red")}] * 2,
        "model red: options: port is not an option of one model": [
            {"name": "red", "path": str(folder / "red"), "options": {"port": 1}}
        ],
        "there is no such folder": [{"name": "red", "path": str(folder / "gone")}],
    }
    groups = ("model", "kv", "scheduler", "device", "adapters", "server", "many")
    for message, document in cases.items():
        file = tmp_path / "models.yaml"
        file.write_text(json.dumps(document))
        words = (*NULL[:4], "--models", str(file), "--models-memory", "100MiB")
        options = CommandLine("serve", "", groups=groups).parse(words)[1]
        with pytest.raises(ConfigError) as error:
            read_catalog(options)
        assert message in error.value.message, error.value.message


@pytest.mark.slow
def test_every_other_way_in_picks_its_model_too(folder: Path, tmp_path: Path) -> None:
    """gRPC, WebSockets, responses in the background and batches, through two API processes."""
    options = (*NULL, "--models-dir", str(folder), "--models-max", "1", "--api-servers", "2")
    store = ("--file-store", str(tmp_path / "files"), "--response-store", f"sqlite:{tmp_path}/r.db")
    with serving(None, *options, *store, "--grpc-port", "0") as served:
        eventually(lambda: any("serves gRPC" in line for line in served.lines), within_s=5)
        address = next(line.split()[-1] for line in served.lines if "serves gRPC" in line)
        with grpc.insecure_channel(address) as channel:
            tokens = called(channel, RENDER, "Tokenize", model="blue", prompt="hi")
            assert tokens.max_model_len == 1024 and states(served)["blue"] == "unloaded"
            reply = called(channel, INFERENCE, "Generate", model="blue", text="hi")
            assert reply and states(served)["blue"] == "loaded"
            with pytest.raises(grpc.RpcError) as error:
                called(channel, INFERENCE, "Generate", model="green", text="hi")
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
        with connect(served.url.replace("http", "ws") + "/v1/responses") as socket:
            ask = {"type": "response.create", "model": "red", "input": "hi", "max_output_tokens": 2}
            socket.send(json.dumps(ask))
            while (event := json.loads(socket.recv(timeout=300)))["type"] != "response.incomplete":
                assert event["type"] != "error", event
            assert event["response"]["model"] == "red" and states(served)["red"] == "loaded"
        body = {"model": "blue", "input": "hi", "max_output_tokens": 4, "background": True}
        ident = served.post("/v1/responses", body).json()["id"]
        eventually(lambda: is_over(served, f"/v1/responses/{ident}"), within_s=30)
        assert served.get(f"/v1/responses/{ident}").json()["model"] == "blue"
        with openai_client(served.url) as client:
            lines = [
                {"custom_id": name, "method": "POST", "url": "/v1/completions",
                 "body": {"model": name, "prompt": "hi", "max_tokens": 2}}
                for name in ("red", "blue", "green")
            ]  # fmt: skip
            written = "\n".join(json.dumps(line) for line in lines).encode()
            file = client.files.create(file=("lines.jsonl", written), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            eventually(lambda: is_over(served, f"/v1/batches/{batch.id}"), within_s=60)
            done = client.batches.retrieve(batch.id)
            assert done.request_counts is not None and done.output_file_id and done.error_file_id
            assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
            answers = client.files.content(done.output_file_id).text.splitlines()
            models = {json.loads(one)["response"]["body"]["model"] for one in answers}
            assert models == {"red", "blue"}
            assert "available: blue" in client.files.content(done.error_file_id).text
        eventually(lambda: not any(c["in_use"] for c in cards(served)), within_s=10)
        assert served.stop() == 0


def cards(served: Served) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = served.get("/v1/models").json()["data"]
    return listed


def is_over(served: Served, path: str) -> bool:
    return served.get(path).json()["status"] in ("completed", "incomplete", "failed")


def called(channel: grpc.Channel, service: RpcService, method: str, **fields: Any) -> Any:
    stub = channel.unary_unary(
        f"/{service.full_name}/{method}",
        request_serializer=service.request(method).SerializeToString,
        response_deserializer=service.response(method).FromString,
    )
    return stub(service.request(method)(**fields), timeout=300)


class Oracle:
    """Five models of different sizes and weights, and what each says alone."""

    names = ("alpha", "beta", "gamma", "delta", "epsilon")
    prompts = ("the quick brown", "a mill wheel", "dog", "the lazy fox jumps over", "naïve")

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaConfig

        self.folder = folder
        for number, name in enumerate(self.names):
            config = json.loads((write_model_folder(folder / name) / "config.json").read_text())
            del config["model_type"]
            config["num_hidden_layers"] = 1 + number % 3
            save_oracle(LlamaConfig(**config), folder / name, seed=number)
        self.alone: dict[tuple[str, str], str] = {}
        for name in self.names:
            options = ("--model", str(folder / name), *CPU)
            with serving(None, *options) as served, openai_client(served.url) as client:
                for prompt in self.prompts:
                    self.alone[name, prompt] = answer(client, name, prompt)


CPU = ("--device", "cpu", "--kv-blocks", "200")
NUM_REQUESTS = 500


def answer(client: openai.OpenAI, name: str, prompt: str) -> str:
    reply = client.completions.create(
        model=name, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.model == name
    return reply.choices[0].text


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_five_models_in_memory_for_two_answer_as_each_alone(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path)
    assert len(set(oracle.alone.values())) > 15, "the models differ"
    memory = 2 * (CPU_PROCESS_BYTES + (4 << 20))
    options = ("--models-dir", str(tmp_path), "--models-memory", str(memory), *CPU)
    with serving(None, *options) as served:
        waits: list[float] = []
        random = Random(1)
        asked = [
            (random.choice(oracle.names), random.choice(oracle.prompts))
            for _ in range(NUM_REQUESTS)
        ]

        def one(number: int) -> str:
            name, prompt = asked[number]
            with openai_client(served.url) as client:
                return answer(client, name, prompt)

        def look() -> int:
            cards = served.get("/v1/models").json()["data"]
            active = [c for c in cards if c["status"]["value"] not in ("unloaded", "failed")]
            assert sum(card["num_bytes"] for card in active) <= memory
            waits.extend(card["num_waiting"] for card in cards)
            return len(active)

        rest = len(served.api_processes)
        first = memory_of(served.api_processes[0])
        with ThreadPoolExecutor(24) as pool:
            replies = pool.map(one, range(NUM_REQUESTS))
            most = max(look() for _ in range(50))
            wrong = [
                (asked[number], reply)
                for number, reply in enumerate(replies)
                if reply != oracle.alone[asked[number]]
            ]
        assert wrong == [] and most == 2 and max(waits) > 1
        assert len(served.cores) <= 3 and len(served.api_processes) == rest
        assert memory_of(served.api_processes[0]) - first < 64 << 20, "five tokenizers are small"
        cards = served.get("/v1/models").json()["data"]
        assert not any(card["in_use"] or card["num_waiting"] for card in cards)
        assert served.stop() == 0


def memory_of(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sleeping_models_wake_and_a_torn_file_stays_with_its_model(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path)
    torn = tmp_path / "beta" / "model.safetensors"
    header = torn.read_bytes()
    torn.write_bytes(header.replace(b"layers.0.mlp.up_proj", b"layers.0.mlp.op_proj"))
    options = ("--models-dir", str(tmp_path), "--models-max", "1", *CPU)
    with serving(None, *options, "--models-sleep-memory", "1GiB") as served:
        with openai_client(served.url) as client:
            for name in ("alpha", "gamma", "alpha", "gamma", "alpha"):
                assert answer(client, name, "dog") == oracle.alone[name, "dog"]
                asleep = {c.id for c in client.models.list().data if status(c) == "asleep"}
            assert asleep == {"gamma"}
            with pytest.raises(openai.InternalServerError) as error:
                answer(client, "beta", "dog")
            assert error.value.status_code == 500 and "up_proj" in error.value.message
            assert str(tmp_path) not in error.value.message
            assert answer(client, "gamma", "dog") == oracle.alone["gamma", "dog"]
        assert served.stop() == 0


def status(card: openai.types.Model) -> str:
    """What is not OpenAI's own lies among the extra fields."""
    assert card.model_extra is not None
    return str(card.model_extra["status"]["value"])
