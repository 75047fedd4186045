"""Loads the native library and binds its functions for this CPU. No tensors here: addresses, sizes
and strides.

ctypes releases the GIL for the length of a call, so kernels of two threads run side by side (the
pool serves one of them, the other runs on its own thread). Loading never builds and never fails a
start: `load()` answers a library or the reason there is none, and the ops keep their PyTorch
reference.
"""

from __future__ import annotations

import ctypes
import functools
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.back.kernels.native import build
from headrace.base import env
from headrace.base.errors import ConfigError, StartError

POINTER, INT64, INT32, FLOAT, DOUBLE = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_double,
)
_REFUSALS = {1: "dtypes", 2: "shape", 3: "an index out of range", 4: "memory for its workspace"}


class NativeError(AssertionError):
    """A kernel refused its arguments: its wrapper's `supports` let through what the kernel cannot
    do."""


class OtherCpu(StartError):
    """The library holds no instruction set that this CPU runs."""


class CallRecorder(Protocol):
    """What notes the calls of one thread (cpu_graph.py)."""

    thread: int

    def note(self, name: str, kernel: int, types: Sequence[type], arguments: Sequence[Any]) -> None:
        """Takes one call down that has been carried out."""
        ...


class NativeLibrary:
    """The loaded library. `isa` names the instruction set its kernels are bound for."""

    def __init__(self, path: Path, *, isa: str | None = None) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        self._dll.hr_source_digest.restype = ctypes.c_char_p
        self._dll.hr_cpu_isas.restype = ctypes.c_uint32
        digest = self._dll.hr_source_digest().decode()
        if digest != build.source_digest():
            raise StartError(f"{path} was built from other sources ({digest}): build it again")
        self.isas = self._runnable()
        if not self.isas:
            raise OtherCpu(f"{path} holds kernels of another CPU; run: {build.COMMAND}")
        if isa is not None and isa not in self.isas:
            raise ConfigError(
                f"HEADRACE_ISA={isa}: this CPU and {path.name} have {', '.join(self.isas)} (this "
                f"builds all that the compiler knows: {build.COMMAND})",
                field="HEADRACE_ISA",
            )
        self.isa = isa or self.isas[-1]
        self.recorder: CallRecorder | None = None
        self.replay = self._dll.hr_replay
        self.replay.argtypes = (POINTER, INT64, ctypes.POINTER(INT32))
        self.replay.restype = INT64

    def _runnable(self) -> tuple[str, ...]:
        """The instruction sets that this CPU runs and the library holds, worst first."""
        bits = self._dll.hr_cpu_isas()
        names = [isa.name for i, isa in enumerate(build.ISAS) if bits >> i & 1]
        return tuple(name for name in names if hasattr(self._dll, f"hr_linear_{name}"))

    def _kernels(self, name: str) -> tuple[Any, int]:
        """The kernel of the best instruction set up to `isa` that has one of its own, and the
        address of its form that takes its arguments in slots."""
        for isa in reversed(self.isas[: self.isas.index(self.isa) + 1]):
            if (kernel := getattr(self._dll, f"hr_{name}_{isa}", None)) is not None:
                slots = ctypes.cast(getattr(self._dll, f"hr_slots_{name}_{isa}"), POINTER).value
                assert slots is not None
                return kernel, slots
        raise AssertionError(f"no kernel {name} in {self.path}")

    def has(self, name: str) -> bool:
        """Whether there is a kernel `name` for an instruction set up to `isa`; most are there for
        all."""
        usable = self.isas[: self.isas.index(self.isa) + 1]
        return any(hasattr(self._dll, f"hr_{name}_{isa}") for isa in usable)

    def bind(self, name: str, *argument_types: type) -> Callable[..., None]:
        """The kernel `name` as a function of plain numbers; it raises NativeError when the kernel
        refuses."""
        kernel, slots = self._kernels(name)
        kernel.argtypes, kernel.restype = argument_types, ctypes.c_int32

        def call(*arguments: object) -> None:
            status = kernel(*arguments)
            if status:
                raise NativeError(
                    f"native {name} refuses {_REFUSALS.get(status, status)}: {arguments}"
                )
            recorder = self.recorder
            if recorder is not None and recorder.thread == threading.get_ident():
                recorder.note(name, slots, argument_types, arguments)

        return call

    @property
    def threads(self) -> int:
        """Threads a call may use, the calling one included."""
        return int(self._dll.hr_pool_size())

    def set_threads(self, threads: int, cpus: Sequence[int] | None = None) -> int:
        """Sets the width of the pool and returns the width reached. cpus: the core of each thread,
        the caller's first (it is not moved)."""
        helpers = (ctypes.c_int32 * (threads - 1))(*cpus[1:threads]) if cpus else None
        return int(self._dll.hr_pool_resize(threads, helpers))

    def count_chunks(self, chunks: int) -> list[int]:
        """How often each of `chunks` chunks ran: the pool's self-test (all ones)."""
        hits = (ctypes.c_int32 * chunks)()
        self._dll.hr_pool_count(hits, ctypes.c_int64(chunks))
        return list(hits)


@functools.cache
def load() -> NativeLibrary | str:
    """The library for this CPU, or the reason why there is none (a sentence for the decisions
    printed at start)."""
    chosen = env.get("HEADRACE_NATIVE") or "1"
    if chosen == "0":
        return "native kernels are turned off (HEADRACE_NATIVE=0)"
    isa = _known_isa(env.get("HEADRACE_ISA"))
    if chosen != "1":
        return _named_library(Path(chosen), isa)
    reason = f"native kernels are not built; run: {build.COMMAND}"
    for folder in (build.FOLDER, _cache_folder()):
        libraries = folder.glob(f"libheadrace_native-{build.source_digest()}-*.so")
        all_sets_first = sorted(libraries, key=lambda path: (len(path.name), path.name))
        for path in all_sets_first:
            if unsafe := _unsafe(path):
                return unsafe
            try:
                return NativeLibrary(path, isa=isa)
            except OtherCpu as error:
                reason = error.message
    return reason


def _known_isa(name: str | None) -> str | None:
    known = [isa.name for isa in build.ISAS]
    if name is not None and name not in known:
        raise ConfigError(
            f"HEADRACE_ISA={name}: no such instruction set; it must be one of {', '.join(known)}",
            field="HEADRACE_ISA",
        )
    return name


def _named_library(path: Path, isa: str | None) -> NativeLibrary:
    """The library that HEADRACE_NATIVE names: one that cannot be used is an error, not a reason."""
    try:
        return NativeLibrary(path, isa=isa)
    except ConfigError:
        raise
    except (OSError, AttributeError, StartError) as error:
        raise ConfigError(
            f"HEADRACE_NATIVE={path}: {error}; it must be 0 (off), 1 (the library built here) or "
            "the path of a library built from these sources",
            field="HEADRACE_NATIVE",
        ) from error


def use_threads(threads: int, cpus: Sequence[int] | None = None) -> None:
    """Gives the native kernels of this process `threads` threads (1 until this is called); see
    `set_threads`. Without a library there is nothing to do."""
    if isinstance(library := load(), NativeLibrary):
        library.set_threads(threads, cpus)


def _cache_folder() -> Path:
    return env.cache_dir() / "native"


def _unsafe(path: Path) -> str | None:
    """Why a library must not be loaded: someone other than its owner, us or root, could have
    written it."""
    for place in (path, path.parent):
        facts = place.stat()
        if facts.st_uid not in (0, os.getuid()):
            return f"{place} belongs to another user (uid {facts.st_uid}): native kernels are not loaded"
        if facts.st_mode & stat.S_IWOTH:
            return f"{place} is writable by everyone: native kernels are not loaded"
    return None
