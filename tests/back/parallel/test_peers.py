"""Sums over GPUs of one machine by our kernels (`make test-gpu`, KRN-27): one process a GPU, against NCCL. The kernels'
own test, for any number of ranks, is tests/kernels/triton/test_all_reduce.py."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headrace.back.parallel.mesh import Axis

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here"),
]
SIZES = (8, 1000, 4096, 65536 + 8, 1 << 20)


def join(rank: int, ranks: int, folder: str) -> tuple[Axis, torch.device]:
    """This process as a rank."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    return Axis(size=ranks, rank=rank, group=dist.group.WORLD), device


def in_order(every: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32, from the first rank's to the last."""
    return reduce(torch.add, [one.float() for one in every])


def sums_and_norms(rank: int, ranks: int, folder: str) -> None:
    """Every dtype and size: the same bits on all ranks, those of a sum in order; close to NCCL's."""
    from headrace.back.kernels.all_reduce.measured import measured_sums, peer_sums

    axis, device = join(rank, ranks, folder)
    sums = peer_sums(axis, device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in SIZES:
            for two_shot in (False, True):
                torch.manual_seed(size + rank)
                mine = torch.randn(size, device=device).to(dtype)
                every = [torch.empty_like(mine) for _ in range(ranks)]
                dist.all_gather(every, mine)
                library = mine.clone()
                dist.all_reduce(library)
                ours = sums.all_reduce(mine, two_shot=two_shot)
                assert torch.equal(ours, in_order(every).to(dtype))
                torch.testing.assert_close(ours, library)
    x = torch.randn(37, 4096, device=device).bfloat16()
    torch.manual_seed(1)
    weight = torch.randn(4096, device=device)
    for two_shot in (False, True):
        residual = torch.ones(37, 4096, device=device).bfloat16()
        every = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(every, x)
        y = sums.add_norm(x, residual, weight, eps=1e-6, two_shot=two_shot)
        wide = (in_order(every).bfloat16().float() + 1).bfloat16()
        assert torch.equal(residual, wide)
        expected = torch.nn.functional.rms_norm(wide.float(), (4096,), weight, 1e-6)
        torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
        other = [torch.empty_like(y) for _ in range(ranks)]
        dist.all_gather(other, y)
        assert all(torch.equal(other[0], y) for y in other[1:])
    chosen = measured_sums(axis, device, torch.bfloat16)
    print(rank, chosen.chosen, chosen.why)


def replayed(rank: int, ranks: int, folder: str) -> None:
    """A graph of sums, replayed 1,000 times on new numbers each time."""
    from headrace.back.kernels.all_reduce.measured import peer_sums

    axis, device = join(rank, ranks, folder)
    sums = peer_sums(axis, device)
    x = torch.zeros(3, 8 * 4096, dtype=torch.bfloat16, device=device)
    step = torch.zeros(1, dtype=torch.float32, device=device)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    total = sum(range(1, ranks + 1))

    def calls() -> None:
        step.add_(1)
        for i in range(3):
            x[i].fill_(float(rank + 1)).mul_(torch.remainder(step, 31) + i)
            sums.all_reduce(x[i], two_shot=i == 1)
            wrong.add_((x[i] != total * (torch.remainder(step, 31) + i)).sum())

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        calls()
    for _ in range(1000):
        graph.replay()
    torch.cuda.synchronize()
    assert step.item() == 1001 and wrong.item() == 0


def left_alone(rank: int, ranks: int, folder: str) -> None:
    """A rank whose peer has gone gets an error from the device, and soon."""
    from headrace.back.kernels.all_reduce.measured import peer_sums

    axis, device = join(rank, ranks, folder)
    sums = peer_sums(axis, device, polls=1 << 18)
    x = torch.ones(4096, device=device)
    sums.all_reduce(x, two_shot=False)
    torch.cuda.synchronize()
    if rank == ranks - 1:
        os._exit(0)
    time.sleep(2)
    begin = time.monotonic()
    try:
        sums.all_reduce(x, two_shot=False)
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(0 if time.monotonic() - begin < 60 else 3)
    os._exit(4)


def run(rank: int, ranks: int, main: Callable[[int, int, str], None], folder: str) -> None:
    main(rank, ranks, folder)
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.parametrize("main", [sums_and_norms, replayed, left_alone])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(ranks: int, main: Callable[[int, int, str], None], tmp_path: Path) -> None:
    """Equal bits on all ranks; graphs; a lost peer."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"fewer than {ranks} CUDA devices here")
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=run, args=(rank, ranks, main, str(tmp_path))) for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(90)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    assert codes == [0] * ranks, codes
