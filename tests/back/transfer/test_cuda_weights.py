"""New weights for the bundled model on a GPU, in each form it may have there, from files, from another process's
memory and by NCCL (`make test-gpu`). The first also runs on the CPU, so that it is known to work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from headrace.back.executor.inline import InlineExecutor
from headrace.back.transfer.groups import join
from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.request import RowSampling
from headrace.base.wire.weights import Group, Layout, SharedMemory, WeightOrder, WeightReply
from tests.back.driver import Driver
from tests.back.test_cuda import DEVICES, MODEL, bundled_spec, needs_gpu

LENDER = """
import sys, msgspec, torch
from safetensors.torch import load_file
from headrace.back.transfer.handles import lend
tensors = load_file(sys.argv[1] + "/model.safetensors")
flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
buffer = torch.cat(flat).cuda()
torch.cuda.synchronize()
print(msgspec.json.encode(lend(buffer)).decode(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundled model's weights, a little apart."""
    folder = tmp_path_factory.mktemp("other")
    tensors = load_file(MODEL / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    moved = {
        name: (t.float() * (1 + 0.05 * torch.randn(t.shape, generator=generator))).to(t.dtype)
        for name, t in tensors.items()
    }
    save_file(moved, folder / "model.safetensors")
    (folder / "config.json").write_text((MODEL / "config.json").read_text())
    return folder


def spec_of(device: str, quantization: str | None, folder: Path = MODEL) -> EngineSpec:
    spec = bundled_spec(device, "bfloat16")
    model = structs.replace(spec.model, quantization=quantization, path=str(folder))
    return structs.replace(spec, model=model)


def tokens(executor: InlineExecutor) -> list[list[int]]:
    driver = Driver(executor.facts)
    prompts = np.random.default_rng(0).integers(20, 500, (4, 19)).tolist()
    rows = [driver.add(prompt, RowSampling(temperature=0.0)) for prompt in prompts]
    while any(len(row.outputs) < 12 for row in rows):
        runs = [(row, row.length - row.num_computed) for row in rows]
        driver.read(executor.submit(driver.plan(runs)).result(60))
    for row in rows:
        driver.release(row)
    executor.submit(driver.plan([])).result(60)
    return [row.outputs[:12] for row in rows]


def done(reply: Future[WeightReply]) -> WeightReply:
    told = reply.result(120)
    assert told.error is None, told.error
    return told


def layout_of(folder: Path) -> Layout:
    tensors = load_file(folder / "model.safetensors")
    return Layout(
        names=list(tensors),
        dtypes=[str(tensor.dtype) for tensor in tensors.values()],
        shapes=[list(tensor.shape) for tensor in tensors.values()],
    )


@pytest.fixture
def expected(other: Path) -> list[list[int]]:
    fresh = InlineExecutor(spec_of("cuda", None, other))
    wanted = tokens(fresh)
    fresh.close()
    return wanted


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize("device", DEVICES)
def test_recorded_steps_read_the_new_weights(
    device: str, quantization: str | None, other: Path
) -> None:
    fresh = InlineExecutor(spec_of(device, quantization, other))
    wanted = tokens(fresh)
    fresh.close()
    executor = InlineExecutor(spec_of(device, quantization))
    assert tokens(executor) != wanted
    while executor.record_graph().more:
        pass
    told = done(executor.weigh(WeightOrder(action="push", path=str(other), last=True)))
    assert told.num_bytes > 0 and tokens(executor) == wanted
    executor.close()


@pytest.fixture
def lent(other: Path) -> Iterator[dict[str, SharedMemory]]:
    command = [sys.executable, "-c", LENDER, str(other)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as lender:
        assert lender.stdout is not None and lender.stdin is not None
        yield msgspec.json.decode(lender.stdout.readline(), type=dict[str, SharedMemory])
        lender.stdin.write("done\n")
        lender.stdin.close()


@pytest.mark.gpu
@needs_gpu
def test_memory_that_another_process_lends_is_read_in_place(
    lent: dict[str, SharedMemory], other: Path, expected: list[list[int]]
) -> None:
    executor = InlineExecutor(spec_of("cuda", None))
    layout = layout_of(other)
    order = WeightOrder(action="push", way="handles", layout=layout, handles=lent, last=True)
    done(executor.weigh(order))
    assert tokens(executor) == expected
    executor.close()


TRAINER = """
import sys, torch
from safetensors.torch import load_file
from headrace.back.transfer.groups import join
from headrace.base.wire.weights import Group
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
group = Group(name="nccl", address="127.0.0.1", port=int(sys.argv[2]), backend="nccl")
members = join(group, 0, device)
for tensor in load_file(sys.argv[1] + "/model.safetensors").values():
    broadcast(tensor.to(device), members)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here")
def test_a_trainer_on_another_gpu_broadcasts_by_nccl(
    other: Path, expected: list[list[int]]
) -> None:
    executor = InlineExecutor(spec_of("cuda", None))
    group = Group(name="nccl", address="127.0.0.1", port=29577, backend="nccl")
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(other), "29577"]) as trainer:
        done(executor.weigh(WeightOrder(action="join", group=group)))
        push = WeightOrder(
            action="push", way="group", layout=layout_of(other), group=group, last=True
        )
        done(executor.weigh(push))
        assert trainer.wait(60) == 0
    assert tokens(executor) == expected
    executor.close()


def test_a_group_of_gloo_says_which_backends_there_are() -> None:
    with pytest.raises(Exception, match="allowed on cpu: gloo"):
        join(Group(address="127.0.0.1", port=1, backend="nccl"), 0, torch.device("cpu"))
