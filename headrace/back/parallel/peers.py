"""Memory of the other ranks of one machine, mapped into this process: CUDA's inter-process handles.

Plain allocations and plain peer access only. Multicast addresses (NVLS) are never made: a fault in
them may put the GPUs of a shared host out of service.
"""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist

from headrace.back.parallel.mesh import Axis

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1


class PeersUnavailable(Exception):
    """The ranks cannot reach each other's memory; says why."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class PeerMemory:
    """`num_bytes` of zeros on every rank's device. `addresses[r]` is where this process sees rank
    r's; it lasts as long as the process. All ranks of the axis make it together; PeersUnavailable
    is raised on all of them or none."""

    def __init__(self, axis: Axis, device: torch.device, num_bytes: int) -> None:
        failure, own, handle = "", 0, bytes(HANDLE_BYTES)
        try:
            own, handle = _allocate(num_bytes)
        except (OSError, PeersUnavailable) as error:
            failure = str(error)
        handles = _gather(handle, axis, device)
        addresses = []
        for rank, theirs in enumerate(handles):
            try:
                addresses.append(own if rank == axis.rank or failure else _open(theirs))
            except PeersUnavailable as error:
                failure = f"rank {rank}: {error}"
        agree(axis, device, failure)
        self.addresses = tuple(addresses)


def agree(axis: Axis, device: torch.device, failure: str) -> None:
    """Raises PeersUnavailable on every rank if `failure` is not empty on one."""
    failed = torch.tensor([int(bool(failure))], device=device)
    dist.all_reduce(failed, group=axis.group)
    if int(failed.item()):
        raise PeersUnavailable(failure or "another rank failed")


def _gather(handle: bytes, axis: Axis, device: torch.device) -> list[bytes]:
    mine = torch.frombuffer(bytearray(handle), dtype=torch.uint8).to(device)
    every = [torch.empty_like(mine) for _ in range(axis.size)]
    dist.all_gather(every, mine, group=axis.group)
    return [bytes(one.cpu().tolist()) for one in every]


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise PeersUnavailable(f"{call}: {(text.value or b'unknown error').decode()}")


def _allocate(num_bytes: int) -> tuple[int, bytes]:
    """Address and handle of zeroed memory on the current device."""
    driver, address, handle = _driver(), ctypes.c_uint64(), _Handle()
    _check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)), "cuMemAlloc")
    _check(driver.cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)), "cuMemset")
    torch.cuda.synchronize()
    _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), address), "cuIpcGetMemHandle")
    return address.value, ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def _open(handle: bytes) -> int:
    """Where another process's memory lies in this one."""
    address, theirs = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
    driver = _driver()
    driver.cuIpcOpenMemHandle_v2.argtypes = (
        ctypes.POINTER(ctypes.c_uint64),
        _Handle,
        ctypes.c_uint,
    )
    status = driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), theirs, LAZY_PEER_ACCESS)
    _check(status, "cuIpcOpenMemHandle")
    return address.value
