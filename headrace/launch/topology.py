"""Facts about this machine, the runtime folder, and how a child process is started and tied to its
parent.

A child gets one end of a socket pair: it reports over it as JSON lines (`Report`); when the parent
dies, the end of file on it tells the child to end too. PR_SET_PDEATHSIG does the same for a child
that hangs.
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
from headrace.back.platforms.facts import visible_devices, visible_environment
from headrace.back.platforms.foreign import devices_of, is_foreign
from headrace.back.platforms.placement import place
from headrace.base import env
from headrace.base.config.device_options import DeviceOptions
from headrace.base.config.resolved import Resolved
from headrace.base.errors import ConfigError
from headrace.launch.prestart import start, status_arguments, take_prestarted
from headrace.launch.resolve_device import MachineFacts, most_replicas

PR_SET_PDEATHSIG = 1
MAX_SOCKET_PATH_BYTES = 107

HEARTBEAT_S = 1.0
"""Longest pause between the heartbeats of a child."""

DRAIN_SIGNAL = signal.SIGUSR1
"""From the supervisor to an API process: the first one starts the drain, a second one ends it."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a child reports to its parent: it is ready (with figures for the log), or cannot start
    (with the error for the user).

    `heartbeat`: the process runs; a child that stops sending them is stopped or hung. `log_level`:
    an administrator changed it for every process; `stop`: end the server as SIGTERM does. `paused`:
    the mode in which an administrator paused this core, "" once resumed; `asleep` goes with it.
    `replicas`: so many engine cores are wanted from now on.
    """

    ready: bool = False
    heartbeat: bool = False
    log_level: str = ""
    stop: bool = False
    paused: str | None = None
    asleep: bool = False
    replicas: int = 0
    error: str | None = None
    memory: dict[str, int] = {}
    start_s: dict[str, float] = {}
    decisions: list[tuple[str, str, str, str]] = []

    @property
    def tells_of_start(self) -> bool:
        """Whether the child is ready, or cannot start; else it goes on as it was."""
        others = self.heartbeat or self.log_level or self.stop or self.replicas
        return not others and self.paused is None


@dataclass
class ChildProcess:
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
    """GPU variables of core `index`: each replica sees its share, in the user's order."""
    device = resolved.engine.device
    if device.device != "cuda" or resolved.max_replicas == 1:
        return {}
    begin, end = index * device.world_size, (index + 1) * device.world_size
    stated = visible_devices(env.stated("CUDA_VISIBLE_DEVICES"), env.stated("HIP_VISIBLE_DEVICES"))
    visible = tuple(str(number) for number in range(end)) if stated is None else stated
    return visible_environment(visible[begin:end])


def spawn(
    name: str,
    module: str,
    *arguments: str,
    pass_fds: tuple[int, ...] = (),
    die_with_thread: bool,
    environment: dict[str, str] | None = None,
) -> ChildProcess:
    """Starts `python -m module`, or takes the prestarted one. `die_with_thread` kills it with the
    calling thread, which must outlive it."""
    if die_with_thread:
        arguments = (*arguments, "--parent", str(os.getpid()))
    prestarted = take_prestarted(module, arguments, plain=not (pass_fds or environment))
    if prestarted is not None:
        process, ours = prestarted.process, prestarted.status
    else:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = (*arguments, *status_arguments(theirs.fileno()))
            process = start(
                module, *arguments, status=theirs, pass_fds=pass_fds, environment=environment
            )
    ours.setblocking(False)
    return ChildProcess(name=name, process=process, status=ours)


def report(status: socket.socket, message: Report, *, wait: bool = True) -> None:
    """Sends a report to the parent; one that is gone is no error here. Without `wait` it is dropped
    if the socket has no space for it (reports of this size are taken whole or not at all)."""
    data = msgspec.json.encode(message) + b"\n"
    try:
        if wait:
            status.sendall(data)
        else:
            status.send(data, socket.MSG_DONTWAIT)
    except OSError:
        return


def tie_to_parent(parent: int | None) -> None:
    """Has the kernel kill this process with its parent; ends it if the parent is gone."""
    # Ctrl-C and service managers signal the whole group: only the parent acts on it, and tells its
    # children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


class RuntimeFolder:
    """A private folder (0700) for sockets and specs; removed by `close`.

    What cleans temporary folders may empty it while the server runs: `restore` writes again what
    children that start later need. Cores make their sockets again themselves.
    """

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._specs: dict[Path, bytes] = {}
        self._elsewhere: list[Path] = []
        self.path = self._new()

    @staticmethod
    def _new() -> Path:
        base = env.get("HEADRACE_RUNTIME_DIR")
        if base is None:
            return Path(tempfile.mkdtemp(prefix="headrace-"))
        path = Path(base) / f"headrace-{os.getpid()}-{secrets.token_hex(4)}"
        if len(os.fsencode(_socket_path(path, 999))) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"HEADRACE_RUNTIME_DIR={base}: too long for Unix sockets, whose paths have at most "
                f"{MAX_SOCKET_PATH_BYTES} bytes; name a shorter folder",
                field="HEADRACE_RUNTIME_DIR",
            )
        try:
            path.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise ConfigError(
                f"HEADRACE_RUNTIME_DIR={base}: cannot make a folder there: {error.strerror}",
                field="HEADRACE_RUNTIME_DIR",
            ) from error
        return path

    def socket_path(self, index: int) -> str:
        """Where engine core `index` listens."""
        return _socket_path(self.path, index)

    def make(self, name: str) -> Path:
        """A folder in it."""
        path = self.path / name
        path.mkdir(mode=0o700)
        self._folders.append(path)
        return path

    def write_spec(self, name: str, spec: msgspec.Struct) -> str:
        """Writes a spec for a child (0600); returns its path."""
        path = self.path / f"{name}.json"
        self._specs[path] = msgspec.json.encode(spec)
        _write_private(path, self._specs[path])
        return str(path)

    def restore(self) -> bool:
        """Writes again what is missing; whether anything was. A core's spec is the one it was
        started with, whatever weights it has swapped in since."""
        missing = [path for path in (*self._folders, *self._specs) if not path.exists()]
        if not missing:
            return False
        self.path.mkdir(mode=0o700, exist_ok=True)
        for path in missing:
            if path in self._specs:
                _write_private(path, self._specs[path])
            else:
                path.mkdir(mode=0o700)
        return True

    def also_remove(self, path: Path) -> None:
        """`close` removes this socket too, which a core makes in a folder of the user's."""
        self._elsewhere.append(path)

    def close(self) -> None:
        """Removes the folder and what is in it, and sockets elsewhere."""
        for path in self._elsewhere:
            if path.is_socket():
                path.unlink(missing_ok=True)
        if not self.path.exists():
            return
        for path in sorted(self.path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        self.path.rmdir()


def _socket_path(folder: Path, index: int) -> str:
    return str(folder / f"core-{index}.sock")


def _write_private(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def device_facts(wanted: str) -> MachineFacts:
    """Facts about the devices of the kind the user wants ("auto": CUDA where there is one)."""
    if is_foreign(wanted):
        return _foreign_facts(wanted)
    devices = detect()
    gpus = [one for one in devices if one.torch_kind == "cuda"] if wanted != "cpu" else []
    cpu = next(one for one in devices if one.kind == "cpu")
    first = max(gpus, key=lambda gpu: gpu.free_bytes) if gpus else cpu
    placed = place()
    return MachineFacts(
        kind=first.torch_kind,
        count=len(gpus) or 1,
        total_bytes=first.memory_bytes,
        free_bytes=first.free_bytes,
        cores=cpu.cores,
        usable_cpus=tuple(sorted(os.sched_getaffinity(0))),
        cpus=placed.kernels,
        other_cpus=placed.others,
        nodes=placed.nodes,
        placed=placed.why,
    )


def _foreign_facts(kind: str) -> MachineFacts:
    """Of the devices that a package brings."""
    devices, cpu = devices_of(kind), next(one for one in detect() if one.kind == "cpu")
    return MachineFacts(
        kind=kind,
        count=len(devices),
        total_bytes=devices[0].memory_bytes,
        free_bytes=devices[0].free_bytes,
        cores=cpu.cores,
        usable_cpus=tuple(sorted(os.sched_getaffinity(0))),
    )


def planned_facts(name: str, options: DeviceOptions) -> MachineFacts:
    """Facts about as many GPUs of a known kind as the options ask for, each with all its memory
    free. PyTorch calls AMD's "cuda" too."""
    fake = FAKES[name]
    return MachineFacts(
        kind="cuda",
        count=options.tensor_parallel * options.pipeline_parallel * most_replicas(options),
        total_bytes=fake.memory_bytes,
        free_bytes=fake.free_bytes,
        cores=1,
    )
