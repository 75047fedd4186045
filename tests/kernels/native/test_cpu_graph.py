"""A recorded list of native calls gives what the calls give, for whatever its inputs hold by then (ENG-21)."""

import subprocess
import sys

import pytest
import torch

from headrace.back.kernels.embedding import native as embedding
from headrace.back.kernels.embedding.op import EmbeddingProblem
from headrace.back.kernels.gated_act import native as gated_act
from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.linear import native as linear
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.native.cpu_graph import Arena, Recorder, unowned
from headrace.back.kernels.native.library import NativeError
from headrace.back.kernels.rms_norm import native as rms_norm
from headrace.back.kernels.rms_norm.op import RMSNormProblem

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
from headrace.back.kernels.native.cpu_graph import Arena, Recorder
from headrace.back.kernels.native.wrap import loaded
with Recorder(loaded(), Arena()):
    torch.ones(3).new_empty(2)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
