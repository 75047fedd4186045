"""How much shared memory a program may take on each device, and tiles that keep to it.

A kernel that takes more does not launch. Tiles are tuned for the largest devices; on smaller ones
they shrink by rule rather than by a second table of configurations, and
tests/kernels/triton/test_cross_compile.py holds that what every kernel takes fits every target.
"""

from __future__ import annotations

from functools import cache

import torch

BY_TARGET = {
    "cuda:80": 163 << 10, "cuda:86": 99 << 10, "cuda:89": 99 << 10, "cuda:90": 227 << 10,
    "cuda:100": 227 << 10, "cuda:120": 99 << 10,
    "hip:gfx942": 64 << 10, "hip:gfx950": 160 << 10, "hip:gfx1100": 64 << 10,
    "hip:gfx1201": 64 << 10,
}  # fmt: skip
"""Bytes of a program by the compiler's target (CUDA programming guide, table of compute
capabilities; LDS of CDNA 3 and 4 and of RDNA)."""
LARGEST = 227 << 10


class Pretended:
    """The target that is compiled for where there is no device (cross-compilation)."""

    target: str | None = None


@cache
def _of_device(device: torch.device) -> int:
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return BY_TARGET.get("hip:" + facts.gcnArchName.partition(":")[0], 64 << 10)
    return int(facts.shared_memory_per_block_optin)


def shared_bytes() -> int:
    """Bytes of shared memory a program may take on the current device; the most there is where
    kernels are interpreted."""
    if Pretended.target is not None:
        return BY_TARGET[Pretended.target]
    if not torch.cuda.is_available():
        return LARGEST
    return _of_device(torch.device("cuda", torch.cuda.current_device()))


def fitting_stages(stages: int, stage_bytes: int) -> int:
    """The stages of a pipeline of which all but one lie in shared memory, `stage_bytes` each: as
    many as fit."""
    return max(1, min(stages, 1 + shared_bytes() // stage_bytes))
