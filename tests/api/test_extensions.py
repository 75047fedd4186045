"""Code of others by entry points: a small real package in a site folder of its own, used through a served model
(ENG-20). What it breaks is its own request, or the start that names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, serving
from tests.models.oracle import save_oracle

PACKAGE = '''
"""Extensions for tests."""
import json
from pathlib import Path
import torch
from headrace.back.models.llama import build as build_llama

HEADRACE_API = 1

def only_seven(token_ids, logits):
    assert all(isinstance(one, int) for one in token_ids)
    return torch.where(torch.arange(len(logits)) == 7, 0.0, float("-inf"))

def count_up(token_ids, logits):
    logits[:] = float("-inf")
    logits[(token_ids[-1] + 1) % len(logits)] = 1.0
    return logits

def broken(token_ids, logits):
    raise RuntimeError("it does not work")

def short(token_ids, logits):
    return logits[:3]

def say(token_ids, logits):
    ids = json.loads((Path(__file__).parent / "said.json").read_text())
    at = ids.index(token_ids[-1]) + 1 if token_ids[-1] in ids else 0
    logits[:] = float("-inf")
    logits[ids[at % len(ids)]] = 0.0
    return logits

def nothing(token_ids, logits):
    return logits * float("-inf")

def build(scope, config):
    return build_llama(scope, config)
'''
IO = """
HEADRACE_API = 1
import numpy

class Lines:
    def __init__(self, text):
        self.names = text.model_names

    def prompts(self, data):
        if not isinstance(data, dict):
            raise ValueError("an object with lines is wanted")
        return data["lines"]

    def answer(self, data, vectors):
        return {
            "names": self.names,
            "norms": [float(numpy.linalg.norm(one)) for one in vectors],
            "near": float(vectors[0] @ vectors[-1]),
            "what": set() if data.get("odd") else data["lines"],
        }
"""
PARSERS = """
HEADRACE_API = 1
from headrace.front.text.parsing.families_reasoning import ReasoningFamily, ReasoningTags

muse = ReasoningFamily(name="muse", marks=(), tags=ReasoningTags(open="the", close="fox"))
"""
ENTRIES = """
[headrace.logits_processors]
only_seven = tinyplug:only_seven
count_up = tinyplug:count_up
broken = tinyplug:broken
short = tinyplug:short
say = tinyplug:say
nothing = tinyplug:nothing

[headrace.models]
TinyPlugForCausalLM = tinyplug:build

[headrace.reasoning_parsers]
muse = tinyplug.parsers:muse

[headrace.io_processors]
lines = tinyplug.io:Lines
"""


def write_package(site: Path, name: str, entries: str, files: dict[str, str]) -> None:
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    info = site / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entries)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    files = {"tinyplug/__init__.py": PACKAGE, "tinyplug/parsers.py": PARSERS, "tinyplug/io.py": IO}
    write_package(site, "tinyplug", ENTRIES, files)
    old = "[headrace.logits_processors]\nancient = ancient:run\nabsent = absent_module:run\n"
    write_package(site, "relics", old, {"ancient.py": "HEADRACE_API = 0\nrun = print\n"})
    return site


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose architecture only the package knows."""
    from transformers import LlamaConfig

    folder = write_model_folder(tmp_path_factory.mktemp("model") / "foreign")
    config = json.loads((folder / "config.json").read_text())
    save_oracle(LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"}), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["TinyPlugForCausalLM"], "model_type": "tinyplug"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def path_with(site: Path) -> str:
    return os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])


def options_of(model: Path, *names: str) -> tuple[str, ...]:
    return (
        *("--model", str(model), "--served-model-name", "m", "--device", "cpu"),
        *("--kv-blocks", "200", "--extensions", ",".join(names)),
    )


@pytest.fixture(scope="module")
def server(model: Path, site: Path) -> Iterator[Served]:
    options = (
        *options_of(model, "tinyplug"),
        "--reasoning-parser",
        "muse",
        "--io-processor",
        "lines",
    )
    with serving(None, *options, PYTHONPATH=path_with(site)) as served:
        yield served
        assert served.at_rest()
        assert len(served.cores) == 1, "the core was restarted"


def asked(server: Served, **more: Any) -> httpx.Response:
    body = {"model": "m", "prompt": [5, 9, 4], "max_tokens": 4, "ignore_eos": True}
    return server.post("/v1/completions", {**body, "return_token_ids": True, **more})


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def test_functions_over_a_row_rewrite_logits_in_the_order_they_are_named(server: Served) -> None:
    assert tokens(asked(server, logits_processors=["only_seven"])) == [7] * 4
    assert tokens(asked(server, logits_processors=["count_up"], temperature=0)) == [5, 6, 7, 8]
    assert tokens(asked(server, logits_processors=["count_up", "only_seven"])) == [7] * 4
    assert tokens(asked(server, temperature=0)) != [7] * 4


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("broken", "broken failed: RuntimeError: it does not work"),
        ("short", "it returned [3], not logits"),
        ("nothing", "leave no token to sample"),
    ],
)
def test_a_function_that_fails_ends_its_own_request(server: Served, name: str, what: str) -> None:
    refused = asked(server, logits_processors=[name])
    assert refused.status_code == 400 and what in refused.text, refused.text
    assert tokens(asked(server, logits_processors=["only_seven"])) == [7] * 4


def test_a_name_that_is_not_allowed_is_refused_with_those_that_are(server: Served) -> None:
    refused = asked(server, logits_processors=["ancient"])
    assert refused.status_code == 400 and "only_seven" in refused.text
    assert refused.json()["error"]["param"] == "logits_processors"


def test_a_parser_of_the_package_tells_reasoning_apart(server: Served, site: Path) -> None:
    """Between "the" and "fox" the answer thinks."""
    spoken = "the quick brown fox jumps"
    ids = server.post("/tokenize", {"prompt": spoken, "add_special_tokens": False}).json()["tokens"]
    assert len(set(ids)) == len(ids)
    (site / "tinyplug" / "said.json").write_text(json.dumps(ids))
    body = {
        **{"model": "m", "messages": [{"role": "user", "content": "lazy dog"}]},
        **{"max_tokens": len(ids), "ignore_eos": True, "logits_processors": ["say"]},
    }
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert message["content"].strip() == "jumps"
    assert "quick brown" in json.dumps(message), message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("ancient", "is written for version 0 of the interface"),
        ("absent", "absent_module:run cannot be imported"),
        ("nobody", "'nobody' is not installed; installed are: TinyPlugForCausalLM, absent"),
    ],
)
def test_what_cannot_be_used_ends_the_start_by_name(
    model: Path, site: Path, name: str, what: str
) -> None:
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "--port", "0"]
    ended = subprocess.run(
        [*command, *options_of(model, "TinyPlugForCausalLM", name)],
        env=os.environ | {"PYTHONPATH": path_with(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode != 0 and what in ended.stderr + ended.stdout


def test_the_installed_ones_are_listed_without_an_import(site: Path) -> None:
    command = [sys.executable, "-m", "headrace.cli.main", "env", "--json"]
    environment = os.environ | {"PYTHONPATH": path_with(site)}
    listed = json.loads(subprocess.check_output(command, env=environment, text=True))
    assert listed["extensions"]["headrace.logits_processors absent"].startswith("relics 1.2")
    assert "headrace.models TinyPlugForCausalLM" in listed["extensions"]


def test_data_of_a_form_of_its_own_is_pooled_and_answered(server: Served) -> None:
    """ENG-20: an IO processor of a package, on /pooling."""
    lines = ["the quick brown fox", [5, 9, 4], "the quick brown fox"]
    answer = server.post("/pooling", {"model": "m", "task": "plugin", "data": {"lines": lines}})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert data["names"] == ["m"] and data["what"] == lines
    assert data["norms"][0] == pytest.approx(data["norms"][2], rel=1e-5)
    plain = server.post("/pooling", {"model": "m", "input": "the quick brown fox"})
    vector = plain.json()["data"][0]["data"]
    assert data["near"] == pytest.approx(sum(one * one for one in vector), rel=1e-4)
    for sent, why in (
        ("text", "ValueError: an object with lines is wanted"),
        ({}, "KeyError: 'lines'"),
        ({"lines": []}, "no list of 1 to"),
        ({"lines": [[10**6]]}, "data"),
        ({"lines": [7]}, "data"),
        ({"lines": ["a"], "odd": True}, "gives no JSON"),
    ):
        refused = server.post("/pooling", {"model": "m", "data": sent})
        assert refused.status_code == 400 and why in refused.text, refused.text
