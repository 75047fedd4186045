"""How many heaps the C library's threads have, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import ctypes, threading
from headrace.base import heap
getattr(heap, {name!r}, lambda: None)()
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
barrier = threading.Barrier(6)
def run():
    barrier.wait()
    library.free(library.malloc(1 << 16))
    barrier.wait()
threads = [threading.Thread(target=run) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
library.malloc_info(0, ctypes.c_void_p.in_dll(library, "stdout"))
library.fflush(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heaps")
@pytest.mark.parametrize(("name", "most"), [("", 99), ("share_heaps", 2), ("keep_compact", 2)])
def test_threads_share_heaps(name: str, most: int) -> None:
    command = [sys.executable, "-c", COUNT.format(name=name)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count = told.count("<heap nr=")
    assert count <= most and (count > 2 or name)
