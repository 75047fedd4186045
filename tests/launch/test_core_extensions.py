"""Hooks and readers of an installed package in an engine core (ENG-20): what they say holds, and what fails names
itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.back.executor.choose import make_executor
from headrace.back.executor.null import NullExecutor
from headrace.back.kernels.op import MORE_KERNELS
from headrace.back.kernels.rms_norm.op import OP as RMS_NORM
from headrace.back.speculative import text_drafter
from headrace.base import extensions
from headrace.base.config.resolved import Decision, SpeculationSpec
from headrace.base.config.tree import (
    DeviceOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.base.errors import ConfigError
from headrace.base.wire.request import Finished
from headrace.cli.other_servers import without_gpu
from headrace.cli.vllm_flags import GPU_SHARE
from headrace.core.core import EngineCore
from headrace.core.scheduler.choice import check_scheduler
from headrace.launch.core_extensions import extension_hooks, stats_of
from headrace.launch.drafters import method_of, requested_of
from headrace.launch.facts import resolve_options
from tests.core.harness import Driver, make_request, make_spec

CORE = """
HEADRACE_API = 1
from headrace.core.ports import AdmissionHook, AdmissionVerdict

FIGURES = []

class Unlucky(AdmissionHook):
    name = "unlucky"

    def __init__(self, core):
        self.core, self.asked = core, {}

    def admit(self, request):
        if 13 in request.prompt_ids():
            return AdmissionVerdict("never", "prompt: it holds token 13")
        self.asked[request.id] = 0
        return AdmissionVerdict("yes")

    def ready(self, request_id, computed=lambda: 0):
        self.asked[request_id] += 1
        assert self.core().num_in_flight >= 0
        return AdmissionVerdict("not_now" if self.asked[request_id] < 3 else "yes", "not yet")

    def payload(self, request_ids):
        return None

    def finish(self, request_id):
        self.asked.pop(request_id)

class Figures:
    def step(self, *, running, **rest):
        FIGURES.append(running)

    def finished(self, *, reason, num_prompt, **rest):
        FIGURES.append((reason, num_prompt))

class Fails:
    def step(self, **figures):
        raise RuntimeError("no figures for me")

    def finished(self, **figures):
        raise AssertionError("it was left out")

def unlucky(spec, core):
    return Unlucky(core)

def figures(spec):
    assert spec.kv.block_tokens > 0
    return Figures()

def fails(spec):
    return Fails()

def broken(spec, core):
    raise ValueError("not today")

from headrace.core.scheduler.scheduler import Scheduler

class LastFirst(Scheduler):
    # the newest prompt first

    def enqueue(self, request):
        request.key = (-request.arrival,)
        self.queue.push(request)

def no_scheduler(spec, *parts):
    return spec
"""
DRAFTER = """
HEADRACE_API = 1
from headrace.back.speculative.drafter import TextDrafter

class Again(TextDrafter):
    decisions = ()

    def __init__(self, spec, device):
        self.max_drafts = spec.num_tokens

    def propose(self, row_R, query_start_R1, tables, count_M, most):
        want = (query_start_R1[1:] - query_start_R1[:-1] - 1).clamp(0, min(most, self.max_drafts))
        for row, count in zip(row_R.tolist(), want.tolist()):
            length = int(tables.length_M[row])
            tables.tokens_MC[row, length : length + count] = tables.tokens_MC[row, length - 1]
            count_M[row] = count

def fails(spec, device):
    raise OSError("no such thing")
"""
PLATFORM = """
HEADRACE_API = 1
from headrace.back.kernels.rms_norm.op import OP
from headrace.back.kernels.op import Kernel
from headrace.back.platforms.facts import DeviceFacts

CALLS = []

def bind(problem, *weights):
    plain = OP.reference.bind(problem, *weights)
    def counted(*arguments):
        CALLS.append(problem.device)
        return plain(*arguments)
    return counted

KERNEL = Kernel(name="toy", supports=lambda problem: None, bind=bind)

class Toy:
    kernels = {"rms_norm": ("tinydevice:KERNEL",)}
    def facts(self):
        one = {"kind": "toy", "name": "Toy 1", "arch": "t1", "memory_bytes": 1 << 34}
        return [DeviceFacts(**one, free_bytes=1 << 33)]
    def torch_device(self, index):
        return "cpu"

class Gone(Toy):
    def facts(self):
        return []

toy, gone = Toy(), Gone()
"""
ENTRIES = """
[headrace.platforms]
toy = tinydevice:toy
gone = tinydevice:gone

[headrace.admission_hooks]
unlucky = tinycore:unlucky
broken = tinycore:broken

[headrace.schedulers]
last_first = tinycore:LastFirst
no_scheduler = tinycore:no_scheduler

[headrace.drafters]
again = tinydraft:Again
fails_to_draft = tinydraft:fails

[headrace.stats]
fails = tinycore:fails
figures = tinycore:figures
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tinycore.py").write_text(CORE)
    (tmp_path / "tinydraft.py").write_text(DRAFTER)
    (tmp_path / "tinydevice.py").write_text(PLATFORM)
    info = tmp_path / "tinycore-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinycore\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    extensions.allow(())


def test_a_share_of_gpu_memory_is_taken_for_a_device_of_a_package(package: None) -> None:
    device, model = DeviceOptions(device="toy", gpu_memory="0.8"), ModelOptions(extensions=("toy",))
    options = Options(device=device, model=model)
    note = Decision(GPU_SHARE, "0.8", "--gpu-memory 0.8", "vLLM's flag")
    assert without_gpu(options, [note]) == (options, [note])
    on_cpu = Options(device=DeviceOptions(device="cpu", gpu_memory="0.8"))
    assert without_gpu(on_cpu, [note])[0].device.gpu_memory == "auto"


def test_hooks_hold_requests_back_and_readers_get_figures(package: None) -> None:
    extensions.allow(["unlucky", "fails", "figures"])
    spec = make_spec()
    hooks = extension_hooks(spec, (), lambda: core)
    core = EngineCore(spec, NullExecutor(spec), hooks=hooks, stats=stats_of(spec, hooks))
    core.add(make_request(1, [5, 13]))
    core.add(make_request(2, [5, 9, 4], max_tokens=2))
    ends: dict[int, Finished] = {}
    steps = 0
    while len(ends) < 2:
        steps += 1
        batch = core.step(wait=True).tokens
        ends |= {end.id: end for end in batch.finished} if batch is not None else {}
    refused = ends[1].error
    assert refused is not None and "it holds token 13" in refused.message
    assert ends[2].reason == "length" and steps >= 4 and core.hooks.num_held == 0
    figures = sys.modules["tinycore"].FIGURES
    assert figures[-1] == ("length", 3) and 1 in figures
    with pytest.raises(ConfigError, match="the name 'unlucky' is another hook's"):
        extension_hooks(spec, hooks, lambda: core)


def test_what_fails_names_itself_and_nothing_is_made_of_what_is_not_allowed(package: None) -> None:
    spec = make_spec()
    extensions.allow(["broken"])
    with pytest.raises(ConfigError, match="extension broken failed: ValueError: not today"):
        extension_hooks(spec, (), lambda: pytest.fail("there is no core"))
    extensions.allow(())
    assert extension_hooks(spec, (), lambda: pytest.fail("there is no core")) == []
    assert stats_of(spec, ()) is None


def test_a_package_s_scheduler_orders_requests(package: None) -> None:
    """ENG-11, ENG-20: --scheduler-cls; the prompt that came last starts first, one row at a time."""
    extensions.allow(["last_first", "no_scheduler"])
    check_scheduler("last_first")
    driver = Driver(make_spec(scheduler_cls="last_first", max_running=1))
    driver.add(*(make_request(id, 8, max_tokens=1) for id in (1, 2, 3)))
    driver.run()
    assert list(driver.finished) == [3, 2, 1]
    driver.assert_at_rest()
    with pytest.raises(ConfigError, match="no_scheduler gives a SchedulerSpec"):
        Driver(make_spec(scheduler_cls="no_scheduler"))
    with pytest.raises(ConfigError, match=r"--scheduler-cls best: .*last_first, no_scheduler"):
        check_scheduler("best")


def test_a_package_s_drafter_is_a_method(package: None) -> None:
    """ENG-20, SPC-06 (custom class): found by its name where it is allowed."""
    with pytest.raises(ConfigError, match="method 'again' is not known"):
        method_of("again")
    extensions.allow(["again", "fails_to_draft"])
    assert method_of("again") == "again"
    as_vllm = SpeculationOptions(method="custom_class", model="again")
    tree = Options(scheduler=SchedulerOptions(speculative_config=as_vllm))
    assert requested_of(tree) == SpeculationOptions(method="again")
    spec = SpeculationSpec(method="again", num_tokens=3, max_rows=2)
    assert text_drafter(spec, torch.device("cpu")).max_drafts == 3
    failing = msgspec.structs.replace(spec, method="fails_to_draft")
    with pytest.raises(ConfigError, match="fails_to_draft failed: OSError: no such thing"):
        text_drafter(failing, torch.device("cpu"))


@pytest.mark.slow
def test_a_package_s_drafts_leave_the_tokens_as_they_are(package: None) -> None:
    """SPC-06: through steps that verify them."""
    answers, drafts = [], 0
    for speculation in (None, SpeculationOptions(method="again", num_speculative_tokens=3)):
        tree = Options(
            device=DeviceOptions(device="cpu"),
            model=ModelOptions(max_model_len=256, deterministic=True, extensions=("again",)),
            scheduler=SchedulerOptions(speculative_config=speculation),
        )
        extensions.allow(tree.model.extensions)
        spec = resolve_options(tree).engine
        core = EngineCore(spec, make_executor(spec))
        core.add(make_request(1, [40] * 20, max_tokens=24))
        tokens: list[int] = []
        while core.has_work:
            batch = core.step(wait=True).tokens
            tokens += [] if batch is None else batch.tokens.tolist()
        answers.append(tokens)
        drafts = core.scheduler.speculation.stats.num_draft_tokens
        core.close()
    assert answers[0] == answers[1] and len(answers[0]) == 24 and drafts > 0


def toy_options(device: str, **more: Any) -> Options:
    options = DeviceOptions(device=device, **more)
    model = ModelOptions(max_model_len=128, extensions=("toy", "gone"), dtype="float32")
    return Options(device=options, model=model)


def test_a_package_s_platform_runs_the_model_with_its_kernels(package: None) -> None:
    """ENG-20, PLT-15, PLT-17: a device class that only a package knows gives the CPU's tokens."""
    tokens: dict[str, list[int]] = {}
    for device in ("cpu", "toy"):
        RMS_NORM._choices.clear()  # both are "cpu" to PyTorch, and so to ops
        spec = resolve_options(toy_options(device)).engine
        assert spec.device.device == device
        core = EngineCore(spec, make_executor(spec))
        core.add(make_request(1, [40, 7, 300, 12], max_tokens=6))
        tokens[device] = []
        while core.has_work:
            batch = core.step(wait=True).tokens
            tokens[device] += [] if batch is None else batch.tokens.tolist()
        core.close()
    assert tokens["toy"] == tokens["cpu"] and len(tokens["toy"]) == 6
    assert sys.modules["tinydevice"].CALLS
    assert spec.device.memory_bytes == int(0.92 * (1 << 33))
    MORE_KERNELS.clear()
    RMS_NORM._choices.clear()


@pytest.mark.parametrize(
    ("device", "more", "message"),
    [
        ("tpu", {}, "--device 'tpu' is not known .known: auto, cpu, cuda, toy, gone;"),
        ("gone", {}, "--device gone: no such device is here"),
        ("toy", {"replicas": 2}, "needs 2 devices; 1 found"),
        ("toy", {"tensor_parallel": 2}, "--tensor-parallel 2 is not supported there"),
    ],
)
def test_devices_that_there_are_not_are_refused(
    device: str, more: dict[str, Any], message: str, package: None
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_options(toy_options(device, **more))
