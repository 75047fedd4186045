"""New weights written to where the running model holds them, without a second model (shadow.py).

Which of its tensors are parameters as they came, or the same in float32, is known once an update
has gone through a second model. Where all are, the next updates need none: nothing is built, walked
or copied twice. Where one is packed, quantized or folded into another, every update takes the
second model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.models.load.source import Source
from headrace.back.models.weights import Copy, Param, WeightPlan, copies
from headrace.back.transfer.intake import Intake


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """Where the running model holds a rectangle of a checkpoint tensor. `dtype`: that of the
    parameter, to which values are rounded before they become `values`, and `offset` is added."""

    copy: Copy
    values: torch.Tensor
    dtype: torch.dtype
    offset: float

    def fill(self, source: Source) -> int:
        """Writes it; its bytes."""
        copy, values = self.copy, self.values
        plain = values.dtype == self.dtype
        to = values if plain else torch.empty_like(values, dtype=self.dtype)
        source.copy(copy.name, copy.shape, copy.source, to)
        if copy.scale != 1.0:
            to.mul_(copy.scale)
        if not plain:
            values.copy_(to)
        if self.offset:
            values.add_(self.offset)
        return values.nbytes


@dataclass(frozen=True, eq=False)
class DirectWeights:
    """`targets`: of each checkpoint tensor. `plan`: what the model wants of a checkpoint."""

    plan: WeightPlan
    targets: dict[str, list[Target]]


def direct_weights(plan: WeightPlan, held: dict[int, torch.Tensor]) -> DirectWeights | None:
    """Of a model that holds these tensors as its parameters (by id); None if one is not among
    them."""
    if any(id(param) not in held for param in plan.params):
        return None
    targets: dict[str, list[Target]] = {}
    for param in plan.params:
        offset = 0.0 if param.as_float is None else param.as_float[1]
        for copy in copies(param):
            view = held[id(param)][copy.target]
            values = view.t() if copy.transposed else view
            target = Target(copy=copy, values=values, dtype=param.dtype, offset=offset)
            targets.setdefault(copy.name, []).append(target)
    return DirectWeights(replace(plan, params=tuple(map(_description, plan.params))), targets)


def _description(param: Param) -> Param:
    """The parameter without the model it belongs to."""
    return replace(param, tensor=None, members={}, on_filled=None, as_float=None)


class DirectUpdate:
    """One update; as `WeightUpdate`."""

    def __init__(self, weights: DirectWeights, device: torch.device) -> None:
        self._weights = weights
        self._intake = Intake(weights.plan, weights.targets.keys(), device)
        self.num_bytes = 0

    @property
    def seconds(self) -> dict[str, float]:
        """See WeightUpdate."""
        return self._intake.seconds

    def push(self, source: Source, *, last: bool = False) -> None:
        """See WeightUpdate. Whatever came before, there is nothing left to be done at the last."""
        source = self._intake.checked(source)
        with self._intake.phase("copy"):
            for name in source.entries:
                for target in self._weights.targets.get(name, ()):
                    self.num_bytes += target.fill(source)
        self._intake.wait()

    def finish(self) -> None:
        """All that came is in the model."""

    def direct(self) -> DirectWeights:
        """For the next update."""
        return self._weights
