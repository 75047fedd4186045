"""Which devices there are: real ones by asking drivers and the kernel, fakes by name for planning
and tests.

Figures of the fakes are the makers' data sheets (nominal, dense); memory is the usable part of the
nominal one.
"""

from __future__ import annotations

from headrace.back.platforms.cpu import cpu_facts
from headrace.back.platforms.cuda import cuda_facts
from headrace.back.platforms.facts import Capability, DeviceFacts, parse_gfx, visible_devices
from headrace.back.platforms.rocm import rocm_facts
from headrace.base import env
from headrace.base.errors import ConfigError

GIB = 1 << 30
PCIE_4, PCIE_5 = 32.0, 64.0
"""10^9 bytes a second of 16 lanes, one way."""


def _nvidia(
    name: str,
    major: int,
    minor: int,
    *,
    gib: int,
    cores: int,
    gb_s: float,
    tflops: float,
    link: float = PCIE_5,
) -> DeviceFacts:
    return DeviceFacts(
        kind="cuda",
        name=f"NVIDIA {name}",
        arch=f"sm_{major}{minor}",
        capability=Capability(major, minor),
        memory_bytes=gib * GIB,
        free_bytes=gib * GIB,
        cores=cores,
        memory_gb_s=gb_s,
        bf16_tflops=tflops,
        link_gb_s=link,
    )


def _amd(name: str, arch: str, *, gib: int, cores: int, gb_s: float, tflops: float) -> DeviceFacts:
    return DeviceFacts(
        kind="rocm",
        name=f"AMD {name}",
        arch=arch,
        capability=parse_gfx(arch),
        memory_bytes=gib * GIB,
        free_bytes=gib * GIB,
        cores=cores,
        memory_gb_s=gb_s,
        bf16_tflops=tflops,
        link_gb_s=PCIE_5,
    )


FAKES = {
    "a100": _nvidia("A100 80GB", 8, 0, gib=79, cores=108, gb_s=2039, tflops=312, link=PCIE_4),
    "l4": _nvidia("L4", 8, 9, gib=22, cores=58, gb_s=300, tflops=121, link=PCIE_4),
    "l40s": _nvidia("L40S", 8, 9, gib=45, cores=142, gb_s=864, tflops=362, link=PCIE_4),
    "rtx4090": _nvidia(
        "GeForce RTX 4090", 8, 9, gib=23, cores=128, gb_s=1008, tflops=165, link=PCIE_4
    ),
    "h100": _nvidia("H100 SXM", 9, 0, gib=79, cores=132, gb_s=3350, tflops=989),
    "h200": _nvidia("H200 SXM", 9, 0, gib=140, cores=132, gb_s=4800, tflops=989),
    "b200": _nvidia("B200", 10, 0, gib=178, cores=148, gb_s=8000, tflops=2250),
    "mi300x": _amd("MI300X", "gfx942", gib=191, cores=304, gb_s=5300, tflops=1307),
    "mi355x": _amd("MI355X", "gfx950", gib=287, cores=256, gb_s=8000, tflops=2516),
}


def detect() -> tuple[DeviceFacts, ...]:
    """The GPUs this process may use, then the CPU."""
    visible = visible_devices(env.stated("CUDA_VISIBLE_DEVICES"), env.stated("HIP_VISIBLE_DEVICES"))
    return (*cuda_facts(visible), *rocm_facts(visible), cpu_facts())


def device(name: str) -> DeviceFacts:
    """The facts of "auto" (the best device here), "cpu", "cuda" (the first GPU here, AMD's too) or
    a fake by its name."""
    wanted = name.lower()
    if wanted in FAKES:
        return FAKES[wanted]
    here = detect()
    for one in here:
        if wanted in ("auto", one.kind, one.torch_kind):
            return one
    kinds = sorted({one.kind for one in here})
    raise ConfigError(
        f"device {name!r} is not here (here: {', '.join(kinds)}; for planning also: "
        f"{', '.join(FAKES)})",
        field="device",
    )
