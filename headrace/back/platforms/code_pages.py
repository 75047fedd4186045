"""Pages of a library's code that only its start ran: torch registers some thousand operations, our
self-checks run its references, and 70 MB of code stay mapped of which a server of native kernels
uses little.

Code is never written, so its pages can go at any time: what is still needed comes back from the
file cache, 64 KB at a fault.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from headrace.back.platforms.huge_pages import give_back

MAPS = Path("/proc/self/maps")


def let_go(library: str) -> int:
    """Unmaps the pages of all code of libraries whose file name begins with `library`; the bytes
    they span, 0 where the system does not say."""
    if not MAPS.exists() or not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    spans = list(_code(MAPS.read_text(), library))
    for first, last in spans:
        give_back(first, last - first)
    return sum(last - first for first, last in spans)


def _code(maps: str, library: str) -> list[tuple[int, int]]:
    """The ranges of a process's map that hold unwritable code of such a library."""
    spans = []
    for line in maps.splitlines():
        span, rights, *_, path = line.split(maxsplit=5) if line.count("/") else (line, "", "")
        if rights == "r-xp" and Path(path).name.startswith(library):
            first, _, last = span.partition("-")
            spans.append((int(first, 16), int(last, 16)))
    return spans
