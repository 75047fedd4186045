"""The native library: loaded, its functions bound for this CPU, and recorded as a list that is
replayed.

ctypes releases the GIL for the length of a call, so kernels of two threads run side by side (the
pool serves one of them, the other runs on its own thread). Loading never builds and never fails a
start: `load()` answers a library or the reason there is none, and the ops keep their PyTorch
reference.

A recorded step is to a CPU what a CUDA graph is to a GPU. While a `Recorder` is open, every native
call of its thread is carried out and noted with its arguments; memory that is asked for comes from
an `Arena`, which keeps it. Replayed by one call, the calls find their inputs and leave their
outputs at the same addresses. What is no native call would be missing in the replay: any operation
of torch that computes something makes the recording unusable, and is named.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of the element types."""
_REFUSALS = {1: "dtypes", 2: "shape", 3: "an index out of range", 4: "memory for its workspace"}
_LETTERS = {POINTER: "P", INT64: "q", INT32: "i", FLOAT: "f", DOUBLE: "d"}
"""Of argument types, as kernels tell theirs."""
_FORMATS = {ctypes.c_void_p: "Q", ctypes.c_int64: "q", ctypes.c_int32: "q", ctypes.c_double: "d"}
_PAGE = 4096


class NativeError(AssertionError):
    """A kernel refused its arguments: its wrapper's `supports` let through what the kernel cannot
    do."""


class OtherCpu(StartError):
    """The library holds no instruction set that this CPU runs."""


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
        self.recorder: Recorder | None = None
        self.replay = self._dll.hr_replay
        self.replay.argtypes = (POINTER, INT64, ctypes.POINTER(INT32))
        self.replay.restype = INT64

    def _runnable(self) -> tuple[str, ...]:
        """The instruction sets that this CPU runs and the library holds, worst first."""
        bits = self._dll.hr_cpu_isas()
        names = [isa.name for i, isa in enumerate(build.ISAS) if bits >> i & 1]
        return tuple(name for name in names if hasattr(self._dll, f"hr_linear_{name}"))

    def _kernels(self, name: str) -> tuple[Any, int, str]:
        """The kernel of the best instruction set up to `isa` that has one of its own, the address
        of its form that takes its arguments in slots, and the letters of their types."""
        for isa in reversed(self.isas[: self.isas.index(self.isa) + 1]):
            if (kernel := getattr(self._dll, f"hr_{name}_{isa}", None)) is not None:
                slots = ctypes.cast(getattr(self._dll, f"hr_slots_{name}_{isa}"), POINTER).value
                assert slots is not None
                types_of = getattr(self._dll, f"hr_types_{name}_{isa}")
                types_of.restype = ctypes.c_char_p
                return kernel, slots, types_of().decode()
        raise AssertionError(f"no kernel {name} in {self.path}")

    def has(self, name: str) -> bool:
        """Whether there is a kernel `name` for an instruction set up to `isa`; most are there for
        all."""
        usable = self.isas[: self.isas.index(self.isa) + 1]
        return any(hasattr(self._dll, f"hr_{name}_{isa}") for isa in usable)

    def bind(self, name: str, *argument_types: type) -> Callable[..., None]:
        """The kernel `name` as a function of plain numbers; it raises NativeError when the kernel
        refuses. NativeError here: the kernel takes other types, and would misread them in silence.
        """
        kernel, slots, types = self._kernels(name)
        letters = "".join(_LETTERS[kind] for kind in argument_types)
        if letters != types:
            raise NativeError(f"native {name} takes {types}, its wrapper binds {letters}")
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


def unsupported(device: str, dtype: torch.dtype) -> str | None:
    """The reason that holds for every native kernel: wrong device, no library, unknown element
    type."""
    if device != "cpu":
        return "runs on the CPU only"
    if isinstance(library := load(), str):
        return library
    if dtype not in DTYPES:
        return f"knows {', '.join(str(known) for known in DTYPES)}, not {dtype}"
    return None


def loaded() -> NativeLibrary:
    """The library, after `unsupported` has found it."""
    library = load()
    assert isinstance(library, NativeLibrary), library
    return library


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


class Arena:
    """Memory that recorded steps share: a piece is given again once no tensor uses it, and never
    let go.

    Steps run one after another, so the pieces of one recording may be used by the next one too.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, list[torch.Tensor]] = {}
        self._alone = _users(torch.empty(1))

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor."""
        count = math.prod(shape)
        piece = self._piece(-(-max(count * dtype.itemsize, 1) // _PAGE) * _PAGE)
        return piece.view(dtype)[:count].view(*shape)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(size * len(pieces) for size, pieces in self._pieces.items())

    def _piece(self, num_bytes: int) -> torch.Tensor:
        pieces = self._pieces.setdefault(num_bytes, [])
        for piece in pieces:
            if _users(piece) == self._alone:
                return piece
        pieces.append(torch.empty(num_bytes, dtype=torch.uint8))
        return pieces[-1]


def _users(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without keeping it: valid as long as its arena is."""
    assert tensor.is_contiguous(), tensor.stride()
    raw = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, eq=False)
class CpuGraph:
    """A recorded step. The library's memory behind the addresses is the caller's to keep."""

    library: NativeLibrary
    names: tuple[str, ...]
    calls: Any
    slots: Any

    @property
    def num_bytes(self) -> int:
        """Bytes of the list of calls."""
        return ctypes.sizeof(self.calls) + ctypes.sizeof(self.slots)

    def replay(self) -> None:
        """Runs the calls in order; raises NativeError at the first that refuses."""
        status = ctypes.c_int32()
        at = self.library.replay(ctypes.addressof(self.calls), len(self.names), status)
        if at >= 0:
            raise NativeError(
                f"native {self.names[at]} refuses call {at} of a replay: {status.value}"
            )


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """Records the native calls made while it is entered; see the top of the file. `foreign` names
    the operations of torch that compute something: a graph must not be made then."""

    library: NativeLibrary
    arena: Arena
    foreign: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self._names: list[str] = []
        self._kernels: list[int] = []
        self._slots: list[bytes] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; torch would import its whole compiler to say so (1.4 s and 90
        MB, once)."""
        return False

    def __enter__(self) -> Recorder:
        assert self.library.recorder is None, "one recording at a time"
        self.library.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self.library.recorder = None

    def note(self, name: str, kernel: int, types: Sequence[type], arguments: Sequence[Any]) -> None:
        """One call: `kernel` is the address of its form that takes slots."""
        parts = (_slot(kind, value) for kind, value in zip(types, arguments, strict=True))
        self._names.append(name)
        self._kernels.append(kernel)
        self._slots.append(b"".join(parts))

    def graph(self) -> CpuGraph:
        """What was recorded."""
        assert not self.foreign, self.foreign
        slots = ctypes.create_string_buffer(b"".join(self._slots))
        words, at = [], ctypes.addressof(slots)
        for kernel, mine in zip(self._kernels, self._slots, strict=True):
            words += [kernel, at]
            at += len(mine)
        calls = (ctypes.c_uint64 * len(words))(*words)
        return CpuGraph(self.library, tuple(self._names), calls, slots)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.new_empty.default:
            return self.arena.tensor(args[1], kwargs.get("dtype") or args[0].dtype)
        if func is torch.ops.aten.empty.memory_format:
            return self.arena.tensor(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if not func.is_view:
            self.foreign.append(str(func))
        return func(*args, **kwargs)


def _slot(kind: type, value: Any) -> bytes:
    """An argument as the 8 bytes that the kernel's wrapper takes apart."""
    if kind is FLOAT:
        return struct.pack("<fxxxx", value)
    return struct.pack("<" + _FORMATS[kind], 0 if value is None else value)
