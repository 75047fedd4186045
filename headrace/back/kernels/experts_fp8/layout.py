"""The weights of a mixture's experts as e4m3 numbers on GPUs: plain rows, with scales beside them,
those of neighbouring outputs side by side.

X experts, E width, I inner size, G groups of 128 inputs (or 1: all of them).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.linear_fp8.layout import FLOAT8, Fp8Weight, dequantize

GROUP = 128
"""Inputs that share a scale, where not all do; always of the activations."""


@dataclass(frozen=True, eq=False)
class ScaledMatrices:
    """values_XOI (e4m3) times scales_XGO (float32). `group` inputs share a scale, None: all. A
    scale that a tensor or a block of outputs shares is repeated for each output."""

    values_XOI: torch.Tensor
    scales_XGO: torch.Tensor
    group: int | None

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return self.values_XOI.nbytes + self.scales_XGO.nbytes

    def floats(self, expert: int) -> torch.Tensor:
        """float32 [O, I] of one."""
        scales_OG = self.scales_XGO[expert].T
        return dequantize(Fp8Weight(self.values_XOI[expert], scales_OG, self.group))


@dataclass(frozen=True, eq=False)
class Fp8Experts:
    """`up` [X, 2I, E] (gates, then ups), `down` [X, E, I]. `inputs_2` (float32): the scales of all
    tokens and of all inner values; None: each GROUP of one has its own."""

    up: ScaledMatrices
    down: ScaledMatrices
    inputs_2: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.up.values_XOI)

    @property
    def fixed(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The two scales [1], or None."""
        both = self.inputs_2
        return (None, None) if both is None else (both[:1], both[1:])

    @property
    def group(self) -> int | None:
        """Of both."""
        return self.up.group

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return self.up.num_bytes + self.down.num_bytes

    def floats(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Up [X, 2I, E] and down [X, E, I] of op `experts`."""
        up_XIE, down_XEI = (
            torch.stack([matrices.floats(i).to(dtype) for i in range(len(self))])
            for matrices in (self.up, self.down)
        )
        return up_XIE, down_XEI


def matrix_bytes(outputs: int, inputs: int, group: int | None) -> int:
    """What one matrix takes in memory."""
    return outputs * (inputs + 4 * num_groups(inputs, group))


def num_groups(inputs: int, group: int | None) -> int:
    """G."""
    return 1 if group is None else -(-inputs // group)


def empty_experts(
    group: int | None,
    experts: int,
    width: int,
    inner: int,
    *,
    device: torch.device | str,
    fixed: bool = False,
) -> Fp8Experts:
    """Experts to be filled; `fixed`: with scales of their inputs, of which the largest count."""

    def matrices(outputs: int, inputs: int) -> ScaledMatrices:
        shape = experts, num_groups(inputs, group), outputs
        return ScaledMatrices(
            torch.empty(experts, outputs, inputs, dtype=FLOAT8, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            group,
        )

    inputs_2 = torch.zeros(2, dtype=torch.float32, device=device) if fixed else None
    return Fp8Experts(matrices(2 * inner, width), matrices(width, inner), inputs_2)
