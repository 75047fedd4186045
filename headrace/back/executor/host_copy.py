"""Weights out of a device and back without a load: what a model holds there waits in host memory.

Weights live in tensors that layers, closures of bound kernels and descriptors share, so it is the
storages that move. A
storage without memory keeps its identity: with memory again, everything over it is valid, only at
another address. What has noted an address (recorded graphs, lists of native calls, the runner's own
tensors) has to be made anew.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from headrace.back.layers.reachable import bytes_of, room_of, tensors_of
from headrace.back.platforms import huge_pages

log = logging.getLogger(__name__)


class HostCopy:
    """What `root` holds on `device`, in host memory since this was made and until `back`.

    Invariant: between the two the storages have no memory, and nobody may read them. Storages that
    cannot be resized, because the memory is somebody else's, stay where they are.
    """

    def __init__(self, root: object, device: torch.device) -> None:
        storage_of = {}
        for tensor in tensors_of(root):
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.nbytes() and storage.resizable():
                storage_of[storage.data_ptr()] = storage
        self._device = device
        self._storages = [(storage, storage.nbytes()) for storage in storage_of.values()]
        self.num_bytes = sum(num_bytes for _, num_bytes in self._storages)
        self._copy = torch.empty(self._room, dtype=torch.uint8)
        huge_pages.advise(self._copy.data_ptr(), self._room)
        if device.type == "cuda":  # to be pinned, every page has to be there
            huge_pages.populate(self._copy.data_ptr(), self._room)
        self._unpin = _pinned(self, self._copy) if device.type == "cuda" else _nothing
        for whole, part in self._pairs():
            part.copy_(whole, non_blocking=True)
        self._wait()
        for storage, _ in self._storages:
            storage.resize_(0)

    def back(self) -> None:
        """Everything on the device again; the copy is given up."""
        torch.empty(self._room, dtype=torch.uint8, device=self._device)  # one block for all
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
        for whole, part in self._pairs():
            whole.copy_(part, non_blocking=True)
        self._wait()
        # to unpin takes longer than the copies took, and nobody waits for it
        threading.Thread(target=_give_up, args=(self._copy, self._unpin), name="unpin").start()
        self._storages.clear()
        self._copy = torch.empty(0, dtype=torch.uint8)

    @property
    def _room(self) -> int:
        return sum(room_of(size) for _, size in self._storages)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each storage as bytes, and its place in the copy."""
        start = 0
        for storage, num_bytes in self._storages:
            whole = bytes_of(storage, self._device, num_bytes)
            yield whole, self._copy[start : start + num_bytes]
            start += room_of(num_bytes)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _give_up(memory: torch.Tensor, unpin: Callable[[], object]) -> None:
    """`memory` goes with the thread's arguments, behind this."""
    unpin()


def _nothing() -> None:
    """Plain memory needs no end."""


def _pinned(owner: HostCopy, memory: torch.Tensor) -> Callable[[], object]:
    """Registers plain memory with the driver until the result is called or `owner` is gone: torch's
    own pinned memory comes in powers of two and is never given back."""
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status):
        log.warning("host memory cannot be pinned (%s): weights are copied more slowly", status)
        return _nothing
    return weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr())
