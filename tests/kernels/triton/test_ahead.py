"""Compiling ahead: kernels are asked for once, loaded where they were compiled, and compiled in other processes where
there are some."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from headrace.back.kernels.triton.ahead import _Loading
from headrace.back.kernels.triton.compiler import job_of
from headrace.back.kernels.triton.compilers import (
    FOLDER,
    Compilers,
    expected,
    running,
)
from headrace.base import env
from tests.kernels.triton.cases import CASES
from tests.kernels.triton.cross_compile import launches, source, target_of


class Made:
    """Stands for a kernel; `run` makes its launcher."""

    loaded = 0

    @property
    def run(self) -> object:
        self.loaded += 1
        return print


def test_a_kernel_is_found_before_it_is_compiled_and_is_loaded_afterwards() -> None:
    found: list[Any] = []
    with ThreadPoolExecutor(1) as pool, _Loading(pool) as mode:
        pool.submit(lambda: None)
        mode.submit("key", Made, found.append)
        assert len(found) == 1, "launches that come meanwhile find it"
    made = found[-1]
    assert isinstance(made, Made) and made.loaded == 1
    assert found[0].result() is made


@pytest.mark.slow
@pytest.mark.long
def test_another_process_compiles_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was asked for is then found there; what cannot be compiled, or by a process that is gone, is left to
    whoever asked."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    call = next(call for title, call in CASES if title == "step_commit")
    ((function, values, options),) = launches(call)
    options.pop("launch_pdl", None)
    made, target = source(function, values), target_of("cuda:90")
    options = triton.compiler.make_backend(target).parse_options(options).__dict__
    compilers = Compilers(1)
    try:
        job = job_of(made, target, options)
        assert not compilers.compile({**job, "name": "no_such_kernel"})
        assert compilers.compile(job)
        hits: list[bool] = []
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
            triton.compile(made, target=target, options=options)
        assert hits == [True]
        child = compilers._idle.get()
        assert child is not None
        child._process.kill()
        compilers._idle.put(child)
        assert not compilers.compile(job) and not compilers.compile(job)
        with pytest.raises(TypeError):
            compilers.compile({**job, "constants": [[[0], object()]]})
    finally:
        compilers.close()


def test_processes_are_started_for_an_empty_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("headrace.back.kernels.triton.compilers.usable_cores", lambda: 4)
    with expected("cpu"):
        assert running() is None
    with expected("cuda"):
        assert running() is not None
    assert running() is None
    (env.cache_dir() / FOLDER).mkdir()
    with expected("cuda"):
        assert running() is None
