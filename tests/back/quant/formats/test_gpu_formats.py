"""What packages have written is taken apart on a device as on a CPU. QNT-01 QNT-17."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.back.quant.formats.stored_weights import golden, golden_cases, open_weight


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_device_reads_every_format(tmp_path: Path) -> None:
    for case in golden_cases():
        folder = tmp_path / case
        folder.mkdir()
        config, stored, expected = golden(case)
        cut = tuple(slice(size // 3, size) for size in expected.shape)
        wanted = expected[cut].float()
        target = torch.full(wanted.shape, torch.nan, device="cuda")
        with closing(open_weight(folder, config, stored)) as source:
            source.copy("module.weight", tuple(expected.shape), cut, target)
        rounding = 2 * torch.finfo(expected.dtype).eps
        assert torch.allclose(target.cpu(), wanted, rtol=rounding, atol=1e-6), case
