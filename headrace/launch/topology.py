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
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headrace.back.platforms.detect import FAKES, detect
from headrace.back.platforms.facts import visible_devices
from headrace.back.platforms.placement import place
from headrace.base import env
from headrace.base.config.resolved import Resolved
from headrace.base.config.tree import DeviceOptions
from headrace.launch.early import start, take, told
from headrace.launch.resolve import DeviceFacts

PR_SET_PDEATHSIG = 1

DRAIN_SIGNAL = signal.SIGUSR1
"""From the supervisor to an API process: the first one starts the drain, a second one ends it."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a child tells its parent: it is ready (with figures for the log), or it cannot start (for the user).

    `beat` alone says: I am still here. A child that beats and then falls silent is stopped or wedged. `log_level`: an
    administrator wants every process to log at it; `stop`: to end the server as SIGTERM does. `paused`: how an
    administrator has paused this core, "" once it was resumed; `asleep` goes with it.
    """

    ready: bool = False
    beat: bool = False
    log_level: str = ""
    stop: bool = False
    paused: str | None = None
    asleep: bool = False
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


def core_environment(resolved: Resolved, index: int) -> dict[str, str]:
    """What core `index` is told of the GPUs: each of several replicas sees its share, in the user's order."""
    device = resolved.engine.device
    if device.device != "cuda" or resolved.replicas == 1:
        return {}
    begin, end = index * device.tensor_parallel, (index + 1) * device.tensor_parallel
    given = visible_devices(env.get("CUDA_VISIBLE_DEVICES"), env.get("HIP_VISIBLE_DEVICES"))
    seen = given or tuple(str(number) for number in range(end))
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[begin:end])}


def spawn(
    name: str,
    module: str,
    *arguments: str,
    pass_fds: tuple[int, ...] = (),
    die_with_thread: bool,
    environment: dict[str, str] | None = None,
) -> Child:
    """Starts `python -m module`, or takes the one that was started early. `die_with_thread` kills it with the thread
    that called this (never a passing one)."""
    if die_with_thread:
        arguments = (*arguments, "--parent", str(os.getpid()))
    early = take(module, arguments, plain=not (pass_fds or environment))
    if early is not None:
        process, ours = early.process, early.status
    else:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = (*arguments, *told(theirs.fileno()))
            process = start(
                module, *arguments, status=theirs, pass_fds=pass_fds, environment=environment
            )
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
    found = detect()
    gpus = [one for one in found if one.kind == "cuda"] if wanted != "cpu" else []
    cpu = next(one for one in found if one.kind == "cpu")
    first = max(gpus, key=lambda gpu: gpu.free_bytes) if gpus else cpu
    placed = place()
    return DeviceFacts(
        kind=first.kind,
        count=len(gpus) or 1,
        total_bytes=first.memory_bytes,
        free_bytes=first.free_bytes,
        cores=cpu.cores,
        cpus=placed.kernels,
        other_cpus=placed.others,
        nodes=placed.nodes,
        placed=placed.why,
    )


def planned_facts(name: str, given: DeviceOptions) -> DeviceFacts:
    """Facts about as many GPUs of a known kind as the user's options ask for, each with all its memory free. "cuda" is
    what PyTorch calls AMD's too."""
    fake = FAKES[name]
    return DeviceFacts(
        kind="cuda",
        count=given.tensor_parallel * given.replicas,
        total_bytes=fake.memory_bytes,
        free_bytes=fake.free_bytes,
        cores=1,
    )
