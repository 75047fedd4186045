"""Facts about the CPU: the cores and the memory this process may really use, and its instruction
sets.

A container is often quota_us less than the machine has: affinity masks, cgroup quotas and cgroup
memory limits all count.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from headrace.back.platforms.facts import DeviceFacts

CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
SYSTEM = Path("/sys/devices/system/cpu")


def cpu_facts(*, cgroup: Path = CGROUP, cpuinfo: Path = CPUINFO) -> DeviceFacts:
    """The CPU as one device."""
    memory = psutil.virtual_memory()
    limit = memory_limit(cgroup)
    total = min(memory.total, limit) if limit else memory.total
    free = memory.available
    if limit:
        free = min(free, max(0, limit - _number(cgroup / "memory.current", default=0)))
    fields = _cpuinfo(cpuinfo)
    return DeviceFacts(
        kind="cpu",
        name=fields.get("model name", platform.processor() or platform.machine()),
        arch=platform.machine(),
        memory_bytes=total,
        free_bytes=free,
        cores=usable_cores(cgroup),
        features=frozenset((fields.get("flags") or fields.get("Features") or "").split()),
    )


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores this process may run on: the physical ones of its affinity mask, cut by the cgroup's
    CPU quota (rounded up), at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = physical_cores(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    limit = quota(cgroup)
    return max(1, cores if limit is None else min(cores, limit))


def quota(cgroup: Path = CGROUP) -> int | None:
    """Whole cores that the cgroup's CPU quota amounts to, rounded up; None if there is none."""
    quota_us, _, period = _text(cgroup / "cpu.max").partition(" ")
    if quota_us.isdigit() and period.strip().isdigit():
        return -(-int(quota_us) // int(period))
    return None


def physical_cores(cpus: set[int], root: Path = SYSTEM) -> int:
    """Cores behind logical CPUs: two threads of one core share its vector units, and a second one
    only takes the first one's cache."""
    return len({_text(root / f"cpu{cpu}/topology/core_cpus_list").strip() or cpu for cpu in cpus})


def memory_limit(cgroup: Path = CGROUP) -> int | None:
    """The cgroup's memory limit in bytes, None if there is none."""
    limit = _number(cgroup / "memory.max", default=0)
    return limit or None


def _cpuinfo(path: Path) -> dict[str, str]:
    """The fields of the first core."""
    first = _text(path).partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _number(path: Path, *, default: int) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else default


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
