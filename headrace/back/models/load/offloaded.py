"""Which layers' weights lie in host memory: as many as the user says, or as few as a device needs.

The layers are spread over the model, so that each is copied while those before it compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.back.layers.offload import SLOTS
from headrace.back.models.weights import WeightPlan
from headrace.back.parallel.param import Param, local_shape
from headrace.base.config.resolved import Decision, OffloadSpec
from headrace.base.errors import ConfigError

LEAST = SLOTS + 1
"""Fewer layers take no less memory than the slots that they are computed in."""


@dataclass(frozen=True, kw_only=True)
class OffloadChoice:
    """`layers` whose weights, or whose experts', lie in host memory: `host_bytes`, of which a step
    has `slot_bytes` on the device at a time; `device_bytes`: of all other weights."""

    layers: tuple[int, ...]
    experts: bool
    host_bytes: int
    slot_bytes: int
    device_bytes: int

    @property
    def held_bytes(self) -> int:
        """What weights take of the device."""
        return self.device_bytes + self.slot_bytes

    def decision(self, requested: str, num_layers: int) -> Decision:
        """For the table of decisions."""
        option = "--offload-experts" if self.experts else "--offload-layers"
        if not self.layers:
            return Decision(option, requested, "none", "the weights fit on the device")
        what = "the experts of layers" if self.experts else "layers"
        shown = f"{what} {', '.join(map(str, self.layers))} of {num_layers}"
        why = (
            f"{self.host_bytes / 2**30:.2f} GiB in host memory, copied through {self.slot_bytes / 2**30:.2f} GiB of "
            f"the device, beside {self.device_bytes / 2**30:.2f} GiB of weights that stay there"
        )
        return Decision(option, requested, shown, why)


def choose_offload(weights: WeightPlan, spec: OffloadSpec, *, family: str) -> OffloadChoice:
    """ConfigError, with the numbers, where it cannot be done or saves nothing."""
    experts = spec.what == "experts"
    option = f"--offload-{spec.what}"
    sizes = _sizes(weights, experts=experts)
    if not sizes:
        lack = (
            "has no routed experts" if experts and weights.layers else "is not run layer by layer"
        )
        raise ConfigError(f"{option}: family {family} {lack}", field=f"offload_{spec.what}")
    total = sum(_num_bytes(param) for param in weights.params)
    if spec.count is not None:
        if not LEAST <= spec.count <= len(sizes):
            what = "layers with routed experts" if experts else "layers"
            raise ConfigError(
                f"{option} {spec.count}: from {LEAST} (fewer take no less memory than the {SLOTS} slots that they are "
                f"computed in) to the model's {len(sizes)} {what}",
                field=f"offload_{spec.what}",
            )
        return _choice(sizes, spec.count, total, experts=experts)
    assert spec.room_bytes is not None, spec
    if total <= spec.room_bytes:
        return _choice(sizes, 0, total, experts=experts)
    for count in range(LEAST, len(sizes) + 1):
        choice = _choice(sizes, count, total, experts=experts)
        if choice.held_bytes <= spec.room_bytes:
            return choice
    most = _choice(sizes, len(sizes), total, experts=experts).held_bytes
    raise ConfigError(
        f"{option} auto: even with all {len(sizes)} in host memory the weights take {most / 2**30:.2f} GiB of the "
        f"device, where {spec.room_bytes / 2**30:.2f} GiB are left for them",
        field=f"offload_{spec.what}",
    )


def _sizes(weights: WeightPlan, *, experts: bool) -> dict[int, int]:
    """Bytes by layer, of those that can be offloaded."""
    sizes = {
        index: sum(_num_bytes(param) for param in params if param.routed or not experts)
        for index, params in enumerate(weights.layers)
    }
    return {index: size for index, size in sizes.items() if size}


def _choice(sizes: dict[int, int], count: int, total: int, *, experts: bool) -> OffloadChoice:
    candidates = sorted(sizes)
    layers = tuple(candidates[(i + 1) * len(candidates) // count - 1] for i in range(count))
    host_bytes = sum(sizes[layer] for layer in layers)
    largest = max((sizes[layer] for layer in layers), default=0)
    return OffloadChoice(
        layers=layers,
        experts=experts,
        host_bytes=host_bytes,
        slot_bytes=SLOTS * largest,
        device_bytes=total - host_bytes,
    )


def _num_bytes(param: Param) -> int:
    if param.bundle is not None:
        return sum(part.nbytes for part in param.members.values())
    return param.packed_bytes or math.prod(local_shape(param)) * param.dtype.itemsize
