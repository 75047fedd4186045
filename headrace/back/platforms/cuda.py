"""Facts about NVIDIA GPUs through NVML: no CUDA context is made, so forking and later
CUDA_VISIBLE_DEVICES still work. NVML comes with the driver; where it is absent there are
no such devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.back.platforms.facts import Capability, DeviceFacts, among_visible

LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")


class _Memory(ctypes.Structure):
    """nvmlMemory_t: three 64-bit counts of bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def cuda_facts(visible: tuple[str, ...] | None = None) -> tuple[DeviceFacts, ...]:
    """The NVIDIA GPUs among `visible` (indices or UUIDs, None: all), in that order; empty without a
    driver."""
    with _nvml() as nvml:
        if nvml is None:
            return ()
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        devices = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                devices.append(_facts(nvml, handle, index))
    return among_visible(devices, visible)


def _facts(nvml: ctypes.CDLL, handle: ctypes.c_void_p, index: int) -> DeviceFacts:
    memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return DeviceFacts(
        kind="cuda",
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID, handle),
        name=_text(nvml.nvmlDeviceGetName, handle),
        arch=f"sm_{major.value}{minor.value}",
        capability=Capability(major.value, minor.value),
        memory_bytes=memory.total,
        free_bytes=memory.free,
    )


def _text(ask: ctypes._CFuncPtr, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    ask(handle, buffer, len(buffer))
    return buffer.value.decode(errors="replace")


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """The initialised library, None if there is none or the driver does not answer."""
    for name in LIBRARIES:
        try:
            nvml = ctypes.CDLL(name)
        except OSError:
            continue
        if nvml.nvmlInit_v2() == 0:
            try:
                yield nvml
            finally:
                nvml.nvmlShutdown()
            return
    yield None
