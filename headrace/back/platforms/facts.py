"""What is known about a device without touching it: plain data, for real devices and for fakes
alike.

Nothing in this package imports torch, initialises a driver context or runs a kernel: planning,
`doctor` and tests of kernel selection work on a machine without the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.base.errors import ConfigError


class Capability(NamedTuple):
    """Architecture version: NVIDIA's compute capability, or AMD's gfx version (`stepping` is AMD's
    last digit)."""

    major: int
    minor: int
    stepping: int = 0


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One device.

    kind            "cpu", "cuda" or "rocm"
    index           the driver's number of it, 0 for the CPU
    uuid            the driver's name of it, "GPU-...", which no order changes; "" if unknown
    name            as its maker calls it
    arch            "x86_64", "aarch64", "sm_90", "gfx942"
    capability      None for CPUs
    memory_bytes    in all; free_bytes: at the moment of asking
    cores           CPU cores this process may use, streaming multiprocessors or compute units; 0 if
                    unknown
    features        instruction sets of a CPU ("avx2", "avx512f", "avx512_bf16", "amx_bf16" ...);
                    empty for GPUs
    memory_gb_s     nominal memory bandwidth, for rooflines; None if unknown
    bf16_tflops     nominal dense bf16 rate, for rooflines; None if unknown
    link_gb_s       nominal bandwidth of its link to host memory, one way; None if unknown
    """

    kind: str
    index: int = 0
    uuid: str = ""
    name: str
    arch: str
    capability: Capability | None = None
    memory_bytes: int
    free_bytes: int
    cores: int = 0
    features: frozenset[str] = frozenset()
    memory_gb_s: float | None = None
    bf16_tflops: float | None = None
    link_gb_s: float | None = None

    @property
    def torch_kind(self) -> str:
        """PyTorch's name of the kind: it calls AMD's GPUs "cuda" too."""
        return "cuda" if self.kind == "rocm" else self.kind


_GFX = re.compile(r"gfx([1-9]\d?)([0-9a-f])([0-9a-f])(?::.*)?")


def parse_gfx(name: str) -> Capability:
    """gfx90a -> (9, 0, 10), gfx942 -> (9, 4, 2), gfx1100 -> (11, 0, 0): read from the right as HIP
    does, feature flags after a colon dropped."""
    match = _GFX.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is no AMD architecture; it must look like gfx942 or gfx1100")
    major, minor, stepping = match.groups()
    return Capability(int(major), int(minor, 16), int(stepping, 16))


def visible_devices(cuda: str | None, hip: str | None) -> tuple[str, ...] | None:
    """The devices a process may use, by index or UUID, from CUDA_VISIBLE_DEVICES and
    HIP_VISIBLE_DEVICES; None: all.

    The two are one setting under two names: either alone counts, and one that is empty counts only
    if the other is not set: then there are no devices, as for the drivers. Two lists that differ
    are a ConfigError.
    """
    first, second = (_split(value) for value in (cuda, hip))
    if first and second and first != second:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={cuda} and HIP_VISIBLE_DEVICES={hip} contradict each other; "
            "set one of them, or both alike",
            field="CUDA_VISIBLE_DEVICES",
        )
    return first or second or (None if first is second is None else ())


def visible_environment(devices: Sequence[str]) -> dict[str, str]:
    """The variables that show a child process these devices (indices or UUIDs) and no others, in
    this order: both names alike, and numbers as NVML counts, by PCI bus."""
    listed = ",".join(devices)
    return {
        "CUDA_VISIBLE_DEVICES": listed,
        "HIP_VISIBLE_DEVICES": listed,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def among_visible(
    devices: Sequence[DeviceFacts], visible: tuple[str, ...] | None
) -> tuple[DeviceFacts, ...]:
    """Those of one driver's devices that `visible` names (index, UUID or the beginning of one;
    None: all), in its order. As for the drivers, the first name that is not there ends the list."""
    if visible is None:
        return tuple(devices)
    shown: list[DeviceFacts] = []
    for name in visible:
        match = [one for one in devices if _names(name, one)]
        if not match:
            break
        shown.append(match[0])
    return tuple(shown)


def freest(devices: Iterable[DeviceFacts], uuids: Sequence[str]) -> int:
    """The position in `uuids` of the GPU with the most free memory: a runtime's own order of its
    devices need not be the driver's. 0 where no device is known by its UUID."""
    free_bytes = {_bare(one.uuid): one.free_bytes for one in devices if one.uuid}
    free = [free_bytes.get(_bare(uuid), -1) for uuid in uuids]
    return free.index(max(free)) if free else 0


def _names(name: str, device: DeviceFacts) -> bool:
    if name.isdigit():
        return int(name) == device.index
    return bool(device.uuid) and len(name) > 4 and _bare(device.uuid).startswith(_bare(name))


def _bare(uuid: str) -> str:
    """A UUID without the prefix that NVML and HIP write and PyTorch does not."""
    return uuid.lower().removeprefix("gpu-")


def _split(value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(part.strip() for part in value.split(",") if part.strip())
