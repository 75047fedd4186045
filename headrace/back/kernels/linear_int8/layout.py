"""Weights of 8-bit integers as GPUs read them: plain rows, with scales beside them.

O outputs, I inputs, G groups of neighbouring inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUPS = (16, 32, 64, 128)
"""Inputs that may share a scale, where not all do."""


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """values_OI (int8) times scales_OG (float32, contiguous). `group` inputs of an output share a
    scale, None: all of them, and G is 1; I is a multiple of it. `int8_rows`: many tokens are
    multiplied as int8 too. `minima_OG` (as the scales; None: 0) are what products with scales are
    above a weight. `inputs_1`: the scale of all these tokens, None: each has its own; `zero_1`:
    what is added to their integers; both float32, of weights with one group."""

    values_OI: torch.Tensor
    scales_OG: torch.Tensor
    group: int | None
    int8_rows: bool = False
    minima_OG: torch.Tensor | None = None
    inputs_1: torch.Tensor | None = None
    zero_1: torch.Tensor | None = None

    @property
    def facts(self) -> dict[str, bool]:
        """What a problem says of it beside its sizes."""
        minima, fixed = self.minima_OG is not None, self.inputs_1 is not None
        zero = self.zero_1 is not None
        return {"int8_rows": self.int8_rows, "minima": minima, "fixed": fixed, "zero": zero}

    @property
    def outputs(self) -> int:
        """O."""
        return self.values_OI.shape[0]

    @property
    def inputs(self) -> int:
        """I."""
        return self.values_OI.shape[1]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values_OI.device

    @property
    def num_bytes(self) -> int:
        """In memory."""
        minima = 0 if self.minima_OG is None else self.minima_OG.nbytes
        return self.values_OI.nbytes + self.scales_OG.nbytes + minima


def packed_bytes(outputs: int, inputs: int, group: int | None) -> int:
    """What a weight takes."""
    return outputs * (inputs + 4 * (1 if group is None else inputs // group))


def empty(
    outputs: int,
    inputs: int,
    group: int | None,
    *,
    device: torch.device | str,
    int8_rows: bool = False,
    minima: bool = False,
) -> Int8Weight:
    """A weight to be filled."""
    assert group is None or inputs % group == 0, (inputs, group)
    groups = 1 if group is None else inputs // group
    assert group is not None or not minima, "minima are of groups"
    numbers = [
        torch.empty(outputs, groups, dtype=torch.float32, device=device)
        for _ in range(2 if minima else 1)
    ]
    return Int8Weight(
        torch.empty(outputs, inputs, dtype=torch.int8, device=device),
        numbers[0],
        group,
        int8_rows,
        numbers[1] if minima else None,
    )


def zero_sums(weight: Int8Weight) -> torch.Tensor | None:
    """What the sums of integers with `zero_1` are above those without, scaled: float32 [O]."""
    if weight.zero_1 is None:
        return None
    assert weight.inputs_1 is not None and weight.group is None, weight.facts
    step = 1 + (1 << 25) // weight.inputs
    sums = [part.sum(1, dtype=torch.int32) for part in weight.values_OI.split(step)]
    return torch.cat(sums) * weight.scales_OG[:, 0] * (weight.inputs_1 * weight.zero_1)


def dequantize(weight: Int8Weight) -> torch.Tensor:
    """float32 [O, I]."""
    groups = weight.values_OI.unflatten(1, (-1, weight.group or weight.inputs))
    values = groups * weight.scales_OG[..., None]
    if weight.minima_OG is not None:
        values -= weight.minima_OG[..., None]
    return values.flatten(1)
