"""A KV cache of e2m1 numbers whose 16 dimensions end at 4 or at 6. QNT-18."""

from __future__ import annotations

import itertools

import torch

from headrace.back.kernels.kv_write import quantized
from headrace.back.kernels.kv_write.quantized import SCALE_BYTES, value_bytes, values_and_scales

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def meaning(x: torch.Tensor, form: str) -> torch.Tensor:
    """What is read back of heads [N, D] that were written in a form."""
    kv = torch.zeros(1, 2, 1, len(x), value_bytes(x.shape[1], form) + SCALE_BYTES, dtype=torch.int8)
    for cache, part in zip(values_and_scales(kv), quantized.quantize(x, form), strict=True):
        cache[0, 0, 0] = part
    return quantized.dequantize(kv, torch.float32, form)[0, 0, 0]


def best(group: list[float], unit: float) -> tuple[float, list[float]]:
    """The lesser sum of squares of both ends, by Python's floats, and the values that lose it."""
    largest = max(map(abs, group))
    candidates = []
    for end in (6.0, 4.0):
        wanted = torch.tensor(largest / end / unit)
        scale = float(wanted.to(torch.float8_e4m3fn)) * unit
        values = []
        for x in group:
            level = min(LEVELS, key=lambda one: (abs(one * scale - abs(x)), LEVELS.index(one) % 2))
            values.append(level * scale * (-1 if x < 0 else 1))
        lost = sum((value - x) ** 2 for value, x in zip(values, group, strict=True))
        candidates.append((lost, values))
    return min(candidates, key=lambda one: one[0])


def test_each_group_ends_where_it_loses_less() -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    x[1, :16] = torch.tensor([1.0, 2.0, 3.0, 4.0] * 4)  # exact with 4, not with 6
    read = meaning(x, "nvfp4-4over6")
    for row, first in itertools.product(range(6), range(0, 64, 16)):
        unit = float(x[row].abs().max()) / (6 * 256)
        lost, values = best(x[row, first : first + 16].tolist(), unit)
        ours = read[row, first : first + 16]
        assert float((ours - x[row, first : first + 16]).square().sum()) <= lost * 1.00001
        torch.testing.assert_close(ours, torch.tensor(values), rtol=1e-5, atol=1e-7)


def test_it_loses_less_than_groups_that_all_end_at_6() -> None:
    x = torch.randn(400, 128, generator=torch.Generator().manual_seed(3))
    lost = {form: float((meaning(x, form) - x).square().mean()) for form in quantized.E2M1}
    assert lost["nvfp4-4over6"] < 0.9 * lost["nvfp4"]
