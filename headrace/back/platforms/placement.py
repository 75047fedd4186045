"""Which CPUs the kernels' threads run on, which are left to the server's other work, and where
memory comes from.

A kernel ends when its slowest thread does: a thread that shares its core, with another process or
with the core's other half, holds all others up. So kernels get whole physical cores, one thread on
each, and where there are more than two cores the last one is left to the API process and the
engine's loop. Of several NUMA nodes memory is taken in turns, page by page: every node's bandwidth
then serves every thread, whichever weights it reads.

Only plain facts are read here; nothing but `interleave` changes anything. Threads are moved by
base/affinity.py.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.back.platforms.cpu import CGROUP, SYSTEM, quota

NODES = Path("/sys/devices/system/node")
_MPOL_INTERLEAVE = 3
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """kernels: a CPU of each core that computes; others: all CPUs of the cores that are left, where
    the other processes go (empty: they share); nodes: the NUMA nodes of the kernels' CPUs. `why`
    says it in a line."""

    kernels: tuple[int, ...]
    others: tuple[int, ...]
    nodes: tuple[int, ...]
    why: str


def place(
    allowed: Iterable[int] | None = None, *, system: Path = SYSTEM, nodes: Path = NODES,
    cgroup: Path = CGROUP,
) -> Placement:  # fmt: skip
    """The placement for the CPUs this process may use (cpuset and affinity mask), or `allowed`."""
    cpus = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    cores = list(_cores(cpus, system).values())
    homes = _nodes(cpus, nodes)
    limit = quota(cgroup)
    if limit is not None and limit < len(cores):
        # Which cores are free is the system's to know: other containers may run on all of them.
        why = f"the cgroup's quota is {limit} of {len(cores)} cores: the system places the threads"
        return Placement(kernels=(), others=(), nodes=homes, why=why)
    if len(cores) <= 2:
        why = f"{len(cores)} physical cores: all processes share them"
        return Placement(kernels=(), others=(), nodes=homes, why=why)
    *computing, left = cores
    why = f"one thread on each of {len(computing)} physical cores, the API process on the last"
    kernels = tuple(core[0] for core in computing)
    return Placement(kernels=kernels, others=tuple(left), nodes=_nodes(kernels, nodes), why=why)


def _cores(cpus: Iterable[int], system: Path) -> dict[str, list[int]]:
    """The CPUs by physical core; one whose siblings are not known is a core of its own."""
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        siblings = _text(system / f"cpu{cpu}/topology/core_cpus_list").strip()
        cores.setdefault(siblings or f"cpu{cpu}", []).append(cpu)
    return cores


def _nodes(cpus: Iterable[int], root: Path) -> tuple[int, ...]:
    """The NUMA nodes that hold any of these CPUs."""
    wanted = set(cpus)
    nodes = []
    for folder in root.glob("node*") if root.is_dir() else ():
        number = re.fullmatch(r"node(\d+)", folder.name)
        if number and wanted & parse_list(_text(folder / "cpulist")):
            nodes.append(int(number[1]))
    return tuple(sorted(nodes))


def parse_list(text: str) -> set[int]:
    """The kernel's way to write CPUs: "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def interleave(nodes: Iterable[int]) -> bool:
    """Takes the calling thread's memory from these nodes in turns, and that of threads it starts;
    False where the system does not let it."""
    number = _SET_MEMPOLICY.get(platform.machine())
    wanted = list(nodes)
    if number is None or not wanted:
        return False
    mask = (ctypes.c_ulong * 16)()
    for node in wanted:
        mask[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    bits = ctypes.c_ulong(8 * ctypes.sizeof(mask))
    return bool(libc.syscall(ctypes.c_long(number), _MPOL_INTERLEAVE, mask, bits) == 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
