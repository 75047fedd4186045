"""What is known about a device without touching it: plain data, for real devices and for fakes
alike.

Nothing in this package imports torch, initialises a driver context or runs a kernel (PLT-04):
planning, `doctor` and tests of kernel selection work on a machine without the device.
"""

from __future__ import annotations

import re
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
    """

    kind: str
    index: int = 0
    name: str
    arch: str
    capability: Capability | None = None
    memory_bytes: int
    free_bytes: int
    cores: int = 0
    features: frozenset[str] = frozenset()
    memory_gb_s: float | None = None
    bf16_tflops: float | None = None


_GFX = re.compile(r"gfx([1-9]\d?)([0-9a-f])([0-9a-f])(?::.*)?")


def parse_gfx(name: str) -> Capability:
    """gfx90a -> (9, 0, 10), gfx942 -> (9, 4, 2), gfx1100 -> (11, 0, 0): read from the right as HIP
    does, feature flags after a colon dropped (PLT-04)."""
    match = _GFX.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is no AMD architecture; it must look like gfx942 or gfx1100")
    major, minor, stepping = match.groups()
    return Capability(int(major), int(minor, 16), int(stepping, 16))


def visible_devices(cuda: str | None, hip: str | None) -> tuple[str, ...] | None:
    """The devices a process may use, by index or UUID, from CUDA_VISIBLE_DEVICES and
    HIP_VISIBLE_DEVICES; None: all.

    The two are one setting under two names: either alone counts, empty is unset, a conflict is an
    error (PLT-04).
    """
    first, second = (_split(value) for value in (cuda, hip))
    if first is not None and second is not None and first != second:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={cuda} and HIP_VISIBLE_DEVICES={hip} contradict each other; "
            "set one of them, or both alike"
        )
    return first if first is not None else second


def _split(value: str | None) -> tuple[str, ...] | None:
    if value is None or not value.strip():
        return None
    return tuple(part.strip() for part in value.split(","))
