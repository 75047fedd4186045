"""The weights of a mixture's experts as numbers of a byte that GPUs multiply as floats: int8, or
e4m3 where 32 inputs share a power of two (MXFP8). Plain rows, with scales beside them, as of
experts_fp8/layout.py.

X experts, E width, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.experts_fp8.layout import ScaledMatrices, num_groups
from headrace.back.kernels.linear_fp8.layout import FLOAT8

GROUPS = (16, 32, 64, 128)
"""Inputs that may share a scale, where not all do."""


@dataclass(frozen=True)
class ByteForm:
    """What the numbers are: `group` inputs share a scale, None: all; `floats`: e4m3."""

    group: int | None
    floats: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return FLOAT8 if self.floats else torch.int8


@dataclass(frozen=True, eq=False)
class ByteExperts:
    """`up` [X, 2I, E] (gates, then ups), `down` [X, E, I]."""

    up: ScaledMatrices
    down: ScaledMatrices

    def __len__(self) -> int:
        return len(self.up.values_XOI)

    @property
    def form(self) -> ByteForm:
        """Of both."""
        return ByteForm(self.up.group, self.up.values_XOI.dtype == FLOAT8)

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return self.up.num_bytes + self.down.num_bytes

    def floats(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Up [X, 2I, E] and down [X, E, I] as kernels multiply by them."""
        up_XIE, down_XEI = (
            torch.stack([matrices.floats(i).to(dtype) for i in range(len(self))])
            for matrices in (self.up, self.down)
        )
        return up_XIE, down_XEI


def empty_experts(
    form: ByteForm, experts: int, width: int, inner: int, *, device: torch.device | str
) -> ByteExperts:
    """Experts to be filled."""

    def matrices(outputs: int, inputs: int) -> ScaledMatrices:
        shape = experts, num_groups(inputs, form.group), outputs
        return ScaledMatrices(
            torch.empty(experts, outputs, inputs, dtype=form.dtype, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            form.group,
        )

    return ByteExperts(matrices(2 * inner, width), matrices(width, inner))
