"""The admin API over its own listener (API-20): who may ask, what it tells, and that a reload is real."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.errors import ConfigError
from headrace.cli import admin
from headrace.front.server.administration.named import ADMIN, READS
from headrace.front.server.grpc import control
from tests.api.serving import NO_TLS, Served, eventually, serving

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
WEIGHT_BYTES = (MODEL / "model.safetensors").stat().st_size
KEY = "admin-key-1"
ASK = {"prompt": "The fox went to the river", "max_tokens": 12, "temperature": 0}
PLACE = re.compile(r"administration: (\S+)/v1/admin/")


@contextlib.contextmanager
def admin_server(
    *options: str, key: str | None = KEY, model: Path = MODEL, null: bool = False
) -> Iterator[tuple[Served, httpx.Client]]:
    keyed = {} if key is None else {"HEADRACE_ADMIN_KEY": key}
    options = ("--threads", "1", "--admin-listen", "127.0.0.1:0", *options)
    started = (
        serving(model, *options, **keyed) if null else serving(None, str(model), *options, **keyed)
    )
    with started as served:
        eventually(lambda: any("administration:" in line for line in served.lines), within_s=5)
        base = next(found[1] for line in served.lines if (found := PLACE.search(line)))
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        with httpx.Client(
            base_url=base + "/v1/admin", headers=headers, timeout=300, verify=NO_TLS
        ) as client:
            yield served, client


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Served, httpx.Client]]:
    with admin_server() as found:
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
    answer = served.post("/v1/completions", ASK)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
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
    short = {name: config[name] for name in ("dtype", "tp", "pp", "dp", "ep")}
    assert short == {"dtype": "bfloat16", "tp": 1, "pp": 1, "dp": 1, "ep": 1}
    assert config["model"] and config["max_model_len"] > 0
    assert client.get("/queue").json()["load_tracking_enabled"] is True
    assert client.get("/queue").json()["engines"][0]["waiting"] == 0
    assert client.get("/health").json()["is_running"] is True


def test_a_change_takes_its_fields_in_the_query_too(running: tuple[Served, httpx.Client]) -> None:
    """API-20: POST drain?mode&clear_cache."""
    served, client = running
    assert client.post("/drain?mode=keep&clear_cache=false").json()["mode"] == "keep"
    assert client.get("/health").json()["is_paused"] is True
    assert client.post("/resume").json() == {"status": "resumed"}
    for path, field in (("/drain?mode=nap", "mode"), ("/drain?clear_cache=perhaps", "clear_cache")):
        refused = client.post(path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert said(served) and served.at_rest()


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


def test_when_the_old_weights_are_gone_too_everything_is_refused_until_some_are_there(
    tmp_path: Path, other_weights: Path
) -> None:
    """API-20: the server is unready and says why, requests get 503, nothing dies, and a later reload mends it."""
    served_from, broken = tmp_path / "served", tmp_path / "broken"
    shutil.copytree(MODEL, served_from)
    shutil.copytree(other_weights, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, broken / "model.safetensors")
    with admin_server(model=served_from) as (served, client):
        before = said(served)
        (core,) = served.cores
        (served_from / "model.safetensors").rename(tmp_path / "away")
        for _ in range(2):
            failed = client.post("/reload_model", json={"model": str(broken)})
            assert failed.status_code >= 400, failed.text
        eventually(lambda: served.get("/health/ready").status_code == 503, within_s=5)
        assert "no weights" in served.get("/health/ready").json()["status"]
        assert served.get("/health/live").status_code == 200
        assert "no weights" in client.get("/health").json()["trouble"]
        refused = served.post("/v1/completions", ASK)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert "no weights" in refused.json()["error"]["message"]
        assert client.post("/profile", json={"action": "stop"}).status_code in (403, 409)
        assert client.post("/wake").status_code >= 400
        (tmp_path / "away").rename(served_from / "model.safetensors")
        again = client.post("/reload_model", json={"model": str(served_from)})
        assert again.status_code == 200, again.text
        eventually(lambda: served.get("/health/ready").status_code == 200, within_s=5)
        assert said(served) == before and client.get("/health").json()["trouble"] is None
        assert served.cores == [core], "the core was restarted"
        assert served.at_rest()


@pytest.mark.slow
def test_when_one_of_two_replicas_cannot_read_the_weights_both_keep_the_old_weights(
    other_weights: Path,
) -> None:
    """API-20: all serve the same, whatever becomes of a reload."""
    # What is said is to depend on the weights alone, not on how many ask beside.
    with admin_server("--replicas", "2", "--deterministic") as (served, client):
        before = said(served)
        bound = served.cores[1]
        old = bound.rlimit(psutil.RLIMIT_NOFILE)
        bound.rlimit(psutil.RLIMIT_NOFILE, (3, old[1]))  # it can open no file
        failed = client.post("/reload_model", json={"model": str(other_weights)})
        bound.rlimit(psutil.RLIMIT_NOFILE, old)
        assert failed.status_code >= 400, failed.text
        assert texts_of_all(served) == {before}
        assert client.get("/health").json()["is_paused"] is False
        assert client.get("/models").json()["models"][0]["path"] != str(other_weights)
        again = client.post("/reload_model", json={"model": str(other_weights)})
        assert again.status_code == 200 and len(again.json()["engines"]) == 2
        (after,) = texts_of_all(served)
        assert after != before


def texts_of_all(served: Served) -> set[str]:
    """What is said by so many at once that every replica has some."""
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        return set(pool.map(lambda _: said(served), range(12)))


@pytest.mark.slow
def test_a_profile_of_the_steps_is_written_where_the_option_says(tmp_path: Path) -> None:
    with admin_server("--profile-dir", str(tmp_path / "traces")) as (served, client):
        assert client.post("/profile", json={"action": "stop"}).status_code == 409
        assert client.post("/profile", json={"action": "start"}).status_code == 200
        assert client.post("/profile", json={"action": "start"}).status_code == 409
        said(served)
        written = client.post("/profile", json={"action": "stop"}).json()
        (place,) = map(Path, written["places"])
        assert place.parent == tmp_path / "traces"
        with gzip.open(place) as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert any(str(name).startswith("aten::") for name in names)
        assert client.post("/profile", json={"action": "sideways"}).status_code == 400


def test_profiling_is_off_unless_a_folder_is_named(running: tuple[Served, httpx.Client]) -> None:
    _, client = running
    refused = client.post("/profile", json={"action": "start"})
    assert refused.status_code == 403 and "--profile-dir" in refused.text


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
    waiting.join(300)
    assert answers == [before] and served.at_rest()


@pytest.mark.slow
def test_a_core_that_dies_comes_back_with_the_reloaded_weights(other_weights: Path) -> None:
    with admin_server() as (served, client):
        assert client.post("/reload_model", json={"model": str(other_weights)}).status_code == 200
        after = said(served)
        (core,) = served.cores
        core.kill()
        eventually(lambda: any(one.pid != core.pid for one in served.cores), within_s=60)
        eventually(lambda: served.get("/health/ready").status_code == 200, within_s=60)
        assert said(served) == after


def _said_waiting(served: Served, client: httpx.Client, release: str) -> str:
    """The answer to a request that waits until `release` lets it go on."""
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(said(served)))
    waiting.start()
    eventually(lambda: client.get("/queue").json()["engines"][0]["waiting"] == 1, within_s=10)
    assert client.post(release, json={}).status_code == 200
    waiting.join(300)
    (answer,) = answers
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", pytest.param("wait", marks=pytest.mark.slow)])
def test_a_core_that_dies_paused_comes_back_paused(mode: str, model: Path) -> None:
    """Who paused it counts on nothing running; resumed, it stays so through a further death."""
    with admin_server(model=model, null=True) as (served, client):
        before = said(served)
        assert client.post("/pause", json={"mode": mode}).status_code == 200
        _kill_and_wait(served)
        health = client.get("/health").json()
        assert health["is_paused"] is True, health
        assert _said_waiting(served, client, "/resume") == before
        _kill_and_wait(served)
        assert client.get("/health").json()["is_paused"] is False and said(served) == before


@pytest.mark.slow
@pytest.mark.parametrize("level", [2, 1])
def test_a_core_that_dies_asleep_comes_back_asleep_and_wakes(level: int) -> None:
    """Nothing is loaded for it before it is woken, and nobody is told that it is awake; what was kept died with it."""
    with admin_server() as (served, client):
        before = said(served)
        (core,) = served.cores
        loaded = core.memory_info().rss
        told = client.post("/sleep", json={"level": level}).json()
        assert told == {"status": "sleeping", "level": level}
        if level == 2:
            assert core.memory_info().rss < loaded - WEIGHT_BYTES / 2, "BEY-27"
        _kill_and_wait(served)
        health = client.get("/health").json()
        assert (health["is_asleep"], health["sleep_level"]) == (True, 2)
        assert served.cores[0].memory_info().rss < loaded - WEIGHT_BYTES
        assert client.post("/resume", json={}).status_code == 409
        assert _said_waiting(served, client, "/wake") == before
        _kill_and_wait(served)
        assert client.get("/health").json()["is_asleep"] is False and said(served) == before


@pytest.mark.slow
def test_asleep_at_level_1_nothing_is_loaded_on_waking(tmp_path: Path) -> None:
    """The weights wait in host memory: those of the file may change meanwhile. Sleep only deepens."""
    weights = tmp_path / "model"
    shutil.copytree(MODEL, weights)
    with admin_server(model=weights) as (served, client):
        before = said(served)
        assert client.post("/sleep", json={"level": 1}).json()["level"] == 1
        (weights / "model.safetensors").rename(weights / "away")
        assert client.post("/wake", json={}).status_code == 200
        assert said(served) == before
        (weights / "away").rename(weights / "model.safetensors")
        for level, deep in ((1, 1), (2, 2), (1, 2)):
            assert client.post("/sleep", json={"level": level}).json()["level"] == deep
        (weights / "model.safetensors").rename(weights / "away")
        assert client.post("/wake", json={}).status_code >= 500, "at level 2 they are loaded again"
        (weights / "away").rename(weights / "model.safetensors")
        assert client.post("/wake", json={}).status_code == 200
        assert said(served) == before


def _kill_and_wait(served: Served) -> None:
    (core,) = served.cores
    core.kill()
    eventually(lambda: any(one.pid != core.pid for one in served.cores), within_s=60)
    held = ("ready", "paused", "asleep")
    eventually(lambda: served.get("/health/ready").json()["status"] in held, within_s=60)


def test_read_only_tells_but_changes_nothing(model: Path) -> None:
    with admin_server("--admin-readonly", key=None, model=model, null=True) as (served, client):
        assert client.get("/queue").status_code == 200
        for path in ("/pause", "/reload_model", "/sleep", "/resume", "/profile", "/log_level"):
            assert client.post(path, json={}).status_code == 403, path
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
        assert said(served)


@pytest.mark.slow
def test_the_log_level_reaches_every_process_and_those_that_come_later() -> None:
    """HTTP and command alike; a core that is started anew logs at the level that was set."""
    options = ("--replicas", "2", "--api-servers", "2", "--executor", "processes")
    with admin_server(*options) as (served, client):
        assert client.post("/log_level", json={"level": "loud"}).status_code == 400
        assert client.post("/log_level", json={"level": "debug"}).status_code == 200

        def telling() -> Counter[str]:
            words = (line.split(" DEBUG ", 1)[1] for line in served.lines if " DEBUG " in line)
            return Counter(word.partition(":")[0] for word in words)

        def told() -> bool:
            """Each process says it by itself, when it comes to it."""
            heard = [line.partition(" DEBUG ")[2] for line in served.lines]
            counts = Counter(
                line.partition(": logs at")[0] for line in heard if ": logs at" in line
            )
            wanted = {"api": 2, "core": 2, "worker 0": 2}
            return "headrace" in telling() and all(counts[n] >= c for n, c in wanted.items())

        eventually(told, within_s=60)
        core = served.cores[0]
        before = telling()["core"]
        core.kill()
        eventually(
            lambda: len(served.cores) == 2 and core.pid not in {c.pid for c in served.cores},
            within_s=60,
        )
        eventually(lambda: served.get("/health").status_code == 200, within_s=60)
        eventually(lambda: telling()["core"] > before, within_s=60)
        client.post("/log_level", json={"level": "error"})
        eventually(
            lambda: client.post("/log_level", json={"level": "error"}).status_code == 200,
            within_s=60,
        )

        def silent() -> bool:
            """Each process hears of it by itself; connections land on either of the two of the API."""
            before = telling()
            assert all(said(served) for _ in range(6))
            return telling() == before

        eventually(silent, within_s=60)


def test_read_only_holds_for_every_way_to_ask(model: Path) -> None:
    """API-20: the names on the API's own port and gRPC too."""
    options = ("--admin-readonly", "--admin-key", KEY, "--grpc-port", "0")
    with serving(model, *options) as served:
        admin = {"x-api-key": KEY}
        for path in sorted(ADMIN - READS):
            assert served.post(path, {}, **admin).status_code == 403, path
        for path in sorted(READS):
            assert served.get(path, **admin).status_code == 200, path
        eventually(lambda: any("serves gRPC" in line for line in served.lines), within_s=5)
        address = next(line.split()[-1] for line in served.lines if "serves gRPC" in line)
        service = control.SERVICE
        with grpc.insecure_channel(address) as channel:
            for method, allowed in (("IsPaused", True), ("Shutdown", False), ("Sleep", False)):
                asked, told = service.request(method), service.response(method)
                stub = channel.unary_unary(
                    f"/{service.full_name}/{method}",
                    request_serializer=asked.SerializeToString,
                    response_deserializer=told.FromString,
                )
                metadata = [("authorization", f"Bearer {KEY}")]
                if allowed:
                    assert stub(asked(), metadata=metadata, timeout=300).paused is False
                    continue
                with pytest.raises(grpc.RpcError) as caught:
                    stub(asked(), metadata=metadata, timeout=300)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_the_command_speaks_over_a_unix_socket(model: Path, tmp_path: Path) -> None:
    place = f"unix:{tmp_path}/admin.sock"
    with serving(model, "--admin-listen", place) as served:
        assert oct(os.stat(tmp_path / "admin.sock").st_mode)[-3:] == "600"

        def ask(*words: str) -> subprocess.CompletedProcess[str]:
            command = [
                sys.executable,
                "-m",
                "headrace.cli.main",
                "admin",
                *words,
                "--address",
                place,
            ]
            return subprocess.run(command, capture_output=True, text=True)

        assert json.loads(ask("health").stdout)["status"] == "ok"
        assert json.loads(ask("pause", "--mode", "keep").stdout)["mode"] == "keep"
        assert served.get("/health").status_code == 200
        assert ask("resume").returncode == 0
        assert ask("reload_model", "--model", "/nowhere").returncode == 1
        assert ask("log_level", "debug").returncode == 0
        assert ask("sleep", "--level", "deep").returncode == 2


def test_an_address_that_is_none_is_refused_by_its_option() -> None:
    for wrong in ("foo", "127.0.0.1:x", "127.0.0.1:", "1:²"):
        with pytest.raises(ConfigError, match="--address"):
            admin.main(["health", "--address", wrong])
