"""What codes mean: error bounds, extremes, rows and groups that do not touch each other."""

import typing

import pytest
import torch

from headrace.back.quant.online import size_of
from headrace.back.quant.scheme import ONLINE_SCHEMES, SCHEMES
from headrace.base.config.quantization_options import WEIGHT_BITS
from headrace.base.config.tree import ModelOptions

INT8, FP8 = SCHEMES["int8"], SCHEMES["fp8"]


FURTHER = sorted(set(ONLINE_SCHEMES) - set(SCHEMES))


def weights(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def steps_of(scheme, weight, scales):
    return scales.repeat_interleave(scheme.group or weight.shape[1], 1)[:, : weight.shape[1]]


def test_int8_errs_by_at_most_half_a_step():
    weight = weights(9, 70)
    codes, scales, minima = INT8.quantize(weight)
    assert scales.shape == (9, 1) and codes.abs().amax(1).eq(127).all() and minima is None
    assert ((codes * scales - weight).abs() <= scales * 0.5001).all()


def test_fp8_codes_are_torchs_and_err_by_a_sixteenth_or_half_the_least_number():
    weight = weights(9, 70) * torch.exp2(-torch.arange(70.0) / 4)
    codes, scales, minima = FP8.quantize(weight)
    numbers = codes.view(torch.float8_e4m3fn).float()
    assert codes.dtype == torch.int8 and minima is None and scales.shape == (9, 1)
    assert torch.equal(scales, weight.abs().amax(1, keepdim=True) / 448)
    assert torch.equal(numbers, (weight / scales).to(torch.float8_e4m3fn).float())
    assert numbers.abs().amax(1).eq(448).all()
    allowed = torch.maximum(weight.abs() / 16, scales * 2**-10) * 1.0001
    assert ((numbers * scales - weight).abs() <= allowed).all()


def test_fp8_rows_that_are_not_finite_are_lost_and_no_other():
    weight = weights(5, 40)
    plain = FP8.quantize(weight)
    weight[1, 3], weight[3, 39] = float("nan"), float("-inf")
    codes, scales, _ = FP8.quantize(weight)
    assert scales[[1, 3]].isnan().all() and not codes[[1, 3]].any()
    for ours, theirs in zip((codes, scales), plain[:2], strict=True):
        assert torch.equal(ours[[0, 2, 4]], theirs[[0, 2, 4]])


@pytest.mark.parametrize("name", ["int4", "int4-g64", "int4-g128"])
def test_int4_errs_by_at_most_half_a_step_but_at_the_far_end_by_one(name):
    """The largest value's opposite would need code +8."""
    scheme, weight = SCHEMES[name], weights(9, 384)
    codes, scales, minima = scheme.quantize(weight)
    assert scales.shape == (9, 384 // scheme.group) and codes.min() == -8 and codes.max() == 7
    assert minima is None
    steps = steps_of(scheme, weight, scales)
    error = (codes * steps - weight).abs() / steps.abs()
    assert (error[(codes > -8) & (codes < 7)] <= 0.501).all() and (error <= 1.04).all()


@pytest.mark.parametrize("name", ["int4-asym", "int4-asym-g64", "int4-asym-g128"])
def test_asymmetric_codes_span_the_values_whatever_their_middle(name):
    """Half a step, and what rounding scale and minimum to bfloat16 shifts the ends by."""
    scheme, weight = SCHEMES[name], weights(9, 300) + 2.5
    codes, scales, minima = scheme.quantize(weight)
    assert codes.min() >= 0 and codes.max() == 15
    steps = steps_of(scheme, weight, scales)
    values = codes * steps - steps_of(scheme, weight, minima)
    assert ((values - weight).abs() <= steps * 0.6).all()
    plain = SCHEMES[name.replace("-asym", "")].quantize(weight)
    theirs = plain[0] * steps_of(scheme, weight, plain[1])
    assert (values - weight).norm() < (theirs - weight).norm()


@pytest.mark.parametrize("name", ["int8-g32", "int8-g64", "int8-g128"])
def test_grouped_int8_errs_by_half_a_step(name):
    scheme, weight = SCHEMES[name], weights(9, 300)
    codes, scales, minima = scheme.quantize(weight)
    steps = steps_of(scheme, weight, scales)
    inside = codes.abs() < 127
    assert minima is None and ((codes * steps - weight).abs() <= steps * 0.501)[inside].all()


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.group])
def test_grouped_scales_and_minima_are_exact_in_bfloat16(name):
    _, *facts = SCHEMES[name].quantize(weights(5, 64))
    for fact in facts:
        assert fact is None or torch.equal(fact, fact.bfloat16().float())


def test_every_scheme_is_an_option_and_has_its_size():
    annotation = typing.get_type_hints(ModelOptions)["quantization"]
    options = set(typing.get_args(annotation))
    assert options - {"none"} == set(ONLINE_SCHEMES) == set(WEIGHT_BITS)
    for name, scheme in ONLINE_SCHEMES.items():
        exact = size_of(scheme, 64, 1024) * 8 / 65536
        assert exact == WEIGHT_BITS[name] + (1 / 32 if scheme.group is None else 0)


@pytest.mark.parametrize("scheme", ONLINE_SCHEMES.values(), ids=lambda one: one.name)
def test_zero_rows_have_code_and_scale_zero(scheme):
    weight = weights(3, 40)
    weight[1] = 0
    codes, scales, minima = scheme.quantize(weight)
    assert not codes[1].any() and scales.isfinite().all()
    if scheme.outputs == 1 and scheme.name not in (
        "mxfp4",
        "mxfp8",
        "nvfp4",
    ):  # a power of two is never 0
        assert not scales[1].any()
    assert not scheme.dequantize((codes, scales, minima))[1].any()
    assert minima is None or not minima[1].any()


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
def test_an_outlier_touches_only_its_row_or_group(scheme):
    weight = weights(4, 256)
    plain = scheme.quantize(weight)[0]
    weight[2, 140] = 1e4
    codes = scheme.quantize(weight)[0]
    others = torch.arange(4) != 2
    assert torch.equal(codes[others], plain[others])
    assert scheme.group is None or torch.equal(codes[2, :128], plain[2, :128])


def test_mxfp8_scales_are_the_next_power_of_two_so_that_nothing_saturates():
    """KRN-17's rule (REG-041); floor(log2(largest)) - 8 would saturate one random group in five."""
    scheme, weight = ONLINE_SCHEMES["mxfp8"], weights(64, 32 * 64)
    weight[0, :32], weight[1, :32], weight[2, :32] = (
        0,
        448.0,
        torch.nextafter(torch.tensor(448.0), torch.tensor(500.0)),
    )
    codes, scales, _ = scheme.quantize(weight)
    largest = weight.unflatten(1, (-1, 32)).abs().amax(2)
    expected = torch.exp2(torch.ceil(torch.log2(largest.double() / 448))).float()
    expected[0, 0] = 1
    assert torch.equal(scales, expected) and scales[1, 0] == 1 and scales[2, 0] == 2
    numbers = codes.view(torch.float8_e4m3fn).float()
    exact = weight / scales.repeat_interleave(32, 1)
    assert exact.abs().max() <= 448 and torch.equal(numbers, exact.to(torch.float8_e4m3fn).float())
    floors = torch.exp2(torch.floor(torch.log2(largest[3:])) - 8)
    assert 0.1 < (largest[3:] / floors > 448).float().mean() < 0.3


def test_fp8_blocks_share_a_scale_in_both_directions_and_tensors_one():
    weight = weights(200, 300)
    _, scales, _ = ONLINE_SCHEMES["fp8-block"].quantize(weight)
    for rows in (slice(0, 128), slice(128, 200)):
        for i, columns in enumerate((slice(0, 128), slice(128, 256), slice(256, 300))):
            assert torch.equal(
                scales[rows, i].unique(), (weight[rows, columns].abs().max() / 448)[None]
            )
    _, scales, _ = ONLINE_SCHEMES["fp8-tensor"].quantize(weight)
    assert torch.equal(scales.unique(), (weight.abs().max() / 448)[None])


@pytest.mark.parametrize("name", FURTHER)
def test_a_weight_in_parts_is_quantized_as_a_whole(name):
    scheme, weight = ONLINE_SCHEMES[name], weights(300, 96)
    whole, common = scheme.quantize(weight), scheme.common(weight)
    parts = [scheme.quantize(weight[i : i + 128], common) for i in (0, 128, 256)]
    for k in (0, 1):
        assert torch.equal(torch.cat([part[k] for part in parts]), whole[k])


def test_nvfp4_has_the_nearest_e2m1_numbers_of_its_two_scales():
    """The largest group reaches 6 x 448 times the outer scale; ties to even are of mxfp4's test."""
    weight = weights(9, 70) * torch.exp2(-torch.arange(70.0) / 8)
    doubled, halves, _ = ONLINE_SCHEMES["nvfp4"].quantize(weight)
    outer = weight.abs().max() / (6 * 448)
    inner = 2 * halves / outer
    assert (
        torch.equal(inner.to(torch.float8_e4m3fn).float(), inner.round(decimals=4))
        or ((inner - inner.to(torch.float8_e4m3fn).float()).abs() <= inner * 1e-6).all()
    )
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat((-numbers.flip(0), numbers))
    spread = (2 * halves).repeat_interleave(16, 1)[:, :70]
    nearest = (weight[..., None] - levels * spread[..., None]).abs().amin(-1)
    error = (doubled * spread / 2 - weight).abs()
    assert (error <= nearest + spread * 1e-5).all()
    assert doubled.abs().max() == 12


@pytest.mark.parametrize("name", FURTHER)
def test_rows_that_are_not_finite_have_scale_nan(name):
    weight = weights(200, 64)
    weight[3, 5] = float("inf")
    _, scales, _ = ONLINE_SCHEMES[name].quantize(weight)
    assert scales[3].isnan().any()
