"""The memory's rate, which floors are taken from; how kernels are timed: headrace/back/kernels/triton/timing.py."""

from __future__ import annotations

import torch

from headrace.back.kernels.triton.timing import each_us


def read_rate() -> float:
    """Bytes per second of summing a large tensor."""
    x = torch.randn(1 << 30, device="cuda")
    us = each_us([lambda: x.sum()] * 3)
    return x.numel() * 4 / us * 1e6
