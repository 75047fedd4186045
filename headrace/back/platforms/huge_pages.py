"""Large pages for memory that kernels stream through: fewer page faults and address translations (weights on a Xeon of
two cores: 15 GB/s of a core in pages of 4 KB, 24 in pages of 2 MB)."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

LEAST_BYTES = 4 << 20
"""Below it a tensor's memory comes from the heap, between others."""


def advise(address: int, num_bytes: int) -> None:
    """Asks the system to back memory with large pages from now on; a request it may ignore. To be called before the
    memory is written for the first time."""
    madvise = _madvise()
    if num_bytes < LEAST_BYTES or madvise is None:
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(first, last - first, mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
