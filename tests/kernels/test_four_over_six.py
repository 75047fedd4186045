"""A KV cache of e2m1 numbers whose 16 dimensions end at 4 or at 6, and latents of e2m1 numbers.
QNT-18."""

from __future__ import annotations

import itertools
import struct

import torch

from headrace.back.kernels.kv_write import quantized
from headrace.back.kernels.kv_write.quantized import SCALE_BYTES, value_bytes, values_and_scales
from headrace.back.kernels.latent_write import quantized as latents

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


def test_latents_of_e2m1_numbers_lie_before_their_scales_and_rotated_elements() -> None:
    """Byte i has elements i and 16 + i of 32; then two e4m3 scales, then eight e4m3 numbers."""
    latent = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    kv = torch.zeros(1, 4, latents.value_bytes(40, 32, "nvfp4") + 8, dtype=torch.int8)
    assert kv.shape[2] == 16 + 2 + 8 + 8
    for cache, part in zip(
        latents.values_and_scales(kv), latents.quantize(latent, 32, "nvfp4"), strict=True
    ):
        cache[0, :3] = part
    content = bytes(kv.flatten().view(torch.uint8).tolist())
    scales = struct.unpack("<8f", content[4 * 26 :])
    expected = torch.empty(3, 40)
    for token in range(3):
        own = content[26 * token : 26 * token + 26]
        e4m3 = torch.tensor(list(own[16:]), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        for i in range(32):
            bits = own[i % 16] >> 4 * (i // 16) & 15
            number = LEVELS[bits & 7] * (-1 if bits & 8 else 1)
            expected[token, i] = number * e4m3[i // 16] * scales[2 * token]
        expected[token, 32:] = e4m3[2:] * scales[2 * token + 1]
    read = latents.latents(kv, 32, "nvfp4", torch.float32)[0, :3]
    torch.testing.assert_close(read, expected)
    assert 0 < (read - latent)[:, :32].norm() < 0.15 * latent.norm()
    assert 0 < (read - latent)[:, 32:].norm() < 0.04 * latent.norm()


def test_latents_that_fit_no_form_are_told_why() -> None:
    assert latents.unfit("nvfp4", 576, 512, 16) is None
    assert "multiple of 32 elements, not 24" in str(latents.unfit("nvfp4", 30, 24, 16))
    assert "or as fp8 or int8 or nvfp4" in str(latents.unfit("int4", 576, 512, 16))
