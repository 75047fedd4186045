"""Sums over ranks in Triton's interpreter (KRN-27): ranks are processes that have mapped each other's memory, as on
GPUs."""

from __future__ import annotations

import mmap
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
MOST_BYTES = 32 << 10
WIDTH = 96


def rank_main(rank: int, ranks: int, calls: int, folder: str, dtype_name: str) -> None:
    """One rank: every way of summing, several times, and what it got to a file."""
    from headrace.back.kernels.all_reduce.triton_all_reduce import PeerSums, memory_bytes
    from tests.kernels.triton.quick_interpreter import quicken

    quicken()
    torch.set_num_threads(1)
    dtype = getattr(torch, dtype_name)
    maps = []
    for peer in range(ranks):
        with open(f"{folder}/memory-{peer}", "r+b") as file:
            maps.append(mmap.mmap(file.fileno(), memory_bytes(ranks, MOST_BYTES)))
    addresses = tuple(np.frombuffer(one, np.uint8).ctypes.data for one in maps)
    sums = PeerSums(addresses, rank=rank, device=torch.device("cpu"), most_bytes=MOST_BYTES)
    found = {}
    for call in range(calls):
        for two_shot in (False, True):
            mine = message(rank, call, dtype)
            found[f"sum {call} {two_shot}"] = sums.all_reduce(mine, two_shot=two_shot)
            residual = message(100, call, dtype).view(-1, WIDTH)
            weight = torch.linspace(0.5, 1.5, WIDTH)
            x = message(rank, call, dtype, other=1).view(-1, WIDTH)
            y = sums.add_norm(x, residual, weight, eps=1e-6, two_shot=two_shot)
            found[f"norm {call} {two_shot}"] = torch.cat([y, residual])
    torch.save(found, f"{folder}/found-{rank}")


def message(rank: int, call: int, dtype: torch.dtype, *, other: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * other + call)
    rows = 1 + call * 2
    return torch.randn(rows * WIDTH, generator=generator).to(dtype)


def norm(total: torch.Tensor, call: int, dtype: torch.dtype) -> torch.Tensor:
    residual = (message(100, call, dtype).float() + total.float()).to(dtype).view(-1, WIDTH)
    wide = residual.float()
    y = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)
    return torch.cat([(y * torch.linspace(0.5, 1.5, WIDTH)).to(dtype), residual])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "ranks, calls, dtype",
    [
        (2, 3, torch.float16),
        (4, 3, torch.float32),
    ],
)
def test_ranks_agree_to_the_bit_and_with_the_sum(
    ranks: int, calls: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shot and two, alone and with the norm after, call after call in the same memory."""
    from headrace.back.kernels.all_reduce import triton_all_reduce

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for rank in range(ranks):
        num_bytes = triton_all_reduce.memory_bytes(ranks, MOST_BYTES)
        (tmp_path / f"memory-{rank}").write_bytes(bytes(num_bytes))
    spawn = multiprocessing.get_context("spawn")
    name = str(dtype).removeprefix("torch.")
    workers = [
        spawn.Process(target=rank_main, args=(rank, ranks, calls, str(tmp_path), name), daemon=True)
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        assert worker.exitcode == 0
    found = [torch.load(tmp_path / f"found-{rank}") for rank in range(ranks)]
    for call in range(calls):
        total, before = (
            sum_in_order([message(rank, call, dtype, other=other) for rank in range(ranks)])
            for other in (0, 1)
        )
        for two_shot in (False, True):
            for one in found:
                assert torch.equal(one[f"sum {call} {two_shot}"], total), (call, two_shot)
                ours = one[f"norm {call} {two_shot}"]
                assert torch.equal(ours, found[0][f"norm {call} {two_shot}"])
                torch.testing.assert_close(ours, norm(before, call, dtype), rtol=2e-3, atol=2e-3)


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
