"""A process as one of several ranks on GPUs, for tests."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from headrace.back.parallel.mesh import Axis


@contextmanager
def running(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> Iterator[None]:
    """Processes of their own for these calls of `target` beside the block; all must have ended well
    in ten minutes."""
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=target, args=one) for one in arguments]
    for worker in workers:
        worker.start()
    try:
        yield
        for worker in workers:
            worker.join(600)
        codes = [worker.exitcode for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0] * len(workers), codes


def join(rank: int, ranks: int, folder: str, *, per_device: int) -> tuple[Axis, torch.device]:
    """This process as a rank, with so many ranks on each device: one, over NCCL, or several, which
    it refuses, over gloo."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = torch.device("cuda", rank // per_device)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if per_device == 1 else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
    )
    if per_device > 1:
        go_through_host()
    return Axis(size=ranks, rank=rank, group=dist.group.WORLD), device


def go_through_host() -> None:
    """What the group sums and gathers in this process goes through host memory: gloo knows no other
    for all it does."""
    gather, reduce = dist.all_gather, dist.all_reduce

    def all_gather(parts: list[torch.Tensor], x: torch.Tensor, group: object = None) -> None:
        host = [torch.empty(x.numel() * x.itemsize, dtype=torch.uint8) for _ in parts]
        gather(host, x.contiguous().view(-1).view(torch.uint8).cpu(), group=group)
        for part, theirs in zip(parts, host, strict=True):
            part.copy_(theirs.view(x.dtype).view(x.shape))

    def all_reduce(
        x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: object = None
    ) -> None:
        host = x.double().cpu()
        reduce(host, op, group=group)
        x.copy_(host.to(x.dtype))

    dist.all_gather, dist.all_reduce = all_gather, all_reduce
