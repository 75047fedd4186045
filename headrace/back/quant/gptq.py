"""GPTQ (Frantar et al. 2022, algorithm 1): rounds the inputs of a weight one after another, and
lets those that are still to come make up for what was lost, as a calibration text weighs it.

Inputs go by in the order of their sizes in that text; groups stay where they are, with scales
chosen ahead by the weighted error of their values ("static groups"). O outputs, I inputs.
"""

from __future__ import annotations

import torch

from headrace.back.quant.compressed import Grid

DAMPING = 0.01
"""Of the mean of the Hessian's diagonal, added to it."""
BLOCK = 128
"""Inputs whose later corrections wait for each other."""
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Scales that are tried, as parts of the one that reaches the largest value."""


def calibrated(
    weight_OI: torch.Tensor, grid: Grid, hessian_II: torch.Tensor
) -> tuple[torch.Tensor, Grid]:
    """Numbers [O, I] of the grid with better scales, and that grid. `hessian_II`: the sum of x x^T
    over the calibration's inputs, float32."""
    weight_OI = weight_OI.float()
    grid = best_scales(weight_OI, grid, hessian_II.diagonal())
    numbers_OI = torch.empty_like(weight_OI)
    order_I = hessian_II.diagonal().argsort(descending=True)
    inverse_II = _inverse_root(hessian_II[order_I][:, order_I])
    left_OI = weight_OI[:, order_I].contiguous()
    inputs = len(order_I)
    for first in range(0, inputs, BLOCK):
        last = min(first + BLOCK, inputs)
        block_OB = left_OI[:, first:last]
        errors_OB = torch.zeros_like(block_OB)
        for i in range(last - first):
            column = int(order_I[first + i])
            values_O1 = block_OB[:, i : i + 1]
            numbers_O1 = grid.nearest(values_O1, column)
            numbers_OI[:, column : column + 1] = numbers_O1
            row_B = inverse_II[first + i, first:last]
            error_O1 = (values_O1 - grid.meaning(numbers_O1, column)) / row_B[i]
            errors_OB[:, i : i + 1] = error_O1
            block_OB[:, i:] -= error_O1 * row_B[i:]
        left_OI[:, last:] -= errors_OB @ inverse_II[first:last, last:]
    return numbers_OI, grid


def best_scales(weight_OI: torch.Tensor, grid: Grid, weights_I: torch.Tensor) -> Grid:
    """The grid whose scales, each shrunk by one of SHRINKS, lose least, inputs weighed."""
    best, least_OG = grid, None
    for shrink in SHRINKS:
        tried = grid.shrunk(shrink)
        error_OI = tried.meaning(tried.nearest(weight_OI)) - weight_OI
        loss_OG = grid.by_group(error_OI.square() * weights_I)
        if least_OG is None:
            best, least_OG = tried, loss_OG
            continue
        better_OG = loss_OG < least_OG
        best = best.where(better_OG, tried)
        least_OG = torch.minimum(loss_OG, least_OG)
    return best


def output_errors(
    difference_OI: torch.Tensor, weight_OI: torch.Tensor, hessian_II: torch.Tensor
) -> tuple[float, float]:
    """Sums of squares over the calibration: of what the outputs differ by, and of the outputs."""

    def energy(matrix_OI: torch.Tensor) -> float:
        return float(((matrix_OI @ hessian_II) * matrix_OI).sum().clamp(min=0))

    return energy(difference_OI), energy(weight_OI)


def _inverse_root(hessian_II: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian; an input that is always 0 moves
    no other."""
    damped = hessian_II.clone()
    diagonal = damped.diagonal()
    mean = float(diagonal.mean())
    diagonal += DAMPING * mean if mean > 0 else 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)
