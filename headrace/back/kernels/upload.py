"""Between host and device without waiting: the two copies that are allowed on the hot path.

Pageable memory would make the host wait for the stream; pinned memory comes from torch's caching
allocator, which gives a block out again only once the copy that used it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`; on the CPU a writable array is shared, not copied."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def stacked(arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Arrays of one shape and type as one on `device`, copied once on the way."""
    if device.type == "cpu":
        return torch.from_numpy(np.stack(arrays))
    shape, dtype = (len(arrays), *arrays[0].shape), torch.from_numpy(arrays[0][:0].copy()).dtype
    pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
    np.stack(arrays, out=pinned.numpy())
    return pinned.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host. From a device its values are there once the current stream has come
    to this point: the caller records an event afterwards and reads behind it. On the CPU it is a
    copy too: what a replayed step leaves is overwritten by the next one, which may be launched
    before the result is read."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def host_buffer(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zeros int32 on the host, which a copy to or from the device does not wait for."""
    return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")


class KeptCopies:
    """What a pass of an encoder copies to the device, of which nothing but the sizes of its inputs
    decides the values. The first pass writes it; while the pass is recorded for inputs of the same
    sizes, the same tensors are found again, in the same order, and nothing is copied."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._named: dict[Hashable, torch.Tensor] = {}
        self._held: list[torch.Tensor] = []
        self._at: int | None = None

    @contextmanager
    def active(self, *, again: bool) -> Iterator[None]:
        """While the pass runs: the first time, or `again`."""
        self._at = 0 if again else None
        token = _KEPT.set(self)
        try:
            yield
        finally:
            _KEPT.reset(token)
        left = 0 if self._at is None else len(self._tensors) - self._at
        assert not left, f"{left} of {len(self._tensors)} copies were not asked for again"

    def copied(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The next tensor of the pass."""
        if self._at is None:
            self._tensors.append(make())
            return self._tensors[-1]
        self._at += 1
        return self._tensors[self._at - 1]

    def named(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor of this key, made once."""
        if key not in self._named:
            self._named[key] = make()
        return self._named[key]

    def hold(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor that its owner may replace by another."""
        self._held.append(tensor)


_KEPT: ContextVar[KeptCopies | None] = ContextVar("kept copies", default=None)


def kept_copies() -> KeptCopies | None:
    """That of the pass of an encoder that runs, if it is one that is recorded."""
    return _KEPT.get()


def planned(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """`to_device` for encoders: values that depend on the sizes of their inputs alone."""

    def copy() -> torch.Tensor:
        return to_device(values.numpy() if isinstance(values, torch.Tensor) else values, device)

    on = _KEPT.get()
    return copy() if on is None else on.copied(copy)


def held(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which a recorded pass reads and its owner may replace by another."""
    on = _KEPT.get()
    if on is not None:
        on.hold(tensor)
    return tensor
