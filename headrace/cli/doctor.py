"""`headrace doctor`: checks of this machine, each with what to do about it. Exit status 1 if one of
them fails."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from headrace.base import env
from headrace.base.config.options import CommandLine
from headrace.base.config.units import show_bytes
from headrace.base.errors import ConfigError
from headrace.base.optional import available


class DoctorCheck(msgspec.Struct, frozen=True):
    """What was looked at, the verdict (ok, note or fail), what was seen, and what to do."""

    what: str
    verdict: str
    observed: str
    advice: str = ""


def check_python() -> DoctorCheck:
    """Python 3.11 or newer."""
    observed = sys.version.split()[0]
    return DoctorCheck("Python", "ok", observed)


def check_torch() -> DoctorCheck:
    """A PyTorch that fits the machine: a CUDA build if there is a GPU driver."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return DoctorCheck("PyTorch", "fail", "absent", "run `make serve`, or pip install torch")
    driver = Path("/proc/driver/nvidia/version").exists()
    if driver and "+cpu" in version:
        return DoctorCheck(
            "PyTorch",
            "note",
            version,
            "an NVIDIA driver is here but this is the CPU build: install a CUDA one",
        )
    return DoctorCheck("PyTorch", "ok", version)


def check_compiler() -> DoctorCheck:
    """A C++ compiler, for the native CPU kernels."""
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        return DoctorCheck(
            "C++ compiler",
            "note",
            "absent",
            "install g++ or clang++: native kernels are several times faster",
        )
    return DoctorCheck("C++ compiler", "ok", compiler)


def check_cores() -> DoctorCheck:
    """Cores this process may use, against what the machine has and what a container grants."""
    usable, total = len(os.sched_getaffinity(0)), psutil.cpu_count() or 1
    quota = _cgroup_cores()
    observed = f"{usable} of {total}" + (f", quota {quota:.1f}" if quota else "")
    if quota and quota < usable - 0.5:
        return DoctorCheck(
            "CPU cores",
            "note",
            observed,
            "the quota is below the visible cores: set --threads to it",
        )
    return DoctorCheck("CPU cores", "ok", observed)


def _cgroup_cores() -> float | None:
    path = Path("/sys/fs/cgroup/cpu.max")
    if not path.exists():
        return None
    quota, _, period = path.read_text().strip().partition(" ")
    return None if quota == "max" else int(quota) / int(period)


def check_memory() -> DoctorCheck:
    """Memory for weights and KV."""
    free = psutil.virtual_memory().available
    if free < 1 << 30:
        return DoctorCheck(
            "Memory", "fail", show_bytes(free), "less than 1 GiB is free: close something"
        )
    return DoctorCheck("Memory", "ok", f"{show_bytes(free)} free")


def check_files() -> DoctorCheck:
    """Open files: one per connection."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        return DoctorCheck(
            "Open files", "note", f"{soft} (at most {hard})", "ulimit -n 65536 for many connections"
        )
    return DoctorCheck("Open files", "ok", str(soft))


def check_cache() -> DoctorCheck:
    """The cache folder: private, with room."""
    try:
        folder = env.cache_dir()
    except ConfigError as error:
        return DoctorCheck(
            "Cache folder", "fail", error.message, "chmod 700, or name another folder"
        )
    mode, free = folder.stat().st_mode & 0o777, shutil.disk_usage(folder).free
    if mode & 0o022:
        return DoctorCheck(
            "Cache folder", "fail", f"{folder} mode {mode:o}", "others can write to it: chmod 700"
        )
    if free < 1 << 30:
        return DoctorCheck(
            "Cache folder", "note", f"{folder}, {show_bytes(free)} free", "less than 1 GiB is free"
        )
    return DoctorCheck("Cache folder", "ok", f"{folder}, {show_bytes(free)} free")


def check_port() -> DoctorCheck:
    """The default port."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            return DoctorCheck(
                "Port 8000", "note", "in use", "give another: headrace serve --port 8001"
            )
    return DoctorCheck("Port 8000", "ok", "free")


def check_optional() -> DoctorCheck:
    """Optional libraries."""
    absent = [
        m
        for m in ("transformers", "huggingface_hub", "sentencepiece", "tiktoken", "zstandard")
        if not available(m)
    ]
    if absent:
        return DoctorCheck(
            "Optional libraries",
            "note",
            f"absent: {', '.join(absent)}",
            "pip install 'headrace[hf,tokenizers]'",
        )
    return DoctorCheck("Optional libraries", "ok", "all present")


CHECKS: tuple[Callable[[], DoctorCheck], ...] = (
    check_python, check_torch, check_compiler, check_cores, check_memory,
    check_files, check_cache, check_port, check_optional,
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Runs every check and prints a table."""
    line = CommandLine("headrace doctor", "Checks this machine.", groups=())
    line.parser.add_argument("--json", action="store_true", help="print one JSON object per check")
    own, _ = line.parse(argv)
    results = [check() for check in CHECKS]
    if own.json:
        for result in results:
            print(msgspec.json.encode(result).decode())
    else:
        table = Table("", "what", "seen", "what to do")
        marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fail": "[red]fail[/]"}
        for result in results:
            table.add_row(marks[result.verdict], result.what, result.observed, result.advice)
        Console().print(table)
    return 1 if any(r.verdict == "fail" for r in results) else 0
