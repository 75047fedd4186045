"""Threads that launch on the device of the one that made them."""

from __future__ import annotations

import pytest
import torch

from headrace.back.platforms.device_threads import device_pool, use_device


def test_without_a_gpu_in_use_threads_are_plain_ones() -> None:
    use_device(torch.device("cpu"))
    with device_pool(2, "load") as pool:
        assert list(pool.map(abs, (-1, 2))) == [1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here")
def test_threads_launch_where_their_maker_does() -> None:
    """A kernel that packs weights on a loader's thread ran on the first GPU, with memory of another (QNT-04)."""
    before = torch.cuda.current_device()
    try:
        use_device(torch.device("cuda", 1))
        with device_pool(2, "load") as pool:
            assert {pool.submit(torch.cuda.current_device).result() for _ in range(4)} == {1}
    finally:
        torch.cuda.set_device(before)
