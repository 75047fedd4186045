"""Many rows by block-quantized weights without quantizing them: the kernel against its definition at odd sizes, its
rows against each other, and that few rows are left to the kernel of codes, to the bit (QNT-15)."""

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.linear_blocks import native, native_dequantized, op
from headrace.back.kernels.linear_blocks.layout import LAYOUTS, dequantize_rows
from headrace.back.kernels.linear_blocks.op import OP, LinearBlocksProblem
from headrace.back.kernels.linear_quant.rows import quantize_rows
from headrace.back.kernels.native.library import NativeLibrary
from headrace.base.errors import ConfigError

pytestmark = pytest.mark.usefixtures("poisoned")
NAMES = sorted(LAYOUTS)
# rows, inputs, outputs: below, at and above tiles of 16 and 32, stretches, panels, blocks of rows that stay in a cache
SIZES = [(1, 256, 1), (15, 512, 63), (16, 256, 64), (17, 768, 65), (33, 1280, 130), (47, 256, 37), (515, 256, 70),
         (201, 6144, 5)]  # fmt: skip


@pytest.fixture
def tiles(newest):
    """The library three threads wide, on a CPU with matrix tiles: elsewhere the kernel is not there."""
    if not newest.has(native_dequantized.NAME):
        pytest.skip(f"{newest.isa} has no matrix tiles")
    newest.set_threads(3)
    return newest


def problem(inputs, *kinds, **more):
    facts = {"device": "cpu", "dtype": torch.bfloat16, "inputs": inputs, "kinds": kinds}
    return LinearBlocksProblem(**facts, **{"plain_from": 1, **more})


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weight_for(asked):
    return op.random_weight(asked, torch.Generator().manual_seed(1))


def close(ours, exact, bound):
    error = (ours.double() - exact.double()).abs().max() / exact.double().abs().max()
    assert error <= bound, error


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition_at_odd_sizes(tiles, name):
    for rows, inputs, outputs in SIZES:
        asked = problem(inputs, (name, outputs), wide=True)
        weight, x = weight_for(asked), values(rows, inputs + 8)[:, 4:-4]
        exact = op.bind_reference(asked, weight, None)(x)
        close(native_dequantized.bind_with(tiles, asked, weight, None)(x), exact, 4e-6)
        asked, bias = replace(asked, wide=False, bias=True), values(outputs, seed=2)
        exact = op.bind_reference(replace(asked, wide=True), weight, bias)(x)
        close(native_dequantized.bind_with(tiles, asked, weight, bias)(x), exact, 4e-3)


@pytest.mark.parametrize("name", ["int4-g32", "int4-asym-g64", "int8-g128"])
def test_inputs_may_end_within_a_group(tiles, name):
    for inputs in (1, 31, 40, 100, 1030):
        asked = problem(inputs, (name, 70), wide=True)
        weight, x = weight_for(asked), values(34, inputs)
        exact = op.bind_reference(asked, weight, None)(x)
        close(native_dequantized.bind_with(tiles, asked, weight, None)(x), exact, 4e-6)


def test_segments_lie_side_by_side(tiles):
    kinds = (("Q4_K", 100), ("Q8_0", 7), ("Q6_K", 64), ("IQ4_XS", 1))
    asked, x = problem(512, *kinds), values(70, 512)
    weight = weight_for(asked)
    together = native_dequantized.bind_with(tiles, asked, weight, None)(x)
    alone = [
        native_dequantized.bind_with(
            tiles, problem(512, kind), replace(weight, segments=(one,)), None
        )(x)
        for kind, one in zip(kinds, weight.segments, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone, 1))


@pytest.mark.parametrize("name", ["int4-g32", "Q4_K"])
def test_gates_in_the_product(tiles, name):
    """Also where gate and up are segments of their own."""
    for kinds in (((name, 256),), ((name, 128), (name, 128)), ((name, 192), (name, 64))):
        asked, x = problem(512, *kinds, activation="silu"), values(67, 512)
        weight = weight_for(asked)
        y = native_dequantized.bind_with(tiles, asked, weight, None)(x)
        assert y.shape == (67, 128)
        close(y, op.bind_reference(replace(asked, wide=True), weight, None)(x), 4e-3)


def test_among_many_rows_none_depends_on_the_others_nor_on_the_threads(tiles):
    asked, x = problem(1056, ("int4-g32", 150)), values(515, 1056)
    linear = native_dequantized.bind_with(tiles, asked, weight_for(asked), None)
    together = linear(x)
    few = [linear(x[:n]) for n in (1, 16, 17, 32, 49, 300)]
    assert all(torch.equal(part, together[: len(part)]) for part in few)
    tiles.set_threads(1)
    assert torch.equal(linear(x), together)


def test_a_row_with_nan_or_inf_is_not_finite_and_no_other_is_touched(tiles):
    asked, x = problem(256, ("int4-g32", 40)), values(70, 256)
    linear = native_dequantized.bind_with(tiles, asked, weight_for(asked), None)
    clean = linear(x)
    x[1, 255], x[3, 0] = float("nan"), float("-inf")
    y = linear(x)
    assert y[1].isnan().all() and not y[3].isfinite().any()
    others = [row for row in range(70) if row not in (1, 3)]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("quantized_rows", [False, True])
def test_few_rows_are_those_of_the_kernel_of_codes_to_the_bit(tiles, quantized_rows):
    asked = problem(512, ("int4-g32", 130), plain_from=48, quantized_rows=quantized_rows)
    weight, x = weight_for(asked), values(48, 512)
    linear = native_dequantized.bind_with(tiles, asked, weight, None)
    codes = native.bind_with(
        tiles, replace(asked, plain_from=None, quantized_rows=False), weight, None
    )
    few = quantize_rows(x[:47], weight.x_group) if quantized_rows else x[:47]
    assert torch.equal(linear(few), codes(x[:47]))
    many = native_dequantized.bind_with(tiles, replace(asked, plain_from=1), weight, None)
    assert torch.equal(linear(x), many(x)) and not torch.equal(linear(x), codes(x))


@pytest.mark.parametrize("name", ["int4-g32", "int4-asym-g128", "Q4_K", "Q6_K"])
def test_is_nearer_to_the_product_with_the_weight_than_codes_are(tiles, name):
    asked, x = problem(1024, (name, 96), wide=True), values(64, 1024)
    weight = weight_for(asked)
    exact = x.double() @ dequantize_rows(weight.segments[0], torch.arange(96)).double().T
    ours = native_dequantized.bind_with(tiles, asked, weight, None)(x)
    codes = native.bind_with(tiles, replace(asked, plain_from=None), weight, None)(x)
    assert 2 * (ours - exact).norm() < (codes - exact).norm()


@pytest.mark.parametrize("quantized_rows", [False, True])
def test_it_passes_its_self_check(tiles, quantized_rows):
    asked = problem(1024, ("int4-g32", 3073), plain_from=64, quantized_rows=quantized_rows)
    assert OP.error(native_dequantized.KERNEL, asked) <= OP.tolerance(asked)


def test_it_is_chosen_where_rows_may_differ(newest):
    asked = problem(1024, ("int4-g32", 3073), plain_from=64)
    chosen = OP.choose(asked).kernel
    assert chosen is (
        native_dequantized.KERNEL if newest.has(native_dequantized.NAME) else OP.reference
    )
    assert OP.choose(replace(asked, plain_from=None)).kernel is native.KERNEL
    with pytest.raises(ConfigError, match="depend on the batch"):
        OP.choose(asked, invariant=True)


def test_what_it_cannot_do_is_refused_with_the_reason(newest, library_path):
    asked = problem(512, ("Q4_0", 192))
    supports = native_dequantized.KERNEL.supports
    assert "float16" in supports(replace(asked, dtype=torch.float16))
    assert "whole panels" in supports(replace(asked, activation="silu"))
    assert "many rows" in supports(replace(asked, plain_from=None))
    assert not NativeLibrary(library_path, isa=newest.isas[0]).has(native_dequantized.NAME)
