"""Weights that are replaced while a server runs: the tokens are those of transformers with the new ones, told with
their version; nothing that runs is lost, and what does not fit changes nothing (ENG-19)."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from headrace import LLM, SamplingParams
from headrace.back.transfer.groups import broadcast, join
from headrace.base.wire.weights import Group
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, serving
from tests.back.transfer.trainers import free_port
from tests.models.oracle import save_oracle

PROMPT = [5, 9, 4, 17, 8]
NUM_TOKENS = 6
ADMIN = {"Authorization": "Bearer secret"}
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


class Versions:
    """Folders of a tiny model with other weights each, and transformers' models of them."""

    def __init__(self, root: Path) -> None:
        from transformers import LlamaConfig

        self.folders: list[Path] = []
        self.oracles: list[Any] = []
        for seed in range(3):
            folder = write_model_folder(root / str(seed))
            config = json.loads((folder / "config.json").read_text())
            settings = {key: value for key, value in config.items() if key != "model_type"}
            self.oracles.append(save_oracle(LlamaConfig(**settings), folder, seed=20 + seed))
            self.folders.append(folder)
        assert len({tuple(self.tokens(number)) for number in range(3)}) == 3

    def tensors(self, number: int) -> dict[str, torch.Tensor]:
        return load_file(self.folders[number] / "model.safetensors")

    def tokens(self, number: int) -> list[int]:
        ids = torch.tensor([PROMPT])
        with torch.inference_mode():
            out = self.oracles[number].generate(
                ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="module")
def served(versions: Versions) -> Iterator[Served]:
    options = (
        *("--model", str(versions.folders[0]), "--served-model-name", "m", "--device", "cpu"),
        *("--admin-key", "secret", "--kv-blocks", "400"),
    )
    with serving(None, *options) as server:
        yield server
        assert server.at_rest()
        assert len(server.cores) == 1, "the core was restarted"


@pytest.fixture
def server(served: Served, versions: Versions) -> Served:
    """The weights of version 0, whatever a test before has left."""
    administer(served, "/resume", {})
    update(served, versions, 0, weight_version="v0")
    return served


def administer(server: Served, path: str, body: object) -> httpx.Response:
    return server.post(path, body, **ADMIN)


def update(server: Served, versions: Versions, number: int, **more: Any) -> Any:
    body = {"model_path": str(versions.folders[number]), **more}
    answer = administer(server, "/update_weights_from_disk", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(server: Served, **more: Any) -> Any:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": NUM_TOKENS, **GREEDY, **more}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json() | {"header": answer.headers["x-weights-version"]}


def tokens(server: Served) -> list[int]:
    ids: list[int] = said(server)["choices"][0]["token_ids"]
    return ids


def test_weights_of_a_folder_take_over_and_are_told_by_version(
    server: Served, versions: Versions
) -> None:
    assert tokens(server) == versions.tokens(0)
    told = update(server, versions, 1, weight_version="step-1")
    assert told["success"] and told["weight_version"] == "step-1" and told["num_bytes"] > 0
    answer = said(server)
    assert answer["choices"][0]["token_ids"] == versions.tokens(1)
    assert answer["usage"]["weights_version"] == answer["header"] == "step-1"
    assert server.get("/get_weight_version", **ADMIN).json() == {"weight_version": "step-1"}


@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_replaced_while_it_sleeps(
    server: Served, versions: Versions, level: int
) -> None:
    """What is asked meanwhile waits, and is answered by the new ones; those that do not fit change nothing."""
    assert administer(server, f"/sleep?level={level}&mode=wait", {}).status_code == 200
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(said, server)
        told = update(server, versions, 1, weight_version="asleep")
        assert told["success"] and told["weight_version"] == "asleep"
        held = administer(server, "/update_weights_from_disk", {"model_path": "/nowhere"})
        assert held.status_code == 400 and ("asleep" if level == 2 else "model_path") in held.text
        wake = administer(server, "/wake_up", {})
        assert wake.status_code == 200, wake.text
        answer = waiting.result(300)
    assert answer["choices"][0]["token_ids"] == versions.tokens(1)
    assert answer["usage"]["weights_version"] == "asleep"
    assert said(server)["header"] == "asleep"
    update(server, versions, 0, weight_version="back")
    assert tokens(server) == versions.tokens(0)


def test_some_of_the_weights_come_in_parts_while_it_sleeps(
    server: Served, versions: Versions
) -> None:
    """What is pushed is there before any memory of the cache is (ENG-19); at level 2 there is nothing to push
    parts to."""
    old, new = versions.tensors(0), versions.tensors(1)
    attention = {name: x for name, x in new.items() if "self_attn" in name}
    rest = {name: x for name, x in new.items() if name not in attention}
    assert attention and rest and not torch.equal(*(x["model.norm.weight"] for x in (old, new)))

    def push(tensors: Any, **more: Any) -> httpx.Response:
        body = {"serialized_named_tensors": [base64.b64encode(save(tensors)).decode()], **more}
        return administer(server, "/update_weights_from_tensor", body)

    assert administer(server, "/sleep?level=1&mode=wait", {}).status_code == 200
    first = push(attention, weight_version="half")
    assert first.status_code == 200, first.text
    assert administer(server, "/start_weight_update", {}).status_code == 200
    assert push(rest).json()["mixed"]
    assert (
        administer(server, "/finish_weight_update", {"weight_version": "whole"}).status_code == 200
    )
    assert administer(server, "/wake_up", {}).status_code == 200
    administer(server, "/resume", {})
    answer = said(server)
    assert answer["choices"][0]["token_ids"] == versions.tokens(1)
    assert answer["header"] == "whole"
    assert administer(server, "/sleep?level=2&mode=wait", {}).status_code == 200
    refused = push(attention)
    assert refused.status_code == 400 and "takes whole checkpoints alone" in refused.text
    assert administer(server, "/wake_up", {}).status_code == 200


def test_a_folder_that_cannot_be_loaded_leaves_the_weights_of_before(
    server: Served, versions: Versions, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(versions.folders[1], broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    assert administer(server, "/sleep?level=2&mode=wait", {}).status_code == 200
    update(server, versions, 2, weight_version="before")
    assert administer(server, "/wake_up", {}).status_code == 200
    assert administer(server, "/sleep?level=2&mode=wait", {}).status_code == 200
    body = {"model_path": str(broken), "weight_version": "broken"}
    assert administer(server, "/update_weights_from_disk", body).status_code == 200
    failed = administer(server, "/wake_up", {})
    assert failed.status_code >= 500 and "model.norm.weight" in failed.text
    assert administer(server, "/wake_up", {}).status_code == 200
    assert said(server)["header"] == "before" and tokens(server) == versions.tokens(2)


SAID = [{"role": "user", "content": "hi"}]
FEW = {"max_tokens": 2}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, **FEW},
    "/v1/chat/completions": {"messages": SAID, **FEW},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": SAID, **FEW},
    "/v2/chat": {"messages": SAID, **FEW},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
}


def test_every_dialect_tells_the_version(server: Served, versions: Versions) -> None:
    """Whole and streamed, before and behind an update."""
    for number, version in ((1, "one"), (0, "two")):
        update(server, versions, number, weight_version=version)
        for path, body in DIALECTS.items():
            for stream in (False, True):
                answer = server.post(path, {"model": "m", **body, "stream": stream})
                assert answer.status_code == 200, (path, answer.text)
                assert answer.headers["x-weights-version"] == version, (path, stream)


def test_prefixes_of_other_weights_are_not_used(server: Served, versions: Versions) -> None:
    long = {"prompt": PROMPT * 10}
    assert said(server, **long)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert said(server, **long)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    update(server, versions, 1)
    assert said(server, **long)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda t: {"model.nothing.weight": t["model.norm.weight"]}, "unknown to the model"),
        (lambda t: {"model.norm.weight": torch.ones(3)}, "not what the model needs"),
        (lambda t: {"model.norm.weight": t["model.norm.weight"].int()}, "dtype I32"),
        (lambda t: t | {"model.norm.weight": t["model.norm.weight"] * torch.nan}, "NaN or Inf"),
    ],
    ids=["name", "shape", "dtype", "nan"],
)
def test_what_does_not_fit_changes_nothing(
    server: Served, versions: Versions, spoil: Any, what: str
) -> None:
    """Also where all other tensors are good ones."""
    body = save(spoil(versions.tensors(1)))
    text = base64.b64encode(body).decode()
    refused = administer(
        server, "/update_weights_from_tensor", {"serialized_named_tensors": [text]}
    )
    assert refused.status_code == 400 and what in refused.text, refused.text
    assert tokens(server) == versions.tokens(0)


def test_a_pickle_is_refused_and_so_is_a_folder_that_is_none(server: Served) -> None:
    pickled = base64.b64encode(b"\x80\x04" + b"." * 40).decode()
    body = {"serialized_named_tensors": [pickled]}
    refused = administer(server, "/update_weights_from_tensor", body)
    assert refused.status_code == 400 and "pickles" in refused.text
    refused = administer(server, "/update_weights_from_disk", {"model_path": "/nowhere"})
    assert refused.status_code == 400 and "model_path" in refused.text
    assert server.post("/update_weights_from_disk", {"model_path": "/x"}).status_code == 401


def test_some_tensors_in_the_request_itself(server: Served, versions: Versions) -> None:
    tensors = versions.tensors(1)
    halves = [dict(list(tensors.items())[i::2]) for i in (0, 1)]
    texts = [base64.b64encode(save(half)).decode() for half in halves]
    body = {"serialized_named_tensors": texts, "weight_version": "sent"}
    assert administer(server, "/update_weights_from_tensor", body).status_code == 200
    assert tokens(server) == versions.tokens(1)
    name = "model.layers.0.self_attn.k_proj.weight"
    body = {"name": name, "truncate_size": 3}
    values = administer(server, "/get_weights_by_name", body).json()["values"]
    assert values == [tensors[name].flatten()[:3].tolist()]


def test_an_update_in_buckets_is_a_mixture_until_it_is_finished(
    server: Served, versions: Versions, tmp_path: Path
) -> None:
    tensors = list(versions.tensors(2).items())
    assert administer(server, "/start_weight_update", {}).status_code == 409, "nothing is paused"
    administer(server, "/pause?mode=keep", {})
    assert administer(server, "/start_weight_update", {}).status_code == 200
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(dict(tensors[number::4]), folder / "model.safetensors")
        body = {"update_info": {"path": str(folder)}}
        told = administer(server, "/update_weights", body)
        assert told.status_code == 200 and told.json()["mixed"], told.text
    again = administer(server, "/update_weights", {"update_info": {"path": str(tmp_path / "0")}})
    assert again.status_code == 400 and "comes twice" in again.text
    refused = administer(server, "/resume", {})
    assert refused.status_code == 409 and "mixture" in refused.text
    told = administer(server, "/finish_weight_update", {"weight_version": "whole"}).json()
    assert told["weight_version"] == "whole" and not told["mixed"]
    assert administer(server, "/resume", {}).status_code == 200
    assert tokens(server) == versions.tokens(2)


def test_a_trainer_broadcasts_weights_over_gloo(server: Served, versions: Versions) -> None:
    """Tensor by tensor, then all in one buffer, while it sleeps."""
    port = free_port()
    group = Group(name="trainer", address="127.0.0.1", port=port, backend="gloo")
    joined: list[httpx.Response] = []
    body = {
        **{"master_address": "127.0.0.1", "master_port": port, "world_size": 2},
        **{"group_name": "trainer", "backend": "gloo"},
    }
    worker = threading.Thread(
        target=lambda: joined.append(administer(server, "/init_weights_update_group", body))
    )
    worker.start()
    members = join(group, 0, torch.device("cpu"))
    worker.join(300)
    assert joined[0].status_code == 200, joined[0].text
    for number, form in ((1, None), (2, "flattened_bucket")):
        tensors = versions.tensors(number)
        asked = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype) for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            **{"group_name": "trainer", "load_format": form, "weight_version": f"b{number}"},
        }
        if form:
            assert administer(server, "/sleep?level=1&mode=wait", {}).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(administer, server, "/update_weights_from_distributed", asked)
            if form:
                flat = [tensor.flatten().view(torch.uint8) for tensor in tensors.values()]
                broadcast(torch.cat(flat), members)
            else:
                for tensor in tensors.values():
                    broadcast(tensor, members)
            assert answer.result(300).status_code == 200, answer.result().text
        if form:
            assert administer(server, "/wake_up", {}).status_code == 200
            administer(server, "/resume", {})
        assert tokens(server) == versions.tokens(number)
    left = administer(server, "/destroy_weights_update_group", {"group_name": "trainer"})
    assert left.status_code == 200
    unknown = administer(server, "/destroy_weights_update_group", {"group_name": "trainer"})
    assert unknown.status_code == 400 and "has not been joined" in unknown.text


def test_a_hash_tells_whether_weights_are_the_same(server: Served, versions: Versions) -> None:
    def digest() -> str:
        told = administer(server, "/weights_checker", {"action": "checksum"})
        return str(told.json()["digests"][0])

    first = digest()
    tokens(server)
    update(server, versions, 1)
    assert digest() != first
    update(server, versions, 0)
    assert digest() == first
    body = {"action": "compare", "expected": first}
    assert administer(server, "/weights_checker", body).json()["success"] is True


def test_scripts_give_tensors_and_are_told_the_version(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"  # of its own: other processes use /dev/shm too
    shared.mkdir()
    monkeypatch.setattr("headrace.front.client.weights.SHARED", shared)
    folder = shutil.copytree(versions.folders[0], tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), device="cpu", kv_blocks=200) as llm:
        before = llm.generate([PROMPT], params, progress=False)[0]
        assert (before.outputs[0].token_ids, before.weights_version) == (versions.tokens(0), "")
        assert llm.update_weights(versions.tensors(1)) == "1" == llm.weights_version
        arrays = {name: tensor.numpy() for name, tensor in versions.tensors(2).items()}
        after = llm.generate([PROMPT], params, progress=False)[0]
        assert (after.outputs[0].token_ids, after.weights_version) == (versions.tokens(1), "1")
        assert llm.update_weights(arrays, version="numpy", mode="keep") == "numpy"
        last = llm.generate([PROMPT], params, progress=False)[0]
        assert (last.outputs[0].token_ids, last.weights_version) == (versions.tokens(2), "numpy")
    assert not list(shared.iterdir())
