"""What int8 and int4 codes mean: error bounds, extremes, rows and groups that do not touch each other."""

import pytest
import torch

from headrace.back.quant.scheme import SCHEMES

INT8, INT4 = SCHEMES["int8"], SCHEMES["int4"]


def weights(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_int8_errs_by_at_most_half_a_step():
    weight = weights(9, 70)
    codes, scales = INT8.quantize(weight)
    assert scales.shape == (9, 1) and codes.abs().amax(1).eq(127).all()
    assert ((codes * scales - weight).abs() <= scales * 0.5001).all()


def test_int4_errs_by_at_most_half_a_step_but_at_the_far_end_by_one():
    """The largest value's opposite would need code +8."""
    weight = weights(9, 96)
    codes, scales = INT4.quantize(weight)
    assert scales.shape == (9, 3) and codes.min() == -8 and codes.max() == 7
    steps = scales.repeat_interleave(32, 1)
    error = (codes * steps - weight).abs() / steps.abs()
    assert (error[(codes > -8) & (codes < 7)] <= 0.501).all() and (error <= 1.04).all()


def test_int4_scales_are_exact_in_bfloat16():
    scales = INT4.quantize(weights(5, 64))[1]
    assert torch.equal(scales, scales.bfloat16().float())


@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_zero_rows_have_code_and_scale_zero(scheme):
    weight = weights(3, 40)
    weight[1] = 0
    codes, scales = scheme.quantize(weight)
    assert not codes[1].any() and not scales[1].any() and scales.isfinite().all()


@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_an_outlier_touches_only_its_row_or_group(scheme):
    weight = weights(4, 64)
    plain, _ = scheme.quantize(weight)
    weight[2, 40] = 1e4
    codes, _ = scheme.quantize(weight)
    others = torch.arange(4) != 2
    assert torch.equal(codes[others], plain[others])
    assert scheme is INT8 or torch.equal(codes[2, :32], plain[2, :32])
