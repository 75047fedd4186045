"""Facts about AMD GPUs from the kernel driver's sysfs tree; HIP is not touched."""

from __future__ import annotations

from pathlib import Path

from headrace.back.platforms.facts import Capability, DeviceFacts, among_visible

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
DRM = Path("/sys/class/drm")


def rocm_facts(
    visible: tuple[str, ...] | None = None, *, topology: Path = TOPOLOGY, drm: Path = DRM
) -> tuple[DeviceFacts, ...]:
    """The AMD GPUs among `visible` (indices or UUIDs, None: all), in that order; empty without the
    driver."""
    nodes = sorted((int(one.name), one) for one in topology.glob("[0-9]*") if one.name.isdigit())
    properties = [(one, _properties(one / "properties")) for _, one in nodes]
    gpus = [(one, values) for one, values in properties if values.get("gfx_target_version", 0)]
    devices = [_facts(index, *gpu, drm) for index, gpu in enumerate(gpus)]
    return among_visible(devices, visible)


def _facts(index: int, node: Path, values: dict[str, int], drm: Path) -> DeviceFacts:
    """gfx_target_version is major * 10000 + minor * 100 + stepping; local memory is the sum of its
    banks. What is used of it is the display driver's to say; without it all counts as free."""
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
        uuid=f"GPU-{values['unique_id']:016x}" if values.get("unique_id") else "",
        name=arch,
        arch=arch,
        capability=capability,
        memory_bytes=memory,
        free_bytes=memory - min(memory, _used_bytes(drm, values.get("drm_render_minor", -1))),
        cores=simds // max(1, values.get("simd_per_cu", 1)),
    )


def _used_bytes(drm: Path, minor: int) -> int:
    try:
        return int((drm / f"renderD{minor}" / "device" / "mem_info_vram_used").read_text())
    except (OSError, ValueError):
        return 0


def _properties(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
