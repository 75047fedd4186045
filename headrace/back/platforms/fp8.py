"""Which encoding of 8-bit floats a device's matrix units multiply: e4m3 as the Open Compute Project
has it, or AMD's first one, which lacks a negative zero and reaches half as far.

Sources: CUDA programming guide, compute capabilities 8.9 and later; AMD's instruction set
architectures of CDNA 3 (gfx942: FNUZ), CDNA 4 (gfx950) and RDNA 4 (gfx1200, gfx1201).
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.back.platforms.facts import DeviceFacts


@dataclass(frozen=True)
class Fp8Encoding:
    """An encoding. `largest`: its largest number; `torch_name`: PyTorch's dtype of it."""

    name: str
    largest: float
    torch_name: str


OCP = Fp8Encoding("e4m3fn", 448.0, "float8_e4m3fn")
FNUZ = Fp8Encoding("e4m3fnuz", 240.0, "float8_e4m3fnuz")
_AMD = {
    "gfx940": FNUZ,
    "gfx941": FNUZ,
    "gfx942": FNUZ,
    "gfx950": OCP,
    "gfx1200": OCP,
    "gfx1201": OCP,
}
LEAST_CUDA = (8, 9)


def fp8_encoding(device: DeviceFacts) -> Fp8Encoding | None:
    """That of a device; None: it multiplies no 8-bit floats."""
    if device.kind == "rocm":
        return _AMD.get(device.arch.partition(":")[0])
    if device.kind == "cuda" and device.capability is not None:
        return OCP if tuple(device.capability)[:2] >= LEAST_CUDA else None
    return None
