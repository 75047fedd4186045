"""Sums over GPUs of one machine by our kernels (`make test-gpu`, KRN-27): one process a GPU,
against NCCL; and four processes on two GPUs. The kernels' own test, for any number of ranks, is
tests/kernels/triton/test_all_reduce.py.

Two ranks on one GPU run in turn, a slice of time each, so that a rank waits for one that is not
running: slow, and right if any order is. NCCL refuses them: set-up and comparisons go through the
host then, by gloo.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from headrace.back.parallel.mesh import Axis
from tests.back.parallel.ranks import join, running

if TYPE_CHECKING:
    from headrace.back.kernels.all_reduce.triton_all_reduce import PeerSums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here"),
]
SIZES = (8, 1000, 4096, 65536 + 8)
REPLAYS = {1: 1000, 2: 100}
"""By ranks on a device."""
Main = Callable[[Axis, torch.device, int], None]


def gathered(x: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Every rank's tensor."""
    every = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(every, x)
    return every


def in_order(every: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32, from the first rank's to the last."""
    return reduce(torch.add, [one.float() for one in every])


def sums_and_norms(axis: Axis, device: torch.device, per_device: int) -> None:
    """Every dtype and size up to the limit: the same bits on all ranks, those of a sum in order;
    close to NCCL's."""
    from headrace.back.kernels.all_reduce.measured import (
        MOST_BYTES,
        check,
        measured_sums,
        peer_sums,
    )

    sums, ranks = peer_sums(axis, device), axis.size
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in (*SIZES, MOST_BYTES // dtype.itemsize):
            for two_shot in (False, True):
                torch.manual_seed(size + axis.rank)
                mine = torch.randn(size, device=device).to(dtype)
                every = gathered(mine, ranks)
                library = mine.clone()
                dist.all_reduce(library)
                ours = sums.all_reduce(mine, two_shot=two_shot)
                assert torch.equal(ours, in_order(every).to(dtype))
                # the library rounds the sum of each rank to the dtype, ours once
                most = ranks * torch.finfo(dtype).eps / 2 * in_order([x.abs() for x in every])
                assert ((ours.float() - library.float()).abs() <= most).all()
    for rows in (1, 37, MOST_BYTES // 8192):
        norms(sums, axis, device, rows)
    check(sums, axis, device, torch.bfloat16)
    if per_device == 1:  # the library's times are of graphs, into which gloo cannot go
        chosen = measured_sums(axis, device, torch.bfloat16)
        print(axis.rank, chosen.chosen, chosen.why)


def norms(sums: PeerSums, axis: Axis, device: torch.device, rows: int) -> None:
    """Sum, residual and norm in one launch."""
    torch.manual_seed(axis.rank)
    x = torch.randn(rows, 4096, device=device).bfloat16()
    torch.manual_seed(1)
    weight = torch.randn(4096, device=device)
    for two_shot in (False, True):
        residual = torch.ones(rows, 4096, device=device).bfloat16()
        every = gathered(x, axis.size)
        y = sums.add_norm(x, residual, weight, eps=1e-6, two_shot=two_shot)
        wide = (in_order(every).bfloat16().float() + 1).bfloat16()
        assert torch.equal(residual, wide)
        expected = torch.nn.functional.rms_norm(wide.float(), (4096,), weight, 1e-6)
        torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
        other = gathered(y, axis.size)
        assert all(torch.equal(other[0], one) for one in other[1:])


def replayed(axis: Axis, device: torch.device, per_device: int) -> None:
    """A graph of sums and a norm, replayed many times on new numbers each time."""
    from headrace.back.kernels.all_reduce.measured import peer_sums

    sums, ranks = peer_sums(axis, device), axis.size
    x = torch.zeros(3, 8 * 4096, dtype=torch.bfloat16, device=device)
    residual = torch.zeros(8, 4096, dtype=torch.bfloat16, device=device)
    weight = torch.ones(4096, device=device)
    step = torch.zeros(1, dtype=torch.float32, device=device)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    total = sum(range(1, ranks + 1))

    def calls() -> None:
        step.add_(1)
        for i in range(3):
            factor = torch.remainder(step, 31) + i
            x[i].fill_(float(axis.rank + 1)).mul_(factor)
            if i == 2:
                residual.zero_()
                y = sums.add_norm(x[i].view(8, 4096), residual, weight, eps=0.0, two_shot=True)
                wrong.add_((y != 1).sum() + (residual != total * factor).sum())
            else:
                sums.all_reduce(x[i], two_shot=i == 1)
                wrong.add_((x[i] != total * factor).sum())

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        calls()
    for _ in range(REPLAYS[per_device]):
        graph.replay()
    torch.cuda.synchronize()
    assert step.item() == 1 + REPLAYS[per_device] and wrong.item() == 0


def left_alone(axis: Axis, device: torch.device, per_device: int) -> None:
    """A rank whose peer has gone gets an error from the device, and soon."""
    from headrace.back.kernels.all_reduce.measured import peer_sums

    sums = peer_sums(axis, device, polls=per_device << 22)
    x = torch.ones(4096, device=device)
    sums.all_reduce(x, two_shot=False)
    torch.cuda.synchronize()
    if axis.rank == axis.size - 1:
        os._exit(0)
    time.sleep(2)
    begin = time.monotonic()
    try:
        sums.all_reduce(x, two_shot=False)
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(0 if time.monotonic() - begin < 60 else 3)
    os._exit(4)


def run(rank: int, ranks: int, per_device: int, main: Main, folder: str) -> None:
    main(*join(rank, ranks, folder, per_device=per_device), per_device)
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.parametrize("main", [sums_and_norms, replayed, left_alone])
@pytest.mark.parametrize("ranks, per_device", [(2, 1), (4, 1), (4, 2)])
def test_ranks(ranks: int, per_device: int, main: Main, tmp_path: Path) -> None:
    """Equal bits on all ranks; graphs; a lost peer."""
    if torch.cuda.device_count() * per_device < ranks:
        pytest.skip(f"fewer than {ranks // per_device} CUDA devices here")
    folder = str(tmp_path)
    with running(run, [(rank, ranks, per_device, main, folder) for rank in range(ranks)]):
        pass
