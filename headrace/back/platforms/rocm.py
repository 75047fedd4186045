"""Facts about AMD GPUs from the kernel driver's sysfs tree; HIP is not touched (PLT-04)."""

from __future__ import annotations

from pathlib import Path

from headrace.back.platforms.facts import Capability, DeviceFacts

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")


def rocm_facts(
    visible: tuple[str, ...] | None = None, *, topology: Path = TOPOLOGY
) -> tuple[DeviceFacts, ...]:
    """The AMD GPUs among `visible` (indices, None: all), in that order; empty without the
    driver."""
    nodes = sorted((int(one.name), one) for one in topology.glob("[0-9]*") if one.name.isdigit())
    properties = [(one, _properties(one / "properties")) for _, one in nodes]
    gpus = [(one, values) for one, values in properties if values.get("gfx_target_version", 0)]
    found = {str(index): _facts(index, *gpu) for index, gpu in enumerate(gpus)}
    if visible is None:
        return tuple(found.values())
    return tuple(found[name] for name in visible if name in found)


def _facts(index: int, node: Path, values: dict[str, int]) -> DeviceFacts:
    """gfx_target_version is major * 10000 + minor * 100 + stepping; local memory is the sum of its
    banks."""
    version = values["gfx_target_version"]
    capability = Capability(version // 10000, version // 100 % 100, version % 100)
    memory = sum(
        _properties(bank / "properties").get("size_in_bytes", 0)
        for bank in (node / "mem_banks").glob("*")
    )
    arch = f"gfx{capability.major}{capability.minor:x}{capability.stepping:x}"
    simds = values.get("simd_count", 0)
    return DeviceFacts(
        kind="rocm",
        index=index,
        name=arch,
        arch=arch,
        capability=capability,
        memory_bytes=memory,
        free_bytes=memory,
        cores=simds // max(1, values.get("simd_per_cu", 1)),
    )


def _properties(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
