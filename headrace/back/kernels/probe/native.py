"""How fast this machine reads memory on the threads of the pool: the bound of decode, measured in milliseconds."""

from __future__ import annotations

import ctypes
import time

import torch

from headrace.back.kernels.native.library import INT64, POINTER, NativeLibrary


def read_gb_per_s(library: NativeLibrary, *, read_bytes: int = 256 << 20, rounds: int = 5) -> float:
    """The best of `rounds` readings of a buffer of `read_bytes` (beyond any cache), in 10^9 bytes per second."""
    kernel = library.bind("probe", POINTER, INT64, POINTER)
    buffer = torch.zeros(read_bytes, dtype=torch.uint8).random_()
    total = ctypes.c_uint32()
    best_s = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        kernel(buffer.data_ptr(), read_bytes, ctypes.addressof(total))
        best_s = min(best_s, time.perf_counter() - start)
    return read_bytes / best_s / 1e9
