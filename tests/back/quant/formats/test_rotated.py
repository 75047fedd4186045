"""FP-Quant's weights are turned back: they equal what is decoded here number by number. QNT-17."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import Stored, open_weight
from tests.back.quant.formats.test_formats import assert_rectangles

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def stored_weight(dtype: str, size: int) -> tuple[Stored, torch.Tensor]:
    """Two numbers to a byte, the first in its lower half; the weight that was rotated by `size`."""
    generator = torch.Generator().manual_seed(size)
    outputs, inputs, group = 6, 64, 32 if dtype == "mxfp4" else 16
    packed = torch.randint(0, 256, (outputs, inputs // 2), generator=generator)
    low, high = (1, 127) if dtype == "nvfp4" else (120, 132)
    scales = torch.randint(low, high, (outputs, inputs // group), generator=generator)
    outer = 3.0 if dtype == "mxfp4" else 10.0
    rotated = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            bits = int(packed[o, i // 2]) >> 4 * (i % 2) & 15
            number = NUMBERS[bits & 7] * (-1 if bits & 8 else 1)
            byte = int(scales[o, i // group])
            scale = 2.0 ** (byte - 127)
            if dtype == "nvfp4":
                exponent, fraction = byte >> 3, byte & 7
                scale = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 512
            rotated[o, i] = number * scale / outer
    index = np.arange(size)
    odd = np.bitwise_count(index[:, None] & index) % 2
    matrix = torch.from_numpy(1.0 - 2.0 * odd).float() / size**0.5
    matrix = matrix[:, torch.randperm(size, generator=generator)].bfloat16()
    weight = torch.cat([part @ matrix.float().inverse() for part in rotated.split(size, 1)], 1)
    return {
        "module.qweight": packed.to(torch.uint8),
        "module.scales": scales.to(torch.uint8),
        "module.weight_global_scale": torch.tensor([outer]).bfloat16(),
        "module.act_global_scale": torch.tensor([outer]).bfloat16(),
        "module.forward_hadamard_matrix": matrix,
        "module.backward_hadamard_matrix": matrix.clone(),
    }, weight.bfloat16()


@pytest.mark.parametrize(("dtype", "size"), [("nvfp4", 16), ("mxfp4", 64)])
def test_numbers_are_turned_back(dtype: str, size: int, tmp_path: Path) -> None:
    stored, weight = stored_weight(dtype, size)
    config = {"quant_method": "fp_quant", "forward_dtype": dtype, "hadamard_group_size": size}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert list(source.entries) == ["module.weight"]
        for cut in ((slice(0, 6), slice(0, 64)), (slice(2, 5), slice(7, 50))):
            target = torch.full(weight[cut].shape, torch.nan)
            source.copy("module.weight", (6, 64), cut, target)
            torch.testing.assert_close(target, weight[cut].float(), rtol=0.01, atol=0.02)
    stored["module.forward_hadamard_matrix"] = torch.ones(48, 48)
    with pytest.raises(CheckpointError, match="blocks of 48 inputs do not divide 64"):
        open_weight(tmp_path, config, stored)


def test_floats_are_turned_back_too_and_masters_are_plain(tmp_path: Path) -> None:
    matrix = torch.linalg.qr(torch.arange(256.0).view(16, 16) % 7 + torch.eye(16) * 9).Q
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    rotated = torch.cat([part @ matrix for part in weight.split(16, 1)], 1)
    stored = {"module.dqweight": rotated, "module.forward_hadamard_matrix": matrix}
    config = {"quant_method": "fp_quant", "pseudoquantization": True}
    with closing(open_weight(tmp_path, config, stored)) as source:
        target = torch.empty(4, 32)
        source.copy("module.weight", (4, 32), (slice(None), slice(None)), target)
        torch.testing.assert_close(target, weight, rtol=1e-4, atol=1e-5)
    config = {"quant_method": "fp_quant", "store_master_weights": True}
    with closing(open_weight(tmp_path, config, {"module.weight": weight})) as source:
        assert_rectangles(source, "module.weight", weight)
        assert source.decisions()[0].requested == "fp_quant"
