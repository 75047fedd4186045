"""Weights are quantized to the same bits on every device."""

from __future__ import annotations

import pytest
import torch

from headrace.back.quant.scheme import SCHEMES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", SCHEMES)
def test_a_gpu_quantizes_to_the_bits_of_a_cpu(name: str) -> None:
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight[7] = 0
    here, there = (SCHEMES[name].quantize(weight.to(device)) for device in ("cpu", "cuda"))
    for mine, other in zip(here, there, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert torch.equal(mine, other.cpu())
