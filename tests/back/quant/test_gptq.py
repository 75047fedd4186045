"""GPTQ: what a calibration's inputs see is lost less than by rounding to nearest."""

from __future__ import annotations

import pytest
import torch

from headrace.back.quant.compressed import WRITTEN, grid_of
from headrace.back.quant.gptq import best_scales, calibrated, output_errors
from headrace.back.quant.scheme import SCHEMES


def calibration() -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and the sum of x x^T of inputs that depend on each other, a few of them large."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 256, generator=generator)
    mixing = torch.randn(256, 256, generator=generator) / 16
    sizes = torch.exp(torch.randn(256, generator=generator))
    x = torch.randn(1024, 256, generator=generator) @ mixing * sizes
    return weight, x.t() @ x


def loss(exact: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    error, size = output_errors(exact - weight, weight, hessian)
    return error / size


@pytest.mark.parametrize("name", WRITTEN)
def test_outputs_lose_less_than_rounded_to_nearest(name: str) -> None:
    weight, hessian = calibration()
    grid = grid_of(weight, SCHEMES[name])
    nearest = grid.meaning(grid.nearest(weight))
    numbers, better = calibrated(weight, grid, hessian)
    ours = loss(better.meaning(numbers), weight, hessian)
    assert ours < 0.6 * loss(nearest, weight, hessian)
    assert torch.equal(better.nearest(better.meaning(numbers)), numbers), "not of the grid"


def test_it_is_what_the_algorithm_gives_an_input_at_a_time() -> None:
    """Frantar et al. 2022, equations 2 and 3, with the inverse made anew for the inputs left."""
    weight, hessian = calibration()
    weight, hessian = weight[:3, :16].double(), hessian[:16, :16].double()
    scheme = SCHEMES["int8"]
    grid = best_scales(weight.float(), grid_of(weight, scheme), hessian.float().diagonal())
    ours, _ = calibrated(weight.float(), grid_of(weight, scheme), hessian.float())
    damped = hessian + torch.eye(16) * 0.01 * hessian.diagonal().mean()
    left, rest = hessian.diagonal().argsort(descending=True).tolist(), weight.clone()
    numbers = torch.empty(3, 16)
    while left:
        column = left[0]
        inverse = torch.linalg.inv(damped[left][:, left])
        numbers[:, column] = grid.nearest(rest[:, [column]].float())[:, 0]
        error = rest[:, column] - grid.meaning(numbers[:, [column]])[:, 0]
        rest[:, left] -= error[:, None] / inverse[0, 0] * inverse[0]
        left = left[1:]
    assert torch.equal(ours, numbers)


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    weight, hessian = calibration()
    hessian[5], hessian[:, 5] = 0, 0
    numbers, grid = calibrated(weight, grid_of(weight, SCHEMES["int4"]), hessian)
    assert grid.meaning(numbers).isfinite().all()
    nothing = torch.zeros_like(hessian)
    numbers, grid = calibrated(weight, grid_of(weight, SCHEMES["int4"]), nothing)
    assert torch.equal(numbers, grid_of(weight, SCHEMES["int4"]).nearest(weight))
