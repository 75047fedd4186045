"""Loading the library and its thread pool: every chunk once, from any thread, after a fork, at any width (PLT-11);
a recorded list of calls gives what the calls give, for whatever its inputs hold by then (ENG-21)."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from headrace.back.kernels.embedding import native as embedding
from headrace.back.kernels.embedding.op import EmbeddingProblem
from headrace.back.kernels.gated_act import native as gated_act
from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.gated_scan import native as gated_scan
from headrace.back.kernels.linear import native as linear
from headrace.back.kernels.linear.native import bind_with
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.native import build, library
from headrace.back.kernels.native.library import (
    Arena,
    NativeError,
    NativeLibrary,
    Recorder,
    load,
    unowned,
)
from headrace.back.kernels.rms_norm import native as rms_norm
from headrace.back.kernels.rms_norm.op import RMSNormProblem
from headrace.base.errors import ConfigError, StartError


@pytest.fixture
def fresh_load(monkeypatch):
    monkeypatch.delenv("HEADRACE_NATIVE", raising=False)
    load.cache_clear()
    yield load
    load.cache_clear()


@pytest.fixture
def kept(library_path, tmp_path, monkeypatch):
    """A copy of the library, under the name of one of all sets, in a folder where libraries are looked for."""
    folder = tmp_path / "native"
    folder.mkdir()
    # The digest is of the sources in the real folder.
    name, digest, compiler = library_path.stem.split("-")[:3]
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "source_digest", lambda: digest)
    return Path(shutil.copy(library_path, folder / f"{name}-{digest}-{compiler}.so"))


def test_the_best_instruction_set_is_bound_and_another_can_be_asked_for(library_path):
    best = NativeLibrary(library_path)
    assert best.isa == best.isas[-1]
    assert NativeLibrary(library_path, isa=best.isas[0]).isa == best.isas[0]
    with pytest.raises(StartError, match=rf"HEADRACE_ISA=mmx: this CPU and .* have {best.isas[0]}"):
        NativeLibrary(library_path, isa="mmx")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HEADRACE_ISA", "mmx", "must be one of portable, avx2"),
        ("HEADRACE_NATIVE", "/nowhere/lib.so", "cannot open shared object file"),
        ("HEADRACE_NATIVE", "yes", "it must be 0"),
        ("HEADRACE_NATIVE", __file__, "it must be 0"),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(
    fresh_load, monkeypatch, variable, value, message
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message) as caught:
        load()
    assert caught.value.field == variable and f"{variable}={value}" in caught.value.message


def test_a_wrapper_that_lacks_an_argument_of_its_kernel_is_not_bound(newest):
    """Else each argument behind it would be read as the one before."""
    types = (*(library.POINTER,) * 4, *gated_scan.ROW_TYPES, *(library.INT64,) * 2, library.INT32)
    newest.bind("gated_scan", *types)
    with pytest.raises(
        NativeError, match="gated_scan takes PPPPPPqqqqqi, its wrapper binds PPPPPPqqqqi"
    ):
        newest.bind("gated_scan", *types[:-2], library.INT32)
    with pytest.raises(NativeError, match="its wrapper binds PPPPPPqqqqqq"):
        newest.bind("gated_scan", *types[:-1], library.INT64)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("chunks", [0, 1, 2, 7, 5000])
def test_every_chunk_runs_exactly_once(newest, threads, chunks):
    assert newest.set_threads(threads) == threads == newest.threads
    for _ in range(20):
        assert newest.count_chunks(chunks) == [1] * chunks


def test_callers_on_several_threads_get_right_results_while_the_pool_changes_its_width(newest):
    newest.set_threads(4)
    weight = torch.randn(600, 256, generator=torch.Generator().manual_seed(0))
    problem = LinearProblem(device="cpu", dtype=torch.float32, inputs=256, outputs=600)
    linear = bind_with(newest, problem, weight, None)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    expected, wrong = linear(x), []

    def call():
        for _ in range(100):
            if not torch.equal(linear(x), expected):
                wrong.append(1)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for width in (1, 2, 5, 1, 3) * 4:
        newest.set_threads(width)
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_forked_child_computes_on_its_own_thread(newest):
    newest.set_threads(3)
    assert newest.count_chunks(100) == [1] * 100
    child = os.fork()
    if child == 0:
        right = newest.threads == 1 and newest.count_chunks(100) == [1] * 100
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_helpers_can_be_pinned(newest):
    cpus = sorted(os.sched_getaffinity(0))
    newest.set_threads(2, cpus=[cpus[0], cpus[-1]])
    masks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    assert {cpus[-1]} in masks
    assert newest.count_chunks(50) == [1] * 50


def test_the_kernels_can_be_turned_off(fresh_load, monkeypatch):
    monkeypatch.setenv("HEADRACE_NATIVE", "0")
    assert fresh_load() == "native kernels are turned off (HEADRACE_NATIVE=0)"


def test_a_process_sets_the_width_with_and_without_a_library(fresh_load, library_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_NATIVE", "0")
    library.use_threads(2)
    fresh_load.cache_clear()
    monkeypatch.setenv("HEADRACE_NATIVE", str(library_path))
    library.use_threads(2)
    assert fresh_load().threads == 2
    library.use_threads(1)


def test_a_library_can_be_named(fresh_load, library_path, tmp_path, monkeypatch):
    copy = shutil.copy(library_path, tmp_path / "mine.so")
    monkeypatch.setenv("HEADRACE_NATIVE", str(copy))
    assert fresh_load().path == copy


def test_a_library_of_other_sources_is_refused(library_path, monkeypatch):
    monkeypatch.setattr(build, "source_digest", lambda: "0" * 12)
    with pytest.raises(StartError, match="was built from other sources"):
        NativeLibrary(library_path)


def test_without_a_build_the_reason_says_what_to_run(fresh_load, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "source_digest", lambda: "0" * 12)
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    assert "python -m headrace.back.kernels.native.build" in fresh_load()


def test_of_several_libraries_the_one_of_all_sets_is_loaded(fresh_load, library_path, kept):
    shutil.copy(library_path, kept.with_name(f"{kept.stem}-avx2.so"))
    assert fresh_load().path == kept
    kept.unlink()
    fresh_load.cache_clear()
    assert fresh_load().path.stem.endswith("-avx2")


def test_a_library_for_another_cpu_is_not_loaded_and_the_reason_says_what_to_run(
    fresh_load, kept, monkeypatch
):
    monkeypatch.setattr(build, "ISAS", (build.Isa(name="other", machines=(), flags=()),))
    assert fresh_load() == f"{kept} holds kernels of another CPU; run: {build.COMMAND}"


@pytest.mark.parametrize("mode", ["file", "folder"])
def test_a_library_that_anyone_may_have_written_is_not_loaded(fresh_load, kept, mode):
    (kept if mode == "file" else kept.parent).chmod(0o777)
    assert "is writable by everyone" in fresh_load()


def test_an_instruction_set_can_be_capped_and_one_that_is_not_there_is_refused_by_name(
    library_path, monkeypatch, fresh_load
):
    worst = NativeLibrary(library_path).isas[0]
    monkeypatch.setenv("HEADRACE_NATIVE", str(library_path))
    monkeypatch.setenv("HEADRACE_ISA", worst)
    assert fresh_load().isa == worst
    monkeypatch.setenv("HEADRACE_ISA", "avx1024")
    fresh_load.cache_clear()
    with pytest.raises(StartError, match=rf"HEADRACE_ISA=avx1024.*{worst}"):
        fresh_load()


WIDTH, INNER = 48, 80


def block(library, dtype):
    """ids -> a norm, a product and a gate: float and integer arguments, null and real pointers."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(100, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(2 * INNER, WIDTH, generator=generator).to(dtype)
    lookup = embedding.bind_with(
        library, EmbeddingProblem(device="cpu", dtype=dtype, rows=100, width=WIDTH), table
    )
    norm = rms_norm.bind_norm_with(
        library, RMSNormProblem(device="cpu", dtype=dtype, width=WIDTH, eps=1e-3), torch.ones(WIDTH)
    )
    project = linear.bind_with(
        library,
        LinearProblem(device="cpu", dtype=dtype, inputs=WIDTH, outputs=2 * INNER),
        weight,
        None,
    )
    act = gated_act.bind_with(
        library, GatedActProblem(device="cpu", dtype=dtype, width=INNER, activation="silu")
    )
    return lambda ids: act(project(norm(lookup(ids))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_computes_from_what_the_inputs_hold_then(library, dtype):
    forward, ids, arena = block(library, dtype), torch.arange(7), Arena()
    with Recorder(library, arena) as recorder:
        recorded = forward(ids)
    assert not recorder.foreign
    graph, out = recorder.graph(), unowned(recorded)
    assert torch.equal(out, forward(ids))
    for offset in (13, 80):
        ids += offset - int(ids[0])
        graph.replay()
        assert torch.equal(out, forward(ids))


def test_memory_is_used_again_within_a_recording_and_by_the_next(newest):
    forward, arena, ids = block(newest, torch.float32), Arena(), torch.arange(7)
    with Recorder(newest, arena) as recorder:
        for _ in range(20):
            forward(ids)
    once = arena.num_bytes
    assert once <= 5 * 4096, once
    with Recorder(newest, arena):
        forward(ids)
    assert arena.num_bytes == once and len(recorder.graph().names) == 80


def test_a_tensor_in_use_is_not_given_twice(newest):
    arena = Arena()
    first = arena.tensor((3, 5), torch.float32)
    view = first[1:]
    del first
    second = arena.tensor((3, 5), torch.float32)
    assert second.data_ptr() != view.data_ptr() - 20
    del view
    assert arena.tensor((4, 4), torch.int64).data_ptr() != second.data_ptr()
    assert arena.num_bytes == 2 * 4096


def test_an_operation_of_torch_is_named_and_no_tape_is_made(newest):
    forward, ids = block(newest, torch.float32), torch.arange(3)
    with Recorder(newest, Arena()) as recorder:
        forward(ids).mul_(2)
    assert recorder.foreign == ["aten.mul_.Tensor"]
    with pytest.raises(AssertionError, match="mul_"):
        recorder.graph()


def test_a_call_that_refuses_in_a_replay_is_named(newest):
    forward, ids, arena = block(newest, torch.float32), torch.arange(3), Arena()
    with Recorder(newest, arena) as recorder:
        forward(ids)
    ids[1] = 100
    with pytest.raises(NativeError, match="embedding refuses call 0"):
        recorder.graph().replay()


def test_calls_of_other_threads_and_other_times_are_not_recorded(newest):
    from threading import Thread

    forward = block(newest, torch.float32)
    with Recorder(newest, Arena()) as recorder:
        other = Thread(target=lambda: forward(torch.arange(2)))
        other.start()
        other.join()
    forward(torch.arange(2))
    assert recorder.graph().names == ()


def test_a_recording_does_not_bring_in_torchs_compiler():
    """Which takes 1.4 s and 90 MB of a start."""
    code = """
import sys, torch
from headrace.back.kernels.native.library import Arena, Recorder, loaded
with Recorder(loaded(), Arena()):
    torch.ones(3).new_empty(2)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
