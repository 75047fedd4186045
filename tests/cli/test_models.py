"""The commands in Ollama's words, from the outside: pull, list, rm and run against a hub on this machine, ps and stop
against a running server (BEY-43)."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config.units import parse_duration
from headrace.base.errors import ConfigError
from headrace.launch.hub import hub_cache, is_hub_id, wanted_files
from headrace.launch.locate import bundled_model
from tests.api.model_folder import write_model_folder
from tests.api.serving import serving
from tests.hub import COMMIT, FILES, GGUFS, REPOSITORIES, hub, hub_environment

__all__ = ["hub"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return hub_cache()


def headrace(
    hub: Any, *words: str, stdin: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    environment = os.environ if hub is None else hub_environment(hub)
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        env={**environment, **more},
        capture_output=True,
        text=True,
        input=stdin,
    )


def test_a_model_is_pulled_checked_listed_and_removed(hub: Any, cache: Path) -> None:
    hub.damages = True
    damaged = headrace(hub, "pull", "org/name")
    assert damaged.returncode == 2 and "is damaged: its digest is" in damaged.stderr
    hub.damages = False
    pulled = headrace(hub, "pull", "org/name")
    assert pulled.returncode == 0, pulled.stderr
    folder = Path(pulled.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not (folder / "modeling_evil.py").exists()
    listed = headrace(None, "list").stdout
    assert "org/name" in listed and "22.0 MiB" in listed and "headrace-demo" in listed
    hub.log.clear()
    assert headrace(hub, "pull", "org/name").stdout.strip() == str(folder)
    assert not any("/resolve/" in path and method == "GET" for method, path, _ in hub.log)
    removed = headrace(None, "rm", "org/name")
    assert removed.returncode == 0 and "removed org/name (22." in removed.stdout
    assert not list(cache.glob("models--*"))
    assert headrace(None, "rm", "org/name").returncode == 2


def test_the_files_of_a_model_among_those_of_its_repository() -> None:
    sizes, sees = dict.fromkeys(GGUFS, 1), ["config.json", "mmproj-small.gguf"]
    assert wanted_files(sizes, "", model="m") == [*sees, "small-Q4_K_M.gguf"]
    assert wanted_files(sizes, "q8_0", model="m") == [*sees, "small-Q8_0.gguf"]
    parts = ["small-F16-00001-of-00002.gguf", "small-F16-00002-of-00002.gguf"]
    assert wanted_files(sizes, "F16", model="m") == [*sees, *parts]
    deeper = {"Q2/big-Q2_K.gguf": 1, "a/b/big-Q3_K.gguf": 1}
    assert wanted_files(deeper, "", model="m") == ["Q2/big-Q2_K.gguf"]
    for tag in ("Q2_K", "4_K_M", "."):
        with pytest.raises(ConfigError, match="there are small-F16, small-Q4_K_M, small-Q8_0"):
            wanted_files(sizes, tag, model="m")
    with pytest.raises(ConfigError, match="has no model"):
        wanted_files({"README.md": 1, "pytorch_model.bin": 1}, "", model="m")


@pytest.mark.slow
def test_one_gguf_of_a_repository_is_pulled_by_its_tag(hub: Any, cache: Path) -> None:
    for model, names in {
        "org/ggufs": {"small-Q4_K_M.gguf"},
        "org/ggufs:q8_0": {"small-Q8_0.gguf"},
        "org/ggufs:F16": {"small-F16-00001-of-00002.gguf", "small-F16-00002-of-00002.gguf"},
    }.items():
        shutil.rmtree(cache, ignore_errors=True)
        pulled = headrace(hub, "pull", model)
        assert pulled.returncode == 0, pulled.stderr
        files = {path.name for path in Path(pulled.stdout.strip()).iterdir()}
        assert files == {"config.json", "mmproj-small.gguf", *names}
    wrong = headrace(hub, "pull", "org/ggufs:Q2_K")
    assert wrong.returncode == 2
    assert "there are small-F16, small-Q4_K_M, small-Q8_0" in " ".join(wrong.stderr.split())
    assert headrace(None, "rm", "org/ggufs:F16").returncode == 0
    assert not list(cache.rglob("*.gguf"))


def test_offline_nothing_is_fetched(hub: Any) -> None:
    refused = headrace(hub, "pull", "org/name", HF_HUB_OFFLINE="1")
    assert refused.returncode == 2 and "HF_HUB_OFFLINE is set" in refused.stderr
    assert hub.log == []


@pytest.mark.parametrize("name", ["org/name", "name", "org/name:Q4_K_M", "a/b.c-d_e:F16"])
def test_what_a_hub_may_have(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize("name", ["", "/x", "a/b/c", "a--b", "../x", "a/b:", "a/b:c:d", "a/b.gguf"])
def test_what_no_hub_has(name: str) -> None:
    assert not is_hub_id(name)


def at_a_terminal(hub: Any, answer: str, *words: str) -> str:
    """What a command says to somebody who types one line."""
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    child = subprocess.Popen(
        [sys.executable, "-m", "headrace", *words],
        env=hub_environment(hub),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        said += data
    os.close(ours)
    child.wait(300)
    return said.decode(errors="replace")


@pytest.mark.slow
def test_serve_asks_once_at_a_terminal_and_takes_no_for_an_answer(hub: Any, cache: Path) -> None:
    said = at_a_terminal(hub, "n\n", "serve", "org/name", "--port", "0")
    assert "org/name is not in the local cache" in said and "Download it? [y/N]" in said
    assert "22.0 MiB  model.safetensors" in said
    assert "--allow-download fetches it" in " ".join(said.split())
    assert not cache.exists()
    silent = headrace(hub, "serve", "org/name", "--port", "0")
    assert silent.returncode == 2 and "Download it?" not in silent.stderr
    assert not cache.exists()


@pytest.mark.slow
def test_serve_fetches_what_somebody_said_yes_to(hub: Any, cache: Path) -> None:
    """This repository's weights are none: they come, and are then refused."""
    said = at_a_terminal(hub, "y\n", "serve", "org/name", "--port", "0")
    assert "the header needs" in said and "HTTP Request" not in said
    assert (cache / "models--org--name" / "snapshots" / COMMIT / "model.safetensors").exists()


@pytest.mark.slow
def test_run_fetches_a_model_and_answers(
    hub: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in bundled_model().iterdir()}
    monkeypatch.setitem(REPOSITORIES, "org/demo", files)
    for words, stdin in ((("Hello!", "Who are you?"), ""), ((), "Hello! Who are you?")):
        done = headrace(hub, "run", "org/demo", *words, "--temperature", "0", stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) > 2, done.stdout
    assert (cache / "models--org--demo").is_dir()


@pytest.mark.slow
def test_ps_and_stop_speak_to_a_running_server(tmp_path: Path) -> None:
    for name in ("red", "blue"):
        write_model_folder(tmp_path / "models" / name)
    rows = [
        {"name": "red", "path": str(tmp_path / "models" / "red"), "pinned": True},
        {"name": "blue", "path": str(tmp_path / "models" / "blue"), "keep_alive": "10m"},
    ]
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps(rows))
    options = ("--load-format", "dummy", "--executor", "null", "--models", str(file))
    with serving(None, *options) as served:
        address = ("--address", served.url.removeprefix("http://"))
        body = {"model": "blue", "prompt": "hi", "max_tokens": 1}
        assert served.post("/v1/completions", body).status_code == 200
        lines = {
            line.split()[0]: line for line in headrace(None, "ps", *address).stdout.splitlines()
        }
        assert "loaded" in lines["blue"] and "s from now" in lines["blue"]
        assert "pinned" in lines["red"]
        stopped = headrace(None, "stop", "blue", *address)
        assert (stopped.returncode, stopped.stdout) == (0, "blue: unloaded\n"), stopped.stderr
        assert "is pinned" in headrace(None, "stop", "red", *address).stderr
        assert "is not served there" in headrace(None, "stop", "green", *address).stderr
        assert served.stop() == 0
    assert "no answer from" in headrace(None, "ps", *address).stderr


def test_durations_as_people_write_them() -> None:
    words = {"5m": 300, "1h30m": 5400, "90": 90, "1.5s": 1.5, "-1": -1, "-5m": -300, "0": 0}
    for text, seconds in words.items():
        assert parse_duration(text, field="keep_alive") == seconds
    for text in ("", "soon", "5 m", "m", "1h-", "nan", "1e3", "--1"):
        with pytest.raises(ConfigError, match="is not a duration"):
            parse_duration(text, field="keep_alive")
