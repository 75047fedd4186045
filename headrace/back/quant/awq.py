"""AWQ (Lin et al. 2023): inputs of a weight that a calibration text shows to be large get larger
numbers before they are rounded, and what makes these inputs gives them smaller by as much.

What a choice loses are the outputs over the text, by the sum of x x^T of the inputs. I inputs, O
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.back.quant.compressed import Grid, grid_of
from headrace.back.quant.gptq import best_scales, output_errors
from headrace.back.quant.scheme import Scheme

POWERS = tuple(i / 10 for i in range(11))
"""Of the inputs' sizes, that are tried as their scales (the paper's alpha)."""


@dataclass(frozen=True, kw_only=True)
class SharedInputs:
    """Inputs of which several share a source: they lie as [sources, repeats, size], and the
    `repeats` of a source have one scale (query heads that read one KV head)."""

    repeats: int
    size: int


def input_scales(
    weights_OI: Sequence[torch.Tensor],
    scheme: Scheme,
    hessian_II: torch.Tensor,
    shared: SharedInputs | None = None,
) -> torch.Tensor:
    """What the inputs of all these weights are multiplied with, float32 [I]: the power of their
    sizes by which rounding loses least."""
    sizes_I = hessian_II.diagonal().sqrt()
    if shared is not None:
        runs = sizes_I.view(-1, shared.repeats, shared.size)
        sizes_I = runs.mean(1, keepdim=True).expand_as(runs).reshape(-1)
    best_I, least = torch.ones_like(sizes_I), float("inf")
    for power in POWERS:
        scales_I = _powers(sizes_I, power)
        loss = sum(_loss(weight_OI, scheme, hessian_II, scales_I) for weight_OI in weights_OI)
        if loss < least:
            best_I, least = scales_I, loss
    return best_I


def _powers(sizes_I: torch.Tensor, power: float) -> torch.Tensor:
    """Around 1; an input that is always 0 keeps its numbers."""
    if not bool((sizes_I > 0).any()):
        return torch.ones_like(sizes_I)
    scales_I = torch.where(sizes_I > 0, sizes_I, sizes_I[sizes_I > 0].median()) ** power
    return scales_I / (scales_I.max() * scales_I.min()).sqrt()


def _loss(
    weight_OI: torch.Tensor, scheme: Scheme, hessian_II: torch.Tensor, scales_I: torch.Tensor
) -> float:
    scaled_OI = weight_OI.float() * scales_I
    grid = grid_of(scaled_OI, scheme)
    back_OI = grid.meaning(grid.nearest(scaled_OI)) / scales_I
    return output_errors(back_OI - weight_OI.float(), weight_OI.float(), hessian_II)[0]


def rounded(
    scaled_OI: torch.Tensor, scheme: Scheme, squares_I: torch.Tensor
) -> tuple[torch.Tensor, Grid]:
    """The numbers of a weight whose inputs are scaled, and their grid, its scales shrunk where that
    loses less; `squares_I`: sums of the scaled inputs' squares."""
    grid = best_scales(scaled_OI, grid_of(scaled_OI, scheme), squares_I)
    return grid.nearest(scaled_OI), grid
