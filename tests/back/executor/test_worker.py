"""What every worker sets up before it loads a model."""

from __future__ import annotations

import torch

from headrace.back.executor.worker import set_threads
from headrace.back.kernels.native.build import build
from headrace.back.kernels.native.library import NativeLibrary, load


def test_torch_and_the_native_kernels_get_the_workers_threads() -> None:
    built = NativeLibrary(build())
    before = torch.get_num_threads()
    load.cache_clear()
    set_threads(3)
    assert torch.get_num_threads() == built.threads == 3
    set_threads(1)
    assert torch.get_num_threads() == built.threads == 1
    torch.set_num_threads(before)
