"""How fast this machine reads memory on the threads of the pool: the bound of decode, measured in
milliseconds."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary


def reader(library: NativeLibrary, data: torch.Tensor) -> Callable[[], int]:
    """A call that reads all of a contiguous tensor and returns the XOR of its 32-bit words (of
    whole vectors)."""
    kernel = library.bind("probe", POINTER, INT64, POINTER)
    total = ctypes.c_uint32()
    assert data.is_contiguous(), data.stride()

    def read() -> int:
        kernel(data.data_ptr(), data.nbytes, ctypes.addressof(total))
        return total.value

    return read


def read_gb_per_s(library: NativeLibrary, *, read_bytes: int = 128 << 20, rounds: int = 5) -> float:
    """The best of `rounds` readings of a buffer of `read_bytes` (beyond any cache), in 10^9 bytes
    per second."""
    read = reader(library, torch.ones(read_bytes, dtype=torch.uint8))
    best_s = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        read()
        best_s = min(best_s, time.perf_counter() - start)
    return read_bytes / best_s / 1e9
