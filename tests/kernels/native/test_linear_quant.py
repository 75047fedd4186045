"""The native linear with int8 weights against its definition: odd sizes, strides, extreme values; batch and thread
invariance (PLT-09: packed once, read in place)."""

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.linear_quant.layout import (
    PackedWeight,
    empty,
    read_rows,
    with_fixed,
    write_panels,
)
from headrace.back.kernels.linear_quant.native import KERNEL, MAX_INPUTS, bind_with
from headrace.back.kernels.linear_quant.op import OP, LinearQuantProblem
from headrace.back.kernels.linear_quant.quantize import quantize_with
from headrace.back.kernels.linear_quant.rows import FixedScale, QuantizedRows, quantize_rows
from headrace.back.quant.scheme import SCHEMES
from tests.kernels.native.panels import DTYPES, close, defined, values, weight_for

pytestmark = pytest.mark.usefixtures("poisoned")
# rows, outputs, inputs: below, at and above every tile, panel, group and block width
SIZES = [(1, 1, 1), (1, 63, 7), (1, 64, 64), (2, 65, 33), (3, 130, 31), (5, 37, 100), (7, 128, 96),
         (17, 96, 192), (33, 200, 257), (195, 70, 130)]  # fmt: skip


def problem(dtype, outputs, inputs, bias=True):
    return LinearQuantProblem(device="cpu", dtype=dtype, inputs=inputs, outputs=outputs, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, outputs, inputs", SIZES)
def test_equals_the_definition_at_odd_sizes(library, dtype, rows, outputs, inputs):
    asked = problem(dtype, outputs, inputs)
    weight, bias = weight_for(asked), values(outputs, dtype=dtype, seed=2)
    x = values(rows, inputs, dtype=dtype)
    exact = defined(asked, weight, bias, x)
    close(bind_with(library, asked, weight, bias)(x), exact, dtype)


FIXED = (FixedScale(1 / 32), FixedScale(1 / 32, -9), FixedScale(1 / 48, 127))


@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize(
    "rows, outputs, inputs", [(1, 1, 1), (3, 130, 31), (7, 64, 100), (65, 128, 257)]
)
def test_a_scale_of_all_rows_is_the_one_that_is_held(library, fixed, rows, outputs, inputs):
    """QNT-17: integers that reach -128 on both sides, with a zero point or without; rows that are quantized here or
    before, the same bits."""
    asked = replace(problem(torch.bfloat16, outputs, inputs, bias=False), fixed=True)
    codes = torch.randint(
        -128, 128, (outputs, inputs), generator=torch.Generator().manual_seed(4), dtype=torch.int8
    )
    codes[0] = -128
    weight = empty(outputs, inputs)
    write_panels(weight, 0, codes, torch.rand(outputs, 1) / 128)
    weight = with_fixed(weight, codes, fixed)
    x = values(rows, inputs, dtype=torch.bfloat16) * 3
    x[0] = -1e4
    exact = defined(asked, weight, None, x)
    y = bind_with(library, asked, weight, None)(x)
    close(y, exact, torch.bfloat16)
    quantized = quantize_rows(x, None, fixed)
    assert (quantized.values_TP[0, :inputs] == -128).all()
    before = bind_with(library, replace(asked, quantized_rows=True), weight, None)
    assert torch.equal(before(quantized), y)
    x[rows // 2, inputs // 2] = float("nan")
    lost = bind_with(library, asked, weight, None)(x)
    assert lost[rows // 2].isnan().all() and lost.isnan().sum() == outputs


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_the_largest_codes_without_overflow(library, dtype):
    """Every product at its largest, all of one sign, over as many inputs as the kernel takes."""
    inputs = MAX_INPUTS
    asked = problem(dtype, 64, inputs, bias=False)
    panels = weight_for(asked).panels
    scale = 2**-8 if dtype == torch.float16 else 1.0  # the sum is past what float16 holds
    panels[:, :256].view(torch.float32).fill_(scale)
    panels[:, 256:] = 255
    exact = float(inputs) * 127 * scale
    linear = bind_with(library, asked, PackedWeight(64, inputs, panels), None)
    y = linear(torch.stack((torch.ones(inputs), -torch.ones(inputs))).to(dtype))
    close(y, torch.tensor([[exact] * 64, [-exact] * 64]), dtype)


def test_reads_strided_rows(library):
    asked = problem(torch.bfloat16, 20, 71, bias=False)
    weight, wide = weight_for(asked), values(6, 90, dtype=torch.bfloat16)
    x = wide[::2, 3:74]
    y = bind_with(library, asked, weight, None)(x)
    close(y, defined(asked, weight, None, x), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads(library, dtype):
    asked = problem(dtype, 300, 160, bias=False)
    linear, x = bind_with(library, asked, weight_for(asked), None), values(203, 160, dtype=dtype)
    together, few = linear(x), [linear(x[:n]) for n in (2, 3, 7, 23)]
    library.set_threads(1)
    assert torch.equal(linear(x), together)
    assert torch.equal(torch.cat([linear(row[None]) for row in x]), together)
    assert all(torch.equal(part, together[: len(part)]) for part in few)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("rows, inputs", [(64, 33), (65, 64), (113, 384), (1100, 1000)])
def test_many_rows_of_codes_are_the_same_rows_one_at_a_time(library, rows, inputs, activation):
    """Blocks of 32 rows, parts of one, several chunks of rows; inputs below, at and above a tile."""
    asked = replace(
        problem(torch.bfloat16, 256, inputs, bias=False), activation=activation, quantized_rows=True
    )
    linear = bind_with(library, asked, weight_for(asked), None)
    x = quantize_rows(values(rows, inputs, dtype=torch.bfloat16), None)
    library.set_threads(1)
    together = linear(x)
    for row in range(0, rows, 1 + rows // 100):
        alone = QuantizedRows(*(part[row : row + 1] for part in x))
        assert torch.equal(linear(alone)[0], together[row]), row
    library.set_threads(3)
    assert torch.equal(linear(x), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_nan_or_inf_is_nan_and_no_other(library, dtype):
    asked = problem(dtype, 40, 70, bias=False)
    linear, x = bind_with(library, asked, weight_for(asked), None), values(5, 70, dtype=dtype)
    clean = linear(x)
    x[1, 69], x[3, 0] = float("nan"), float("-inf")
    y = linear(x)
    assert y[[1, 3]].isnan().all()
    assert torch.equal(y[[0, 2, 4]], clean[[0, 2, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_give_the_bias_and_outliers_their_column(library, dtype):
    asked = problem(dtype, 70, 64)
    weight, bias = weight_for(asked), values(70, dtype=dtype, seed=2)
    x = torch.zeros(3, 64, dtype=dtype)
    x[1] = values(64, dtype=dtype) * 1e-3
    x[1, 5], x[2] = 1e3 if dtype is torch.float16 else 1e6, 1e-35
    y = bind_with(library, asked, weight, bias)(x)
    assert torch.equal(y[0], bias) and torch.equal(y[2], bias)
    close(y, defined(asked, weight, bias, x), dtype)


def test_no_rows_give_no_rows(newest):
    asked = problem(torch.float32, 4, 8, bias=False)
    assert bind_with(newest, asked, weight_for(asked), None)(torch.ones(0, 8)).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_check_accepts_it(newest, dtype):
    asked = problem(dtype, 3073, 1025)
    assert OP.error(KERNEL, asked) <= OP.tolerance(asked)
    fixed = replace(asked, fixed=True)
    assert OP.error(KERNEL, fixed) <= OP.tolerance(fixed)


def test_what_it_cannot_do_is_refused_with_the_reason(newest):
    assert "float64" in KERNEL.supports(problem(torch.float64, 4, 4))
    assert "65536" in KERNEL.supports(problem(torch.float32, 4, 65537))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (63, 33), (64, 64), (130, 100), (70, 257)])
def test_the_native_quantizer_packs_what_the_scheme_says(library, dtype, outputs, inputs):
    weight = values(outputs, inputs + 3, dtype=dtype)[:, 1 : inputs + 1]
    weight[0] = 0
    expected, packed = empty(outputs, inputs), empty(outputs, inputs)
    codes, scales, _ = SCHEMES["int8"].quantize(weight)
    write_panels(expected, 0, codes, scales)
    packed.panels.fill_(7)
    quantize_with(library, weight, packed)
    rows = torch.arange(outputs)
    for ours, theirs in zip(read_rows(packed, rows), read_rows(expected, rows), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(packed.panels, expected.panels)


def test_a_damaged_weight_gives_nan_where_it_is_and_nowhere_else(newest):
    asked = problem(torch.float32, 70, 64, bias=False)
    weight = values(70, 64, dtype=torch.float32)
    weight[3, 5], weight[66, 1] = float("nan"), float("inf")
    packed = empty(70, 64)
    quantize_with(newest, weight, packed)
    lost = bind_with(newest, asked, packed, None)(torch.ones(1, 64)).isnan()[0]
    assert lost.nonzero()[:, 0].tolist() == [3, 66]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_gates_in_the_product_by_the_definition_at_any_number_of_rows(library, dtype, activation):
    asked = replace(problem(dtype, 256, 70, bias=False), activation=activation)
    weight = weight_for(asked)
    linear = bind_with(library, asked, weight, None)
    x = values(67, 70, dtype=dtype)
    together = linear(x)
    assert together.shape == (67, 128)
    close(together, defined(asked, weight, None, x), dtype)
    for rows in (1, 2, 7, 8, 31):
        assert torch.equal(linear(x[:rows]), together[:rows])


def test_what_it_cannot_gate_is_refused_with_the_reason(newest):
    asked = problem(torch.float32, 192, 64, bias=False)
    assert "whole panels" in KERNEL.supports(replace(asked, activation="silu"))
    assert "without a bias" in KERNEL.supports(replace(asked, activation="silu", bias=True))
    assert OP.error(KERNEL, replace(asked, outputs=6144, activation="silu")) <= 2e-5
