"""The native linear with e4m3 weights against its definition: every code in every place, odd sizes, strides, many rows;
batch and thread invariance; the native quantizer against torch's own cast (PLT-09: packed once, read in place)."""

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.linear_quant.layout import (
    PackedWeight,
    dequantize_rows,
    empty,
    read_rows,
    write_panels,
)
from headrace.back.kernels.linear_quant.native import KERNEL, bind_with
from headrace.back.kernels.linear_quant.op import OP, LinearQuantProblem
from headrace.back.kernels.linear_quant.quantize import quantize_with
from headrace.back.parallel.bundle import FP8, FP8_GROUPS, INT8
from headrace.back.quant.scheme import SCHEMES
from tests.kernels.native.panels import DTYPES, close, defined, values, weight_for

pytestmark = pytest.mark.usefixtures("poisoned")
# rows, outputs, inputs: below, at and above every tile, panel, step and block width
SIZES = [(1, 1, 1), (1, 63, 7), (1, 64, 64), (2, 65, 33), (3, 130, 31), (5, 37, 100), (16, 128, 96), (17, 96, 192),
         (32, 70, 1030), (33, 200, 257), (67, 64, 1100), (515, 70, 130)]  # fmt: skip
GROUPS = [(32, 257), (128, 1100), (128, 96)]  # inputs that share a scale, and all inputs
CODES = [code for code in range(256) if code & 127 != 127]


def problem(dtype, outputs, inputs, **more):
    facts = {"device": "cpu", "dtype": dtype, "form": FP8}
    return LinearQuantProblem(**facts, inputs=inputs, outputs=outputs, **more)


def cast(weight):
    """What torch's own cast gives: codes as bits, and scales."""
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    inverse = torch.where(scales == 0, 0, 1 / scales)
    codes = (weight.float() * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.int8), scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 24, 64])
def test_every_code_is_its_number_exactly_in_every_place(library, dtype, rows):
    """Output o has code o + k at input k; a row of x picks one input."""
    outputs, inputs = 254, 64
    table = torch.tensor(CODES, dtype=torch.uint8).view(torch.int8)
    codes = table[(torch.arange(outputs)[:, None] + torch.arange(inputs)) % len(CODES)]
    weight = empty(outputs, inputs, FP8)
    scales = torch.full((outputs, 1), 0.5)
    weight.panels.fill_(0)
    for first in range(0, outputs, 64):
        write_panels(weight, first // 64, codes[first : first + 64], scales[first : first + 64])
    linear = bind_with(library, problem(dtype, outputs, inputs, wide=True), weight, None)
    exact = codes.view(torch.float8_e4m3fn).float().T * 0.5
    x = torch.eye(inputs, dtype=dtype)
    for first in range(0, inputs, rows):
        y = linear(x[first : first + rows])
        assert torch.equal(y, exact[first : first + rows])
    assert torch.equal(dequantize_rows(weight, torch.arange(outputs)), exact.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, outputs, inputs", SIZES)
def test_equals_the_definition_at_odd_sizes(library, dtype, rows, outputs, inputs):
    asked = problem(dtype, outputs, inputs, bias=True)
    weight, bias = weight_for(asked), values(outputs, dtype=dtype, seed=2)
    x = values(rows, inputs, dtype=dtype)
    close(
        bind_with(library, asked, weight, bias)(x),
        defined(asked, weight, bias, x),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group, inputs", GROUPS)
def test_groups_of_inputs_have_scales_of_their_own(library, dtype, group, inputs):
    """By the definition, whatever the rows beside (QNT-01: blocks of e4m3 numbers on CPUs)."""
    asked = replace(problem(dtype, 130, inputs, bias=True), form=FP8_GROUPS[group])
    weight, bias = weight_for(asked), values(130, dtype=dtype, seed=2)
    x = values(67, inputs, dtype=dtype)
    linear = bind_with(library, asked, weight, bias)
    together = linear(x)
    close(together, defined(asked, weight, bias, x), dtype)
    assert all(torch.equal(linear(x[:rows]), together[:rows]) for rows in (1, 4, 12, 33, 64))
    codes, scales = read_rows(weight, torch.arange(130))
    assert scales.shape == (130, -(-inputs // group)) and codes.shape == (130, inputs)


def test_reads_strided_rows(library):
    asked = problem(torch.bfloat16, 20, 71)
    weight, wide = weight_for(asked), values(6, 90, dtype=torch.bfloat16)
    wide[:, 74:] = float("nan")
    x = wide[::2, 3:74]
    y = bind_with(library, asked, weight, None)(x)
    close(y, defined(asked, weight, None, x), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [160, 1090])
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads(library, dtype, inputs):
    asked = problem(dtype, 150, inputs)
    linear, x = bind_with(library, asked, weight_for(asked), None), values(515, inputs, dtype=dtype)
    together = linear(x)
    few = [linear(x[:n]) for n in (2, 3, 7, 16, 17, 23, 32, 33, 49)]
    library.set_threads(1)
    for row in (0, 1, 22, 191, 192, 511, 512, 514):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
    assert all(torch.equal(part, together[: len(part)]) for part in few)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 40])
def test_a_row_with_nan_or_inf_is_not_finite_and_no_other_is_touched(library, dtype, rows):
    asked = problem(dtype, 40, 70)
    linear, x = bind_with(library, asked, weight_for(asked), None), values(rows, 70, dtype=dtype)
    clean = linear(x)
    x[1, 69], x[3, 0] = float("nan"), float("-inf")
    y = linear(x)
    assert y[1].isnan().all() and not y[3].isfinite().any()
    others = [row for row in range(rows) if row not in (1, 3)]
    assert torch.equal(y[others], clean[others])


def test_no_rows_give_no_rows(newest):
    asked = problem(torch.float32, 4, 8)
    assert bind_with(newest, asked, weight_for(asked), None)(torch.ones(0, 8)).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_check_accepts_it(newest, dtype):
    asked = problem(dtype, 3073, 1025, bias=True)
    assert OP.error(KERNEL, asked) <= OP.tolerance(asked)


def test_what_it_cannot_do_is_refused_with_the_reason(newest):
    assert "float64" in KERNEL.supports(problem(torch.float64, 4, 4))
    assert "plain rows" in KERNEL.supports(problem(torch.float32, 64, 64, quantized_rows=True))
    assert "whole panels" in KERNEL.supports(problem(torch.float32, 192, 64, activation="silu"))
    assert KERNEL.supports(problem(torch.float32, 4, 1 << 20)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (63, 33), (64, 64), (130, 100), (70, 257)])
def test_the_native_quantizer_packs_what_torchs_cast_says(library, dtype, outputs, inputs):
    weight = values(outputs, inputs + 3, dtype=dtype)[:, 1 : inputs + 1]
    # All magnitudes, denormal codes and ties between them too.
    generator = torch.Generator().manual_seed(1)
    smaller = torch.randint(0, 14, weight.shape, generator=generator)
    weight *= torch.exp2(-smaller.float()).to(dtype)
    weight[0] = 0
    expected, packed = empty(outputs, inputs, FP8), empty(outputs, inputs, FP8)
    codes, scales = cast(weight)
    write_panels(expected, 0, codes, scales)
    packed.panels.fill_(7)
    quantize_with(library, weight, packed)
    assert torch.equal(packed.panels, expected.panels)
    ours, theirs = SCHEMES["fp8"].quantize(weight), read_rows(packed, torch.arange(outputs))
    assert torch.equal(ours[0], codes) and torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], scales) and torch.equal(ours[1], theirs[1])


def test_numbers_between_two_codes_go_to_the_even_one(library):
    """A row whose scale is 1: every code, the middle between it and the next one, and what is just beside that."""
    numbers = torch.tensor(CODES, dtype=torch.uint8).view(torch.float8_e4m3fn).float().unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [middles.nextafter(middles.new_tensor(to)) for to in (-1e9, 1e9)]
    weight = torch.cat((numbers, middles, *beside))[None]
    packed = empty(1, weight.shape[1], FP8)
    quantize_with(library, weight, packed)
    codes, scales = read_rows(packed, torch.tensor([0]))
    wanted = weight.to(torch.float8_e4m3fn).float()
    assert scales.item() == 1 and torch.equal(codes.view(torch.float8_e4m3fn).float(), wanted)


def test_a_damaged_weight_gives_nan_where_it_is_and_nowhere_else(library):
    asked = problem(torch.float32, 70, 64)
    weight = values(70, 64, dtype=torch.float32)
    weight[3, 5], weight[66, 1] = float("nan"), float("inf")
    packed = empty(70, 64, FP8)
    quantize_with(library, weight, packed)
    lost = bind_with(library, asked, packed, None)(torch.ones(1, 64)).isnan()[0]
    assert lost.nonzero()[:, 0].tolist() == [3, 66]
    codes, scales, _ = SCHEMES["fp8"].quantize(weight)
    ours = read_rows(packed, torch.arange(70))
    assert torch.equal(ours[0], codes)
    assert torch.equal(ours[1].nan_to_num(-1), scales.nan_to_num(-1))


def test_weights_too_small_for_a_scale_count_as_zeros(library):
    weight = torch.full((2, 8), 1e-38)
    weight[1] = 1e-30
    packed = empty(2, 8, FP8)
    quantize_with(library, weight, packed)
    y = bind_with(library, problem(torch.float32, 2, 8), packed, None)(torch.full((1, 8), 1e20))
    assert y[0, 0] == 0 and abs(y[0, 1] - 8e-10) < 1e-15
    codes, scales, _ = SCHEMES["fp8"].quantize(weight)
    ours = read_rows(packed, torch.arange(2))
    assert torch.equal(ours[0], codes) and torch.equal(ours[1], scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_gates_in_the_product_by_the_definition_at_any_number_of_rows(library, dtype, activation):
    asked = problem(dtype, 256, 70, activation=activation)
    weight = weight_for(asked)
    linear = bind_with(library, asked, weight, None)
    x = values(67, 70, dtype=dtype)
    together = linear(x)
    assert together.shape == (67, 128)
    close(together, defined(asked, weight, None, x), dtype)
    for rows in (1, 2, 7, 16, 31):
        assert torch.equal(linear(x[:rows]), together[:rows])


def test_a_weight_of_another_coding_is_not_taken(newest):
    asked = problem(torch.float32, 64, 64)
    int8 = replace(asked, form=INT8)
    for one, other in ((asked, int8), (int8, asked)):
        with pytest.raises(AssertionError):
            bind_with(newest, one, weight_for(other), None)
    assert isinstance(weight_for(asked), PackedWeight)
