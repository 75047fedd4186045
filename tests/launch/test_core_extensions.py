"""Hooks and readers of an installed package in an engine core (ENG-20): what they say holds, and what fails names
itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.back.executor.null import NullExecutor
from headrace.base import extensions
from headrace.base.errors import ConfigError
from headrace.base.wire.request import Finished
from headrace.core.core import EngineCore
from headrace.launch.core_extensions import extension_hooks, extension_stats
from tests.core.harness import make_request, make_spec

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
"""
ENTRIES = """
[headrace.admission_hooks]
unlucky = tinycore:unlucky
broken = tinycore:broken

[headrace.stats]
fails = tinycore:fails
figures = tinycore:figures
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tinycore.py").write_text(CORE)
    info = tmp_path / "tinycore-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinycore\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    extensions.allow(())


def test_hooks_hold_requests_back_and_readers_get_figures(package: None) -> None:
    extensions.allow(["unlucky", "fails", "figures"])
    spec = make_spec()
    hooks = extension_hooks(spec, (), lambda: core)
    core = EngineCore(spec, NullExecutor(spec), hooks=hooks, stats=extension_stats(spec))
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
    assert extension_stats(spec) is None
