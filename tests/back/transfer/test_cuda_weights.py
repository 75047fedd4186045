"""New weights for the bundled model on a GPU, in each form it may have there, from files, from another process's
memory and by NCCL (`make test-gpu`). The first also runs on the CPU, so that it is known to work."""

from __future__ import annotations

import contextlib
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
from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.request import RowSampling
from headrace.base.wire.weights import Group, Layout, SharedMemory, WeightOrder, WeightReply
from tests.back.driver import Driver
from tests.back.test_cuda import DEVICES, MODEL, bundled_spec, needs_gpu
from tests.back.transfer.trainers import free_port

LENDER = """
import sys, msgspec, torch
from safetensors.torch import load_file
from headrace.back.transfer.handles import lend
tensors = load_file(sys.argv[1] + "/model.safetensors")
flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
buffer = torch.cat(flat).to(torch.device("cuda", int(sys.argv[2])))
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
        name: (t.float() * (1 + 0.5 * torch.randn(t.shape, generator=generator))).to(t.dtype)
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
        driver.read(executor.submit(driver.plan(runs)).result(300))
    for row in rows:
        driver.release(row)
    executor.submit(driver.plan([])).result(300)
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


class Executors:
    """What a test starts, each alone on its device; closed when the test ends, however it ends."""

    def __init__(self) -> None:
        self.running: InlineExecutor | None = None

    def start(
        self, device: str, quantization: str | None = None, folder: Path = MODEL
    ) -> InlineExecutor:
        self.close()
        self.running = InlineExecutor(spec_of(device, quantization, folder))
        return self.running

    def close(self) -> None:
        if self.running is not None:
            self.running.close()
        self.running = None


@pytest.fixture
def executors() -> Iterator[Executors]:
    started = Executors()
    yield started
    started.close()


@pytest.fixture
def expected(other: Path, executors: Executors) -> list[list[int]]:
    return tokens(executors.start("cuda", None, other))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize("device", DEVICES)
def test_recorded_steps_read_the_new_weights(
    device: str, quantization: str | None, other: Path, executors: Executors
) -> None:
    wanted = tokens(executors.start(device, quantization, other))
    executor = executors.start(device, quantization)
    assert tokens(executor) != wanted
    while executor.record_graph().more:
        pass
    told = done(executor.weigh(WeightOrder(action="push", path=str(other), last=True)))
    assert told.num_bytes > 0 and tokens(executor) == wanted


@contextlib.contextmanager
def lender(folder: Path, device: torch.device) -> Iterator[dict[str, SharedMemory]]:
    """Memory that another process holds on a device, until the end."""
    command = [sys.executable, "-c", LENDER, str(folder), str(device.index or 0)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield msgspec.json.decode(process.stdout.readline(), type=dict[str, SharedMemory])
        finally:
            process.stdin.close()


def device_of(executor: InlineExecutor) -> torch.device:
    """Where its weights lie: which GPU it takes is its own choice."""
    return executor._resident._device


@pytest.mark.gpu
@needs_gpu
def test_memory_that_another_process_lends_is_read_in_place(
    other: Path, expected: list[list[int]], executors: Executors
) -> None:
    executor = executors.start("cuda")
    with lender(other, device_of(executor)) as lent:
        layout = layout_of(other)
        order = WeightOrder(action="push", way="handles", layout=layout, handles=lent, last=True)
        done(executor.weigh(order))
    assert tokens(executor) == expected


TRAINER = """
import sys, torch
from safetensors.torch import load_file
from headrace.back.transfer.groups import broadcast, join
from headrace.base.wire.weights import Group
device = torch.device("cuda", int(sys.argv[3]))
torch.cuda.set_device(device)
group = Group(name="nccl", address="127.0.0.1", port=int(sys.argv[2]), backend="nccl")
members = join(group, 0, device)
for tensor in load_file(sys.argv[1] + "/model.safetensors").values():
    broadcast(tensor.to(device), members)
torch.cuda.synchronize()
"""


@contextlib.contextmanager
def trainer(folder: Path, group: Group, engine: torch.device) -> Iterator[subprocess.Popen[bytes]]:
    """A process that broadcasts a checkpoint from another GPU than the engine's."""
    device = 1 - (engine.index or 0) if (engine.index or 0) < 2 else 0
    command = [sys.executable, "-c", TRAINER, str(folder), str(group.port), str(device)]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@pytest.mark.gpu
@needs_two
def test_a_trainer_on_another_gpu_broadcasts_by_nccl(
    other: Path, expected: list[list[int]], executors: Executors
) -> None:
    executor = executors.start("cuda")
    group = Group(name="nccl", address="127.0.0.1", port=free_port(), backend="nccl")
    with trainer(other, group, device_of(executor)) as process:
        done(executor.weigh(WeightOrder(action="join", group=group)))
        layout = layout_of(other)
        push = WeightOrder(action="push", way="group", layout=layout, group=group, last=True)
        done(executor.weigh(push))
        assert process.wait(300) == 0
    assert tokens(executor) == expected


@pytest.mark.gpu
@needs_two
def test_a_trainer_that_ends_costs_its_group_alone(other: Path, executors: Executors) -> None:
    """What it left unsent is an error that says so, the engine goes on, and the next trainer's group
    may have the same name."""
    executor = executors.start("cuda")
    before = tokens(executor)
    layout = layout_of(other)
    more = Layout(
        names=[*layout.names, "more"],
        dtypes=[*layout.dtypes, "BF16"],
        shapes=[*layout.shapes, [4]],
    )
    for _ in range(2):
        group = Group(name="nccl", address="127.0.0.1", port=free_port(), backend="nccl")
        with trainer(other, group, device_of(executor)):
            done(executor.weigh(WeightOrder(action="join", group=group)))
            push = WeightOrder(action="push", way="group", layout=more, group=group, last=True)
            told = executor.weigh(push).result(120)
            assert told.error is not None and "trainer is gone" in told.error.message, told.error
        assert tokens(executor) == before
