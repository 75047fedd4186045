"""Steps recorded as a flat list of native calls and replayed by one: what CUDA graphs are to a GPU.

While a `Recorder` is open, every native call of its thread is carried out and noted with its
arguments; memory that is asked for comes from an `Arena`, which keeps it. Replayed, the calls find
their inputs and leave their outputs at the same addresses. What is no native call would be missing
in the replay: any operation of torch that computes something makes the recording unusable, and is
named.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.back.kernels.native.library import FLOAT, NativeError, NativeLibrary

_FORMATS = {ctypes.c_void_p: "Q", ctypes.c_int64: "q", ctypes.c_int32: "q", ctypes.c_double: "d"}
_PAGE = 4096


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
