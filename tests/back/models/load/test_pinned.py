"""Reads into a device's memory beside queued kernels (`make test-gpu`). QNT-19."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.back.models.load.pinned import PinnedReaders

LONG = 500_000_000
"""Clock cycles: a quarter of a second or more."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_memory_that_queued_kernels_still_write_is_waited_for(tmp_path: Path) -> None:
    """As when a weight takes the memory of floats that are being quantized."""
    values = torch.arange(1 << 16, dtype=torch.float32)
    path = tmp_path / "values"
    path.write_bytes(values.numpy().tobytes())
    target = torch.zeros(len(values), device="cuda")
    readers = PinnedReaders()
    torch.cuda._sleep(LONG)
    target.fill_(float("nan"))
    readers.copy(
        path, 0, dtype=torch.float32, shape=(len(values),), source=(slice(None),), target=target
    )
    readers.close()
    assert torch.equal(target.cpu(), values)
