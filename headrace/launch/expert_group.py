"""Engine cores that share out their experts, as processes: where they meet, what each is told, and
that they end together. None can run a step without the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.base.config.resolved import EngineSpec
from headrace.core.ports import ExecutorSource
from headrace.launch.topology import RuntimeFolder


class MeetingPlaces:
    """Folders in which the cores of a group meet, a new one for every start of the group: one
    starts anew when a core comes that has been to the newest."""

    def __init__(self, folder: RuntimeFolder) -> None:
        self._folder, self._count = folder, 0
        self._been: set[int] = set()
        self._newest = Path()

    def words(self, core: int) -> Sequence[str]:
        """The arguments of a core of this number that is about to start."""
        if not self._count or core in self._been:
            self._newest = self._folder.make(f"group-{self._count}")
            self._count += 1
            self._been.clear()
        self._been.add(core)
        return "--group-folder", str(self._newest), "--group-core", str(core)

    def words_alone(self, core: int) -> Sequence[str]:
        """The same of one that comes while the others run: they take it in later."""
        return "--group-core", str(core)


def is_alone(spec: EngineSpec) -> bool:
    """Whether this core waits for others to share out experts with; it takes no requests."""
    group = spec.device.expert_group
    return group is not None and not group.folder


def in_group(spec: EngineSpec, *, folder: str, core: int) -> EngineSpec:
    """The spec of one core of a group, if there is one."""
    group = spec.device.expert_group
    if group is None:
        return spec
    cores = max(group.cores, core + 1)  # of one that is alone: what it loads does not matter
    group = msgspec.structs.replace(group, cores=cores, folder=folder, core=core)
    return msgspec.structs.replace(
        spec, device=msgspec.structs.replace(spec.device, expert_group=group)
    )


def replacing(spec: EngineSpec, source: ExecutorSource) -> ExecutorSource | None:
    """Who may make other executors for this core; None: nobody, as the others of its group would
    wait for the one it has."""
    return source if spec.device.expert_group is None else None
