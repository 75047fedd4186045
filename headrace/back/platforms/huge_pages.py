"""Large pages for memory that kernels stream through: fewer page faults and address translations
(weights on a Xeon of two cores: 15 GB/s of a core in pages of 4 KB, 24 in pages of 2 MB).

A weight of a few megabytes holds one whole large page or none, so what a model is made of is cut
from regions of many: `kept`. A piece that is let go (a plain weight, once it is packed) gives its
memory back to the system at once, which the heap does not promise; its region goes when all its
pieces have gone. The system zeroes a page when it is first touched, half a second per GB on one
core: where the size of a model is known, `expect` has that done on another core while this process
still imports. Imports no torch before it is needed, for that reason.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LEAST_BYTES = 4 << 20
"""Below it a tensor's memory comes from the heap, between others."""
_REGION_BYTES, _HUGE, _LINE = 64 << 20, 2 << 20, 64
_POPULATING = min(8, os.cpu_count() or 1)
_POPULATE_WRITE = 23  # Linux 5.14; older ones refuse it, and pages come when they are touched


def advise(address: int, num_bytes: int) -> None:
    """Asks the system to back memory with large pages from now on; a request it may ignore. To be
    called before the memory is written for the first time."""
    if num_bytes >= LEAST_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        _madvise(address, num_bytes, mmap.MADV_HUGEPAGE)


def populate(address: int, num_bytes: int) -> None:
    """Has all pages of memory made ready at once, on several cores."""
    parts = [
        (address + at, min(_REGION_BYTES, num_bytes - at))
        for at in range(0, num_bytes, _REGION_BYTES)
    ]
    with ThreadPoolExecutor(_POPULATING, thread_name_prefix="pages") as pool:
        for _ in pool.map(lambda part: _madvise(*part, _POPULATE_WRITE), parts):
            pass


def kept(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in a region shared with other tensors of the model, untouched until they are
    written."""
    import torch

    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(*shape, dtype=dtype)
    piece = _regions.cut(num_bytes)
    return torch.frombuffer(piece, dtype=dtype).view(*shape)


def expect(num_bytes: int) -> None:
    """Pieces of so many bytes in all will soon be asked for: their pages are made ready by a
    thread."""
    _regions.expect(num_bytes)


def settle() -> None:
    """All that was expected has been asked for: what was made ready in excess goes back."""
    _regions.settle()


class _Regions:
    """Where the next piece is cut from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: mmap.mmap | None = None
        self._used = 0
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def expect(self, num_bytes: int) -> None:
        """See above."""
        if num_bytes < _REGION_BYTES:
            return
        assert self._thread is None, "what was expected before is not settled"
        with self._lock:
            self._open(num_bytes)
            assert self._region is not None
            span = self._region, self._used, num_bytes
        self._stopped.clear()
        self._thread = threading.Thread(target=self._populate, args=span, name="pages", daemon=True)
        self._thread.start()

    def _populate(self, region: mmap.mmap, first: int, num_bytes: int) -> None:
        base = ctypes.addressof(ctypes.c_uint8.from_buffer(region))
        for at in range(first, first + num_bytes, _REGION_BYTES):
            if self._stopped.is_set():
                return
            _madvise(base + at, min(_REGION_BYTES, first + num_bytes - at), _POPULATE_WRITE)

    def settle(self) -> None:
        """See above."""
        if self._thread is None:
            return
        self._stopped.set()
        self._thread.join()
        self._thread = None
        with self._lock:
            if self._region is not None:
                base = ctypes.addressof(ctypes.c_uint8.from_buffer(self._region))
                give_back(base + self._used, len(self._region) - self._used)

    def cut(self, num_bytes: int) -> Any:
        """A buffer that keeps its region; its pages are given back when it goes."""
        with self._lock:
            if self._region is None or self._used + num_bytes > len(self._region):
                self._open(num_bytes)
            assert self._region is not None
            first, self._used = self._used, -(-(self._used + num_bytes) // _LINE) * _LINE
            piece = (ctypes.c_uint8 * num_bytes).from_buffer(self._region, first)
        release = weakref.finalize(piece, give_back, ctypes.addressof(piece), num_bytes)
        release.atexit = False
        return piece

    def _open(self, num_bytes: int) -> None:
        # Python shares memory by default: that would have no large pages.
        kind = (
            {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        )
        region = mmap.mmap(-1, max(_REGION_BYTES, num_bytes) + _HUGE, **kind)
        start = ctypes.addressof(ctypes.c_uint8.from_buffer(region))
        self._region, self._used = region, -start % _HUGE
        advise(start, len(region))


_regions = _Regions()


def give_back(address: int, num_bytes: int) -> None:
    """The whole pages of a piece; called before its region can be unmapped, which the piece still
    keeps."""
    if hasattr(mmap, "MADV_DONTNEED"):
        _madvise(address, num_bytes, mmap.MADV_DONTNEED)


def _madvise(address: int, num_bytes: int, advice: int) -> None:
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    function = _system_madvise()
    if last > first and function is not None:
        function(first, last - first, advice)


@functools.cache
def _system_madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
