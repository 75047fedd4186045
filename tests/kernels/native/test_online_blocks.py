"""Products with weights quantized while they load, a scale per group: against the definition at odd sizes,
batch and thread invariance, extremes; the native quantizer against the scheme, bit for bit (PLT-09)."""

import pytest
import torch

from headrace.back.kernels.embedding_blocks import native as embedding_native
from headrace.back.kernels.embedding_blocks.op import EmbeddingBlocksProblem
from headrace.back.kernels.linear_blocks import op
from headrace.back.kernels.linear_blocks.layout import (
    ONLINE_LAYOUTS,
    VECTOR_LAYOUTS,
    BlockWeight,
    dequantize_rows,
    empty_segment,
    read_rows,
    write_quantized,
)
from headrace.back.kernels.linear_blocks.native import KERNEL, bind_with
from headrace.back.kernels.linear_blocks.op import OP, LinearBlocksProblem
from headrace.back.kernels.linear_blocks.quantize import quantize_with
from headrace.back.quant.kept import INT8_ASYMMETRIC
from headrace.back.quant.online import layout_of
from headrace.back.quant.scheme import ONLINE_SCHEMES
from tests.kernels.native.test_linear_blocks import close, values

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCHEMES = ONLINE_SCHEMES
GROUPED = [name for name, scheme in SCHEMES.items() if layout_of(scheme)]
INTEGERS = [name for name in GROUPED if not SCHEMES[name].floating]
USUAL = ("int8-asym-g64", "iq2")
# rows, outputs, inputs: below, at and above every tile, panel, group and block width
SIZES = [(1, 1, 1), (1, 63, 7), (1, 64, 64), (2, 65, 33), (3, 130, 31), (5, 37, 100), (7, 128, 96), (9, 64, 320),
         (17, 96, 192), (33, 200, 257), (67, 70, 130)]  # fmt: skip


def problem(name, dtype, outputs, inputs, bias=False):
    kinds = ((layout_of(SCHEMES[name]).name, outputs),)
    return LinearBlocksProblem(device="cpu", dtype=dtype, inputs=inputs, kinds=kinds, bias=bias)


def weight_for(asked, seed=1):
    return op.random_weight(asked, torch.Generator().manual_seed(seed))


def defined(asked, weight, bias, x):
    """The definition's result before it is rounded to the dtype."""
    return op.bind_reference(asked, weight, None if bias is None else bias.float())(x.float())


def test_every_grouped_scheme_has_a_coding_and_every_coding_a_scheme():
    schemes = [SCHEMES[name] for name in GROUPED] + list(INT8_ASYMMETRIC.values())
    assert {layout_of(scheme).name for scheme in schemes} == {*ONLINE_LAYOUTS, "MXFP4"}


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(
            layout,
            dtype,
            marks=() if dtype is torch.bfloat16 and layout in USUAL else pytest.mark.slow,
        )
        for layout in (*(f"int8-asym-g{group}" for group in (32, 64, 128)), *VECTOR_LAYOUTS)
        for dtype in DTYPES
    ],
)
def test_what_checkpoints_alone_store_equals_the_definition(library, layout, dtype):
    for rows, outputs, inputs in SIZES:
        kinds = ((layout, outputs),)
        asked = LinearBlocksProblem(
            device="cpu", dtype=dtype, inputs=inputs, kinds=kinds, bias=True
        )
        weight, bias = weight_for(asked), values(outputs, dtype=dtype, seed=2)
        x = values(rows, inputs + 8, dtype=dtype)[:, 4:-4]
        exact = defined(asked, weight, bias, x)
        close(bind_with(library, asked, weight, bias)(x), exact, dtype)


@pytest.mark.parametrize("name", VECTOR_LAYOUTS)
def test_levels_of_vectors_lie_as_they_are_written(name):
    """Their magnitudes from the lowest number on, then the same below 0."""
    layout = VECTOR_LAYOUTS[name]
    levels = torch.tensor(layout.levels, dtype=torch.int8)
    segment = empty_segment(layout, 64, 32)
    wanted = levels[torch.randint(0, 16, (64, 32), generator=torch.Generator().manual_seed(1))]
    scales = torch.full((64, 32 // layout.part), 0.5)
    write_quantized(segment, 0, wanted, scales, None)
    found, read, _ = read_rows(segment, torch.arange(64))
    assert torch.equal(found.to(torch.int8), wanted) and torch.equal(read, scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GROUPED)
def test_equals_the_definition_at_odd_sizes(library, name, dtype):
    for rows, outputs, inputs in SIZES:
        asked = problem(name, dtype, outputs, inputs, bias=True)
        weight, bias = weight_for(asked), values(outputs, dtype=dtype, seed=2)
        x = values(rows, inputs + 8, dtype=dtype)[:, 4:-4]
        exact = defined(asked, weight, bias, x)
        close(bind_with(library, asked, weight, bias)(x), exact, dtype)


@pytest.mark.parametrize("name", GROUPED)
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads(library, name):
    asked = problem(name, torch.bfloat16, 300, 288)
    linear = bind_with(library, asked, weight_for(asked), None)
    x = values(203, 288, dtype=torch.bfloat16)
    together, few = linear(x), [linear(x[:n]) for n in (2, 3, 4, 7, 16, 17, 23)]
    library.set_threads(1)
    for row in (0, 1, 22, 63, 64, 191, 192, 202):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
    assert all(torch.equal(part, together[: len(part)]) for part in few)


@pytest.mark.parametrize("name", GROUPED)
def test_a_row_with_nan_or_inf_is_nan_and_no_other(library, name):
    asked = problem(name, torch.float32, 40, 70)
    linear, x = (
        bind_with(library, asked, weight_for(asked), None),
        values(5, 70, dtype=torch.float32),
    )
    clean = linear(x)
    x[1, 69], x[3, 0] = float("nan"), float("-inf")
    y = linear(x)
    assert y[[1, 3]].isnan().all()
    assert torch.equal(y[[0, 2, 4]], clean[[0, 2, 4]])


@pytest.mark.parametrize("name", GROUPED)
def test_the_largest_codes_do_not_overflow(library, name):
    """Every product at its largest, all of one sign."""
    inputs, layout = 4096, layout_of(SCHEMES[name])
    segment = empty_segment(layout, 64, inputs)
    for byte in (0, 255):
        segment.panels.fill_(byte)
        header = segment.panels.view(-1, layout.block_bytes)[:, : layout.header_bytes]
        header.view(torch.bfloat16).fill_(0.5)
        x = torch.cat((torch.ones(5, inputs), -torch.ones(5, inputs)))
        exact = x @ dequantize_rows(segment, torch.arange(64)).T
        linear = bind_with(
            library, problem(name, torch.float32, 64, inputs), BlockWeight(inputs, (segment,)), None
        )
        torch.testing.assert_close(linear(x), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INTEGERS)
def test_the_native_quantizer_packs_what_the_scheme_says(library, name, dtype):
    for outputs, inputs in ((1, 1), (63, 33), (64, 64), (130, 100), (70, 257)):
        weight = values(outputs, inputs + 3, dtype=dtype)[:, 1 : inputs + 1]
        weight[0] = 0
        layout = layout_of(SCHEMES[name])
        ours, theirs = (empty_segment(layout, outputs, inputs) for _ in range(2))
        write_quantized(theirs, 0, *SCHEMES[name].quantize(weight))
        ours.panels.fill_(7)
        quantize_with(library, weight, ours)
        rows = torch.arange(outputs)
        for mine, expected in zip(read_rows(ours, rows), read_rows(theirs, rows), strict=True):
            assert (mine is None and expected is None) or torch.equal(mine, expected)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_damaged_weight_gives_nan_where_it_is_and_nowhere_else(newest, name):
    weight = values(70, 64, dtype=torch.float32)
    weight[3, 5], weight[66, 1] = float("nan"), float("inf")
    segment = empty_segment(layout_of(SCHEMES[name]), 70, 64)
    quantize_with(newest, weight, segment)
    linear = bind_with(
        newest, problem(name, torch.float32, 70, 64), BlockWeight(64, (segment,)), None
    )
    lost = linear(torch.ones(1, 64)).isnan()[0]
    assert lost.nonzero()[:, 0].tolist() == [3, 66]


@pytest.mark.parametrize("name", GROUPED)
def test_rows_of_a_table_are_those_of_the_layout(library, name):
    for rows, width in ((1, 1), (64, 32), (131, 70), (200, 257)):
        asked = problem(name, torch.float32, rows, width)
        table = weight_for(asked)
        lookup = EmbeddingBlocksProblem(
            device="cpu", dtype=torch.float32, layout=asked.kinds[0][0], rows=rows, width=width
        )
        ids = torch.arange(rows).flip(0)
        exact = dequantize_rows(table.segments[0], ids)
        assert torch.equal(embedding_native.bind_with(library, lookup, table)(ids), exact)


@pytest.mark.parametrize("name", GROUPED)
def test_the_self_check_accepts_it(newest, name):
    for dtype in DTYPES:
        asked = problem(name, dtype, 3073, 1025, bias=True)
        assert OP.error(KERNEL, asked) <= OP.tolerance(asked)


def test_segments_must_agree_on_the_groups_of_activations():
    asked = LinearBlocksProblem(
        device="cpu", dtype=torch.float32, inputs=256, kinds=(("Q8_0", 64), ("int4-g64", 64))
    )
    assert "groups of one size" in KERNEL.supports(asked)
