"""The scale that a checkpoint holds for what a weight is multiplied with (`input_scale`), and the
zero point beside it, while the parts of the weight are read."""

from __future__ import annotations

from threading import Lock

import torch

from headrace.back.kernels.linear_quant.rows import FixedScale
from headrace.back.parallel.param import Copy
from headrace.back.quant.formats.groups import Groups
from headrace.base.config.quantization import Numbers
from headrace.base.errors import CheckpointError

LEAST, MOST = -128, 127
"""Integers of inputs."""


def scale_of_inputs(copy: Copy, groups: Groups) -> torch.Tensor:
    """The scale that a checkpoint holds for a weight's inputs; CheckpointError: it is no positive
    number."""
    assert groups.inputs is not None, copy
    if not bool((groups.inputs.isfinite() & (groups.inputs > 0)).all()):
        raise CheckpointError(
            f"{copy.name}: the scale of its inputs (input_scale) is {groups.inputs.tolist()}; "
            "it must be a positive number"
        )
    return groups.inputs


class InputRange:
    """That of a weight's int8 inputs: of parts that are multiplied together the one that holds all
    of theirs. Parts may come from several threads."""

    def __init__(self) -> None:
        self._held: FixedScale | None = None
        self._lock = Lock()

    @property
    def fixed(self) -> FixedScale | None:
        """What is known so far; None: no part was read."""
        return self._held

    def take(self, copy: Copy, groups: Groups, numbers: Numbers) -> None:
        """That of one part; CheckpointError: its scale is no positive number, or there is a zero
        point that the config denies."""
        asked = numbers.activations
        symmetric = asked is None or asked.symmetric
        scale = float(scale_of_inputs(copy, groups))
        zero = 0 if groups.input_zero is None else int(groups.input_zero)
        if symmetric and zero:
            raise CheckpointError(
                f"{copy.name}: the zero point of its inputs (input_zero_point) is {zero}, although its "
                "quantization_config says that they are symmetric",
                field="quantization_config",
            )
        with self._lock:
            one = FixedScale(scale, zero)
            self._held = one if self._held is None else _over(self._held, one)


def _over(one: FixedScale, other: FixedScale) -> FixedScale:
    if one == other:
        return one
    if not one.zero and not other.zero:
        return FixedScale(max(one.scale, other.scale))
    low = min((LEAST - it.zero) * it.scale for it in (one, other))
    high = max((MOST - it.zero) * it.scale for it in (one, other))
    scale = torch.tensor((high - low) / (MOST - LEAST), dtype=torch.float32).item()
    return FixedScale(scale, round(LEAST - low / scale))
