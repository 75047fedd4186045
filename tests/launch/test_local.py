"""Engine cores without a server, as `LLM` starts them: real processes over the null executor."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from headrace.base.config.tree import Options
from headrace.base.errors import EngineDead, StartError
from headrace.base.wire.request import SamplingParams
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.events import Delta, Ended, Generation
from headrace.launch.facts import resolve_options
from headrace.launch.local import LocalEngine, start_local
from headrace.launch.topology import ChildProcess, Report, RuntimeFolder, report
from tests.api.model_folder import write_model_folder
from tests.api.serving import still_alive
from tests.stopwatch import Stopwatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("local") / "tiny")


def values(model: Path, **device: Any) -> dict[str, Any]:
    return {
        "model": {"model": str(model), "load_format": "dummy"},
        "device": {"executor": "null", **device},
    }


def options(model: Path, **device: Any) -> Options:
    return msgspec.convert(values(model, **device), Options)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_prompts_make_no_room_for_decodes_where_nobody_watches_tokens(model: Path) -> None:
    with start_local(options(model)) as local:
        assert local.resolved.engine.scheduler.max_decode_slowdown is None
    given = msgspec.convert({**values(model), "scheduler": {"max_decode_slowdown": 3.0}}, Options)
    with start_local(given) as local:
        assert local.resolved.engine.scheduler.max_decode_slowdown == 3.0


def test_a_core_whose_reports_nobody_reads_is_not_held_up(model: Path) -> None:
    """It sends heartbeats each second, and word of each pause, for as long as it runs; the end of its parent it still
    sees."""
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen(["true"]) as process:
        ours.setblocking(False)
        report(theirs, Report(ready=True))
        child = ChildProcess(name="core", process=process, status=ours)
        engine = LocalEngine(resolve_options(options(model)), RuntimeFolder(), [child])
        engine.wait_ready()
        for _ in range(2000):
            report(theirs, Report(heartbeat=True))
        engine.close()
        assert theirs.recv(1) == b""


def test_a_stated_length_beyond_the_stated_memory_does_not_start(model: Path) -> None:
    given = {
        "model": {"model": str(model), "load_format": "dummy", "max_model_len": 200},
        "kv": {"kv_memory": "16KiB"},
        "device": {"device": "cpu"},
    }
    with (
        pytest.raises(StartError, match=r"--max-model-len 200: --kv-memory 16384 bytes holds"),
        start_local(msgspec.convert(given, Options)),
    ):
        pass


async def test_a_local_engine_answers_and_leaves_nothing_behind(model: Path) -> None:
    before = set(children())
    with start_local(options(model, replicas=2)) as local:
        assert len(local.socket_paths) == 2 == len(set(children()) - before)
        engine = AsyncLLM(local.resolved.text, local.socket_paths)
        await engine.start()
        asked = Generation(prompt_ids=[5, 6], params=SamplingParams(max_tokens=4, seed=1))
        events = [event async for event in engine.generate(asked)]
        await engine.close()
    assert sum(len(event.token_ids) for event in events if isinstance(event, Delta)) == 4
    assert isinstance(events[-1], Ended)
    assert set(children()) == before
    assert not any(Path(path).parent.exists() for path in local.socket_paths)


@pytest.mark.serial
def test_closing_over_unread_heartbeats_is_quick_and_silent(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {**values(model), "scheduler": {"step_timeout_s": 0.04}}  # a heartbeat every 10 ms
    local = start_local(msgspec.convert(given, Options))
    select.select([local._children[0].status], [], [], 5)
    watch = Stopwatch()
    local.close()
    assert watch.undisturbed_s < 1
    assert local._children[0].process.returncode == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_core_that_cannot_start_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "broken")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "null_step_s": "soon"}))
    before = set(children())
    with pytest.raises(EngineDead, match="while starting"):
        start_local(options(model))
    assert set(children()) == before


def test_cores_end_with_a_process_that_is_killed(model: Path) -> None:
    program = (
        "import msgspec, sys, time\n"
        "from headrace.base.config.tree import Options\n"
        "from headrace.launch.local import start_local\n"
        "local = start_local(msgspec.json.decode(sys.argv[1], type=Options))\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    given = json.dumps(values(model))
    with subprocess.Popen(
        [sys.executable, "-c", program, given], stdout=subprocess.PIPE, env={**os.environ}
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        cores = psutil.Process(parent.pid).children()
        assert len(cores) == 1
        parent.kill()
        parent.wait()
    assert not still_alive(cores, within_s=3)
