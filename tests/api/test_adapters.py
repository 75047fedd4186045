"""Adapters over HTTP: named as the model in every dialect, listed with their parent, loaded and unloaded while the
server runs; the tokens are those of merged weights (ENG-20, BEY-20)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, eventually, serving
from tests.back.lora.adapters import merge, module_sizes, write_adapter
from tests.back.lora.test_applied import spec_of
from tests.models.oracle import load_ours, save_oracle

WORDS = "the quick brown fox"
MESSAGES = [{"role": "user", "content": WORDS}]
NUM_TOKENS = 6
GREEDY = {"temperature": 0}
ADMIN = {"Authorization": "Bearer secret"}


class Model:
    """A folder to be served, adapters of it, and transformers' models of each."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaConfig

        self.folder = write_model_folder(folder / "base")
        config = json.loads((self.folder / "config.json").read_text())
        settings = {key: value for key, value in config.items() if key != "model_type"}
        oracle = save_oracle(LlamaConfig(**settings), self.folder)
        sizes = module_sizes(load_ours(spec_of(self.folder)))
        self.oracles: dict[str, Any] = {"base": oracle}
        self.adapters = folder / "adapters"
        self.resolved = folder / "resolved"
        self.resolved.mkdir()
        self.sizes = sizes
        for number, name in enumerate(("red", "blue")):
            adapter = write_adapter(self.adapters / name, sizes, seed=number, size=0.8)
            self.oracles[name] = copy.deepcopy(oracle)
            merge(self.oracles[name], adapter)

    def tokens(self, name: str, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.oracles[name].generate(
                ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return [int(token) for token in out[0, len(prompt) :]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Served]:
    options = (
        *("--model", str(model.folder), "--served-model-name", "base", "--device", "cpu"),
        *("--lora-modules", f"red={model.adapters / 'red'}"),
        *("--lora-folders", str(model.adapters), "--max-lora-rank", "8", "--kv-blocks", "200"),
        *("--admin-key", "secret", "--lora-resolver-folders", str(model.resolved)),
    )
    with serving(None, *options) as served:
        yield served
        assert served.at_rest()
        assert len(served.cores) == 1, "the core was restarted"


def administer(server: Served, what: str, body: dict[str, str]) -> Any:
    return server.post(f"/v1/{what}_lora_adapter", body, **ADMIN)


def complete(server: Served, name: str, prompt: list[int], **more: Any) -> Any:
    document = {
        "model": name, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip
    return server.post("/v1/completions", document)


def test_an_adapter_answers_under_its_name(server: Served, model: Model) -> None:
    prompt = [7, 30, 90, 200, 41]
    answers = {}
    for name in ("base", "red"):
        answer = complete(server, name, prompt).json()
        answers[name] = answer["choices"][0]["token_ids"]
        assert answer["model"] == name
        assert answers[name] == model.tokens(name, prompt)
    assert answers["base"] != answers["red"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **GREEDY}),
        ("/v1/responses", {"input": WORDS, "max_output_tokens": 16, "store": False, **GREEDY}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, **GREEDY}),
        ("/v2/chat", {"messages": MESSAGES, "max_tokens": 4, "stream": False, **GREEDY}),
        (
            "/inference/v1/generate",
            {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, **GREEDY}},
        ),
    ],
)
def test_every_dialect_takes_an_adapter_as_its_model(server: Served, path: str, body: Any) -> None:
    texts = {}
    for name in ("base", "red"):
        answer = server.post(path, {"model": name, **body})
        assert answer.status_code == 200, answer.text
        document = answer.json()
        texts[name] = json.dumps(
            [document.get(key) for key in ("choices", "output", "content", "message")]
        )
    assert texts["base"] != texts["red"]


def test_adapters_are_listed_with_their_parent(server: Served) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert cards["red"]["parent"] == "base" and cards["base"]["parent"] is None
    assert server.get("/v1/models/red").json()["id"] == "red"
    missing = complete(server, "green", [5])
    assert missing.status_code == 404 and "red" in missing.json()["error"]["message"]


def test_an_adapter_is_loaded_and_unloaded_while_the_server_runs(
    server: Served, model: Model
) -> None:
    prompt = [9, 9, 80, 300]
    load = {"lora_name": "blue", "lora_path": str(model.adapters / "blue")}
    assert complete(server, "blue", prompt).status_code == 404
    assert administer(server, "load", load).status_code == 200
    answer = complete(server, "blue", prompt).json()
    assert answer["choices"][0]["token_ids"] == model.tokens("blue", prompt)
    again = administer(server, "load", load)
    assert again.status_code == 400 and "is loaded already" in again.text
    listed = server.get("/v1/lora_adapters", **ADMIN).json()["engines"][0]["adapters"]
    assert {each["name"]: each["rank"] for each in listed} == {"red": 4, "blue": 4}
    assert administer(server, "unload", {"lora_name": "blue"}).status_code == 200
    assert administer(server, "unload", {"lora_name": "blue"}).status_code == 404
    assert complete(server, "blue", prompt).status_code == 404


@pytest.mark.parametrize(
    ("name", "path", "status", "words"),
    [
        ("blue", "/etc", 400, "below a folder"),
        ("blue", "{}/../base", 400, "below a folder"),
        ("blue", "{}/green", 404, "no folder"),
        ("base", "{}/blue", 400, "own name"),
        ("a b", "{}/blue", 400, "letters, digits"),
        ("blue", "{}/broken", 400, "is missing, or not a file"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    server: Served, model: Model, name: str, path: str, status: int, words: str
) -> None:
    (model.adapters / "broken").mkdir(exist_ok=True)
    body = {"lora_name": name, "lora_path": path.format(model.adapters)}
    answer = administer(server, "load", body)
    assert answer.status_code == status and words in answer.text, answer.text


def test_routes_that_adapters_do_nothing_for_refuse_them(server: Served) -> None:
    answer = server.post("/v1/embeddings", {"model": "red", "input": WORDS})
    assert answer.status_code == 400 and "takes none" in answer.text


@pytest.mark.slow
def test_the_synchronous_client_takes_an_adapter(model: Model) -> None:
    prompt = [7, 30, 90, 200, 41]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LLM(
        str(model.folder),
        lora_modules=(f"red={model.adapters / 'red'}",),
        device="cpu",
        kv_blocks=100,
    ) as llm:
        for name in ("", "red"):
            (output,) = llm.generate([prompt], params, adapter=name, progress=False)
            assert output.outputs[0].token_ids == model.tokens(name or "base", prompt)


def test_adapters_that_come_into_a_folder_are_found_by_name(
    server: Served, model: Model, tmp_path: Path
) -> None:
    """And one that leads out of it is not."""
    (model.resolved / "outside").symlink_to(model.adapters / "red")
    written = write_adapter(tmp_path / "green", model.sizes, seed=7, size=0.8)
    model.oracles["green"] = copy.deepcopy(model.oracles["base"])
    merge(model.oracles["green"], written)
    assert complete(server, "green", [5, 6, 7]).status_code == 404
    (tmp_path / "green").rename(model.resolved / "green")

    def names() -> list[str]:
        return [one["id"] for one in server.get("/v1/models").json()["data"]]

    eventually(lambda: "green" in names(), within_s=20)
    assert "outside" not in names()
    answer = complete(server, "green", [5, 6, 7], return_token_ids=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == model.tokens("green", [5, 6, 7])
