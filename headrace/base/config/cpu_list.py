"""Lists of CPUs as people and the kernel write them: 0-3,8."""

from __future__ import annotations

MAX_CPUS = 65_536


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs of a list, each once, in its order; ValueError for anything else."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or not (last.isdecimal() or not dash):
            raise ValueError(f"{part!r:.80} is neither a CPU nor a range such as 0-3")
        begin, end = int(first), int(last or first)
        if not begin <= end < MAX_CPUS:
            raise ValueError(f"{part!r:.80} is no range of CPUs below {MAX_CPUS}")
        cpus += range(begin, end + 1)
    if len(set(cpus)) != len(cpus):
        raise ValueError("a CPU is listed twice")
    return tuple(cpus)
