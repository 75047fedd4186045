"""The administrative plane over its own listener (API-20): who may ask, what it tells, and that a reload is real."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.api.serving import NO_TLS, Served, eventually, serving

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
KEY = "admin-key-1"
ASK = {"prompt": "The fox went to the river", "max_tokens": 12, "temperature": 0}
PLACE = re.compile(r"administration: (\S+)/v1/admin/")


@contextlib.contextmanager
def plane(*options: str, key: str | None = KEY) -> Iterator[tuple[Served, httpx.Client]]:
    keyed = {} if key is None else {"HEADRACE_ADMIN_KEY": key}
    with serving(
        None, "--threads", "1", "--admin-listen", "127.0.0.1:0", *options, **keyed
    ) as served:
        eventually(lambda: any("administration:" in line for line in served.lines), within_s=5)
        base = next(found[1] for line in served.lines if (found := PLACE.search(line)))
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        with httpx.Client(
            base_url=base + "/v1/admin", headers=headers, timeout=60, verify=NO_TLS
        ) as client:
            yield served, client


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Served, httpx.Client]]:
    with plane() as found:
        yield found


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with its first layer's outputs turned round: it says something else."""
    folder = tmp_path_factory.mktemp("other")
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(MODEL / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = -tensors[name]
    save_file(tensors, folder / "model.safetensors")
    return folder


def said(served: Served) -> str:
    text: str = served.post("/v1/completions", ASK).json()["choices"][0]["text"]
    return text


def test_only_the_admin_key_opens_it(running: tuple[Served, httpx.Client]) -> None:
    served, client = running
    for path in ("/health", "/config", "/queue", "/ledger", "/models"):
        assert client.get(path).status_code == 200, path
        for headers in ({"authorization": ""}, {"authorization": "Bearer wrong"}):
            assert client.get(path, headers=headers).status_code == 401
    assert served.get("/v1/admin/health").status_code == 404
    assert client.get("/../../v1/models").status_code in (401, 404)


def test_it_tells_configuration_and_queue(running: tuple[Served, httpx.Client]) -> None:
    _, client = running
    config = client.get("/config").json()
    assert config["engine"]["model"]["dtype"] == "bfloat16"
    assert any(one["field"] == "--device" for one in config["decisions"])
    assert KEY not in json.dumps(config)
    assert client.get("/queue").json()["engines"][0]["waiting"] == 0
    assert client.get("/health").json()["is_running"] is True


def test_reload_changes_what_is_said_and_back(
    running: tuple[Served, httpx.Client], other_weights: Path
) -> None:
    served, client = running
    before = said(served)
    answer = client.post("/reload_model", json={"model": str(other_weights)})
    assert answer.status_code == 200, answer.text
    after = said(served)
    assert after != before
    assert client.get("/models").json()["models"][0]["path"] == str(other_weights)
    assert client.post("/reload_model", json={"model": str(MODEL)}).status_code == 200
    assert said(served) == before and served.at_rest()


def test_a_reload_that_fails_leaves_the_old_weights_serving(
    running: tuple[Served, httpx.Client], tmp_path: Path, other_weights: Path
) -> None:
    """API-20, REG-107."""
    served, client = running
    before = said(served)
    for file in other_weights.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(other_weights / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    broken = client.post("/reload_model", json={"model": str(tmp_path)})
    assert broken.status_code >= 400 and "norm" in broken.text
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    misfit = client.post("/reload_model", json={"model": str(tmp_path)})
    assert misfit.status_code >= 400 and "num_hidden_layers" in misfit.text
    assert client.post("/reload_model", json={"model": "/nowhere/at/all"}).status_code >= 400
    assert said(served) == before and client.get("/health").json()["is_paused"] is False


def test_asleep_requests_wait_and_awake_they_are_answered(
    running: tuple[Served, httpx.Client],
) -> None:
    served, client = running
    before = said(served)
    assert client.post("/sleep", json={"level": 1}).status_code == 200
    assert client.get("/health").json()["is_asleep"] is True
    assert client.post("/resume", json={}).status_code == 409
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(said(served)))
    waiting.start()
    eventually(lambda: client.get("/queue").json()["engines"][0]["waiting"] == 1, within_s=10)
    assert client.post("/wake", json={}).status_code == 200
    waiting.join(30)
    assert answers == [before] and served.at_rest()


def test_a_core_that_dies_comes_back_with_the_reloaded_weights(other_weights: Path) -> None:
    with plane() as (served, client):
        assert client.post("/reload_model", json={"model": str(other_weights)}).status_code == 200
        after = said(served)
        (core,) = served.cores
        core.kill()
        eventually(lambda: any(one.pid != core.pid for one in served.cores), within_s=60)
        eventually(lambda: served.get("/health/ready").status_code == 200, within_s=60)
        assert said(served) == after


def test_read_only_tells_but_changes_nothing() -> None:
    with plane("--admin-readonly", key=None) as (served, client):
        assert client.get("/queue").status_code == 200
        for path in ("/pause", "/reload_model", "/sleep", "/resume", "/log_level"):
            assert client.post(path, json={}).status_code == 403, path
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
        assert said(served)


def test_the_command_speaks_over_a_unix_socket(tmp_path: Path) -> None:
    place = f"unix:{tmp_path}/admin.sock"
    with serving(None, "--threads", "1", "--admin-listen", place) as served:
        assert oct(os.stat(tmp_path / "admin.sock").st_mode)[-3:] == "600"

        def admin(*words: str) -> subprocess.CompletedProcess[str]:
            command = [
                sys.executable,
                "-m",
                "headrace.cli.main",
                "admin",
                *words,
                "--address",
                place,
            ]
            return subprocess.run(command, capture_output=True, text=True, timeout=60)

        assert json.loads(admin("health").stdout)["status"] == "ok"
        assert json.loads(admin("pause", "--mode", "keep").stdout)["mode"] == "keep"
        assert served.get("/health").status_code == 200
        assert admin("resume").returncode == 0
        assert admin("reload_model", "--model", "/nowhere").returncode == 1
        assert admin("log_level", "--level", "debug").returncode == 0
