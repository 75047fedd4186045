"""Norms that leave rows of int8 codes, and the products that read them: the bits of norm, quantization and product made
one after the other, whatever the group, the size and the rows beside a row."""

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.linear_blocks import native as blocks_native
from headrace.back.kernels.linear_blocks import op as blocks_op
from headrace.back.kernels.linear_blocks.op import OP as BLOCKS_OP
from headrace.back.kernels.linear_blocks.op import LinearBlocksProblem
from headrace.back.kernels.linear_quant import native as quant_native
from headrace.back.kernels.linear_quant import op as quant_op
from headrace.back.kernels.linear_quant.op import OP as QUANT_OP
from headrace.back.kernels.linear_quant.op import LinearQuantProblem
from headrace.back.kernels.linear_quant.rows import FixedScale, quantize_rows
from headrace.back.kernels.rms_norm.native import bind_add_norm_with, bind_norm_with
from headrace.back.kernels.rms_norm.op import RMSNormProblem
from headrace.back.kernels.rms_norm_quant.native import KERNEL, bind_with
from headrace.back.kernels.rms_norm_quant.op import OP, RMSNormQuantProblem

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUPS = [None, 32, 64, 128]
# The layout whose product reads groups of so many inputs.
LAYOUTS = {32: ("Q4_0", "int4-g32"), 64: ("int8-g64",), 128: ("int4-asym-g128",)}


def problem(dtype, width, group):
    return RMSNormQuantProblem(device="cpu", dtype=dtype, width=width, eps=1e-6, group=group)


def plain(asked):
    return RMSNormProblem(device="cpu", dtype=asked.dtype, width=asked.width, eps=asked.eps)


def values(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(ours, theirs):
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected) or torch.equal(mine.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "rows, width", [(1, 1), (1, 32), (2, 33), (3, 100), (5, 257), (17, 128), (64, 1024)]
)
def test_codes_are_those_of_the_norms_result(library, dtype, group, rows, width):
    asked, weight = problem(dtype, width, group), values(width, dtype=torch.float32, seed=3)
    x = values(rows, width + 9, dtype=dtype)[:, 2 : width + 2]
    quantized = bind_with(library, asked, weight)
    normed = bind_norm_with(library, plain(asked), weight)(x)
    assert_same(quantized(x, None), quantize_rows(normed, group))
    if group is None:
        held, fixed = FixedScale(1 / 64, 5), replace(asked, fixed=True)
        assert_same(
            bind_with(library, fixed, weight, held)(x, None), quantize_rows(normed, None, held)
        )
    residual = values(rows, width, dtype=dtype, seed=1)
    added = residual.clone()
    normed = bind_add_norm_with(library, plain(asked), weight)(x, added)
    assert_same(quantized(x, residual), quantize_rows(normed, group))
    assert torch.equal(residual, added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_row_with_nan_or_inf_is_lost_and_no_other(library, dtype, group):
    x = values(5, 70, dtype=dtype)
    quantized = bind_with(library, problem(dtype, 70, group), torch.ones(70))
    clean = quantized(x, None)
    x[1, 69], x[3, 0] = float("nan"), float("-inf")
    lost = quantized(x, None)
    assert lost.scales_TG[[1, 3]].isnan().any(1).all()
    for ours, theirs in zip(lost, clean, strict=True):
        assert torch.equal(ours[[0, 2, 4]], theirs[[0, 2, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_int8_product_of_codes_is_that_of_the_rows(library, dtype, activation):
    asked = LinearQuantProblem(
        device="cpu", dtype=dtype, inputs=100, outputs=256, activation=activation
    )
    weight = quant_op.random_weight(asked, torch.Generator().manual_seed(1))
    whole = quant_native.bind_with(library, asked, weight, None)
    product = quant_native.bind_with(library, replace(asked, quantized_rows=True), weight, None)
    x = values(64, 100, dtype=dtype)
    for rows in (1, 2, 3, 5, 7, 8, 31, 33, 64):
        assert torch.equal(product(quantize_rows(x[:rows], None)), whole(x[:rows]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_product_of_blocks_of_codes_is_that_of_the_rows(library, dtype, activation, group):
    kinds = tuple((layout, 128) for layout in LAYOUTS[group])
    asked = LinearBlocksProblem(
        device="cpu", dtype=dtype, inputs=160, kinds=kinds, activation=activation
    )
    weight = blocks_op.random_weight(asked, torch.Generator().manual_seed(1))
    whole = blocks_native.bind_with(library, asked, weight, None)
    product = blocks_native.bind_with(library, replace(asked, quantized_rows=True), weight, None)
    x = values(64, 160, dtype=dtype)
    for rows in (1, 2, 4, 5, 6, 7, 33, 64):
        assert torch.equal(product(quantize_rows(x[:rows], group)), whole(x[:rows]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_and_wide_results_are_as_without_codes(library, dtype):
    x, bias = values(3, 96, dtype=dtype), values(70, dtype=dtype, seed=2)
    quant = LinearQuantProblem(device="cpu", dtype=dtype, inputs=96, outputs=70)
    blocks = LinearBlocksProblem(device="cpu", dtype=dtype, inputs=96, kinds=(("Q8_0", 70),))
    for native, op, asked, group in (
        (quant_native, quant_op, quant, None),
        (blocks_native, blocks_op, blocks, 32),
    ):
        weight = op.random_weight(asked, torch.Generator().manual_seed(1))
        for facts, given in (({"wide": True}, None), ({"bias": True}, bias)):
            one = replace(asked, **facts)
            product = native.bind_with(library, replace(one, quantized_rows=True), weight, given)
            expected = native.bind_with(library, one, weight, given)(x)
            assert torch.equal(product(quantize_rows(x, group)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_the_self_checks_accept_them(newest, dtype, group):
    asked = problem(dtype, 1024, group)
    assert OP.error(KERNEL, asked) <= OP.tolerance(asked)
    quant = LinearQuantProblem(
        device="cpu", dtype=dtype, inputs=1024, outputs=6144, quantized_rows=True
    )
    assert QUANT_OP.error(quant_native.KERNEL, quant) <= QUANT_OP.tolerance(quant)
    kinds = (("Q4_K", 2048), ("Q6_K", 1024))
    blocks = LinearBlocksProblem(
        device="cpu", dtype=dtype, inputs=1024, kinds=kinds, quantized_rows=True
    )
    assert BLOCKS_OP.error(blocks_native.KERNEL, blocks) <= BLOCKS_OP.tolerance(blocks)


def test_no_rows_give_no_codes(newest):
    weight = torch.ones(64)
    codes = bind_with(newest, problem(torch.float32, 64, None), weight)(torch.ones(0, 64), None)
    assert [part.shape[0] for part in codes] == [0, 0, 0]


def test_what_it_cannot_do_is_refused_with_the_reason(newest):
    assert "multiples of 32" in KERNEL.supports(problem(torch.float32, 64, 48))
    assert "float64" in KERNEL.supports(problem(torch.float64, 64, None))
