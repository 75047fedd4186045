"""Facts about this machine, the runtime folder, and how a child process is started and tied to its parent.

A child gets one end of a socket pair: it reports over it as JSON lines (`Report`), and when the parent dies, on
whatever path, its end of file tells the child to end too. PR_SET_PDEATHSIG does the same for a child that hangs.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from headrace.base import env
from headrace.launch.resolve import DeviceFacts

PR_SET_PDEATHSIG = 1
_NO_KEYS = {"HEADRACE_API_KEYS": "", "HEADRACE_ADMIN_KEY": ""}  # children know digests only
_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")


DRAIN_SIGNAL = signal.SIGUSR1
"""From the supervisor to an API process: the first one starts the drain, a second one ends it."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a child tells its parent: it is ready (with figures for the log), or it cannot start (for the user).

    `beat` alone says: I am still here. A child that beats and then falls silent is stopped or wedged.
    """

    ready: bool = False
    beat: bool = False
    error: str | None = None
    memory: dict[str, int] = {}
    start_s: dict[str, float] = {}
    decisions: list[tuple[str, str, str, str]] = []


@dataclass
class Child:
    """A started process. `status` is our end of the pair; closing it tells the child to end."""

    name: str
    process: subprocess.Popen[bytes]
    status: socket.socket
    pending: bytearray = field(default_factory=bytearray)

    def reports(self) -> list[Report]:
        """The reports that have arrived; does not block."""
        while True:
            try:
                data = self.status.recv(65536)
            except (BlockingIOError, ConnectionError):
                break
            if not data:
                break
            self.pending += data
        *lines, rest = bytes(self.pending).split(b"\n")
        self.pending = bytearray(rest)
        return [msgspec.json.decode(line, type=Report) for line in lines]


def spawn(
    name: str,
    module: str,
    *arguments: str,
    pass_fds: tuple[int, ...] = (),
    die_with_thread: bool,
    environment: dict[str, str] | None = None,
) -> Child:
    """Starts `python -m module`. `die_with_thread` kills it with the thread that called this (never a passing one)."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", module, *arguments, "--status-fd", str(theirs.fileno())]
    if die_with_thread:
        command += ["--parent", str(os.getpid())]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *pass_fds),
            env=env.child_environment(**_NO_KEYS, **(environment or {})),
        )
    finally:
        theirs.close()
    ours.setblocking(False)
    return Child(name=name, process=process, status=ours)


def report(status: socket.socket, message: Report) -> None:
    """Sends a report to the parent; one that is gone is no error here."""
    try:
        status.sendall(msgspec.json.encode(message) + b"\n")
    except OSError:
        return


def tie_to_parent(parent: int | None) -> None:
    """Asks the kernel to kill this process with its parent; ends it if the parent is already gone."""
    # Ctrl-C and service managers signal the whole group: only the parent acts on it, and tells its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


class RuntimeFolder:
    """A private folder (0700) for sockets and specs; removed by `close`."""

    def __init__(self) -> None:
        base = env.get("HEADRACE_RUNTIME_DIR")
        if base is None:
            self.path = Path(tempfile.mkdtemp(prefix="headrace-"))
        else:
            self.path = Path(base) / f"headrace-{os.getpid()}-{secrets.token_hex(4)}"
            self.path.mkdir(mode=0o700, parents=True)

    def socket_path(self, index: int) -> str:
        """Where engine core `index` listens."""
        return str(self.path / f"core-{index}.sock")

    def write_spec(self, name: str, spec: msgspec.Struct) -> str:
        """Writes a spec for a child (0600); returns its path."""
        path = self.path / f"{name}.json"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(spec))
        return str(path)

    def close(self) -> None:
        """Removes the folder and what is in it."""
        if not self.path.exists():
            return
        for path in sorted(self.path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        self.path.rmdir()


def device_facts(wanted: str) -> DeviceFacts:
    """Facts about the devices of the kind the user wants ("auto": CUDA where there is one)."""
    cuda = _cuda_facts() if wanted != "cpu" else None
    if cuda is not None:
        return cuda
    memory = psutil.virtual_memory()
    return DeviceFacts(
        kind="cpu",
        count=1,
        total_bytes=memory.total,
        free_bytes=min(memory.available, _cgroup_free()),
        cores=usable_cores(),
    )


def usable_cores() -> int:
    """Cores this process may use: its affinity, bounded by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_CPU.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _cgroup_free() -> int:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)


def _cuda_facts() -> DeviceFacts | None:
    """Asks the driver library directly: a hundred milliseconds, where importing torch takes seconds."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    visible = _visible(count.value)
    if not visible:
        return None
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    nvml.nvmlDeviceGetHandleByIndex_v2(visible[0], ctypes.byref(handle))
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    total, free, _ = memory
    return DeviceFacts(
        kind="cuda",
        count=len(visible),
        total_bytes=total,
        free_bytes=free,
        cores=usable_cores(),
    )


def _visible(count: int) -> list[int]:
    """Indices of the devices CUDA_VISIBLE_DEVICES leaves; ids that are no numbers count as the first ones."""
    given = env.child_environment().get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return list(range(count))
    names = [name.strip() for name in given.split(",") if name.strip()]
    indices = [int(name) if name.isdigit() else at for at, name in enumerate(names)]
    return [index for index in indices if index < count]
