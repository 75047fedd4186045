"""The weights of a mixture's experts as 4-bit numbers on GPUs: for each expert the tiles of a
linear layer's weight (linear_int4/layout.py), one matrix behind the other.

X experts, E width, I inner size; O outputs and I inputs of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.linear_int4.layout import (
    ROWS,
    Int4Weight,
    dequantize,
    empty,
    packed_bytes,
    write,
)


@dataclass(frozen=True)
class Int4Form:
    """What the numbers are: see Int4Weight."""

    group: int | None
    minima: bool = False
    floats: bool = False


@dataclass(frozen=True, eq=False)
class Int4Experts:
    """`up`: of each expert gates, then ups, each padded to whole tiles; `down` likewise. The sizes
    are those without padding."""

    up: Int4Weight
    down: Int4Weight
    experts: int
    width: int
    inner: int

    def __len__(self) -> int:
        return self.experts

    @property
    def form(self) -> Int4Form:
        """Of both."""
        return Int4Form(self.up.group, self.up.minima, self.up.floats)

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return self.up.num_bytes + self.down.num_bytes

    def matrix(self, name: str, expert: int) -> Int4Weight:
        """A view of a "gate", an "up" or a "down"."""
        if name == "down":
            return _part(self.down, expert, self.width)
        return _part(self.up, 2 * expert + (name == "up"), self.inner)

    def floats(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Up [X, 2I, E] (gates, then ups) and down [X, E, I] as kernels multiply by them."""
        ups = [
            torch.cat([dequantize(self.matrix(name, i), dtype) for name in ("gate", "up")])
            for i in range(self.experts)
        ]
        downs = [dequantize(self.matrix("down", i), dtype) for i in range(self.experts)]
        return torch.stack(ups), torch.stack(downs)


def _part(stacked: Int4Weight, index: int, outputs: int) -> Int4Weight:
    tiles = -(-outputs // ROWS)
    here = slice(index * tiles, (index + 1) * tiles)
    return replace(
        stacked,
        words_NBW=stacked.words_NBW[here],
        scales_NBSR=stacked.scales_NBSR[here],
        outputs=outputs,
    )


def padded(outputs: int) -> int:
    """Outputs of a matrix in whole tiles."""
    return -(-outputs // ROWS) * ROWS


def empty_experts(
    form: Int4Form,
    experts: int,
    width: int,
    inner: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Int4Experts:
    """Experts to be filled by `write_matrix`."""
    up, down = (
        empty(
            outputs, inputs, form.group, minima=form.minima, dtype=dtype, device=device,
            floats=form.floats,
        )
        for outputs, inputs in (
            (experts * 2 * padded(inner), width),
            (experts * padded(width), inner),
        )
    )  # fmt: skip
    return Int4Experts(up, down, experts, width, inner)


def write_matrix(
    experts: Int4Experts,
    name: str,
    expert: int,
    values_OI: torch.Tensor,
    scales_OG: torch.Tensor,
    minima_OG: torch.Tensor | None,
) -> None:
    """Fills one matrix: see `linear_int4.layout.write`."""
    write(experts.matrix(name, expert), 0, values_OI, scales_OG, minima_OG)


def matrix_bytes(form: Int4Form, outputs: int, inputs: int, *, dtype: torch.dtype) -> int:
    """What one matrix takes in memory."""
    return packed_bytes(outputs, inputs, form.group, minima=form.minima, dtype=dtype)
