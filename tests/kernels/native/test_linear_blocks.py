"""Products with a checkpoint's quantized blocks: what the panels mean against the `gguf` library, bit for bit; the
kernel against its definition; batch and thread invariance; odd sizes, damaged scales (QNT-15, QNT-17)."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from headrace.back.kernels.embedding_blocks import native as embedding_native
from headrace.back.kernels.embedding_blocks.op import OP as EMBEDDING
from headrace.back.kernels.embedding_blocks.op import EmbeddingBlocksProblem
from headrace.back.kernels.linear_blocks import op
from headrace.back.kernels.linear_blocks.layout import (
    LAYOUTS,
    STORED_LAYOUTS,
    BlockWeight,
    dequantize_rows,
    empty_segment,
)
from headrace.back.kernels.linear_blocks.native import KERNEL, bind_with, pack_rows
from headrace.back.kernels.linear_blocks.op import OP, LinearBlocksProblem
from headrace.back.kernels.native.library import NativeError
from tests.kernels.native.blocks import SCALES_AT, dequantized, random_blocks

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = sorted(STORED_LAYOUTS)


def packed(library, name, rows, inputs, seed=0):
    """A segment packed from random blocks, and the blocks."""
    raw = random_blocks(name, rows, inputs, seed)
    segment = empty_segment(LAYOUTS[name], rows, inputs)
    assert pack_rows(library, segment, 0, raw, np.arange(rows)) is None
    return segment, raw


def problem(dtype, inputs, *kinds, bias=False):
    return LinearBlocksProblem(device="cpu", dtype=dtype, inputs=inputs, kinds=kinds, bias=bias)


def values(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours, exact, dtype):
    bound = {torch.float32: 4e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]
    error = (ours.double() - exact.double()).abs().max() / exact.double().abs().max()
    assert error <= bound, error


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows, blocks", [(1, 1), (63, 2), (130, 3)])
def test_panels_mean_what_the_blocks_mean_bit_for_bit(library, name, rows, blocks):
    inputs = blocks * LAYOUTS[name].block
    segment, raw = packed(library, name, rows, inputs)
    exact = torch.from_numpy(dequantized(name, raw))
    assert torch.equal(dequantize_rows(segment, torch.arange(rows)), exact)
    table = BlockWeight(inputs, (segment,))
    asked = EmbeddingBlocksProblem(
        device="cpu", dtype=torch.float32, layout=name, rows=rows, width=inputs
    )
    ids = torch.tensor([rows - 1, 0, rows // 2])
    assert torch.equal(embedding_native.bind_with(library, asked, table)(ids), exact[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition(library, name, dtype):
    for rows, outputs, inputs in ((1, 65, 256), (3, 37, 512), (6, 130, 256)):
        segment, _ = packed(library, name, outputs, inputs)
        weight, bias = BlockWeight(inputs, (segment,)), values(outputs, dtype=dtype, seed=2)
        asked = problem(dtype, inputs, (name, outputs), bias=True)
        x = values(rows, inputs + 8, dtype=dtype)[:, 4:-4]
        exact = op.bind_reference(asked, weight, bias.float())(x.float())
        close(bind_with(library, asked, weight, bias)(x), exact, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_is_near_the_product_with_the_widened_weight(newest, name):
    """Only the rounding of the activations lies between: half a step of 1/127 of the largest of 32."""
    segment, raw = packed(newest, name, 96, 1024)
    x = values(4, 1024, dtype=torch.float32)
    exact = x @ torch.from_numpy(dequantized(name, raw)).T
    y = bind_with(
        newest, problem(torch.float32, 1024, (name, 96)), BlockWeight(1024, (segment,)), None
    )(x)
    assert (y - exact).norm() / exact.norm() < 0.012


def test_blocks_of_32_may_be_an_odd_number(library):
    for name in ("Q8_0", "Q4_0", "Q5_1", "IQ4_NL"):
        segment, _ = packed(library, name, 70, 96)
        weight, asked = BlockWeight(96, (segment,)), problem(torch.float32, 96, (name, 70))
        x = values(5, 96, dtype=torch.float32)
        exact = op.bind_reference(asked, weight, None)(x)
        close(bind_with(library, asked, weight, None)(x), exact, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_of_several_codings_lie_side_by_side(library, dtype):
    kinds = (("Q4_K", 100), ("Q8_0", 7), ("Q6_K", 64), ("IQ4_XS", 1))
    segments = tuple(packed(library, name, size, 512, i)[0] for i, (name, size) in enumerate(kinds))
    asked = problem(dtype, 512, *kinds)
    x = values(9, 512, dtype=dtype)
    together = bind_with(library, asked, BlockWeight(512, segments), None)(x)
    alone = [
        bind_with(library, problem(dtype, 512, kind), BlockWeight(512, (segment,)), None)(x)
        for kind, segment in zip(kinds, segments, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone, 1))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q2_K"])
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads(library, name):
    segment, _ = packed(library, name, 300, 256)
    asked = problem(torch.bfloat16, 256, (name, 300))
    linear = bind_with(library, asked, BlockWeight(256, (segment,)), None)
    x = values(203, 256, dtype=torch.bfloat16)
    together, few = linear(x), [linear(x[:n]) for n in (2, 3, 7, 23)]
    library.set_threads(1)
    for row in (0, 1, 22, 191, 192, 202):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
    assert all(torch.equal(part, together[: len(part)]) for part in few)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_with_nan_or_inf_is_nan_and_no_other(library, name):
    segment, _ = packed(library, name, 40, 256)
    asked = problem(torch.float32, 256, (name, 40))
    linear = bind_with(library, asked, BlockWeight(256, (segment,)), None)
    x = values(5, 256, dtype=torch.float32)
    clean = linear(x)
    x[1, 255], x[3, 0] = float("nan"), float("-inf")
    y = linear(x)
    assert y[[1, 3]].isnan().all()
    assert torch.equal(y[[0, 2, 4]], clean[[0, 2, 4]])


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_codes_do_not_overflow(library, name):
    """All codes and activations at the ends of their ranges, all of one sign."""
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        raw = random_blocks(name, 64, 256)
        keep = raw.copy()
        raw[:] = byte
        blocks, kept = (part.reshape(-1, LAYOUTS[name].size) for part in (raw, keep))
        for at in SCALES_AT.get(name, (0,)):
            blocks[:, at : at + 2] = kept[:, at : at + 2]
        segment = empty_segment(LAYOUTS[name], 64, 256)
        pack_rows(library, segment, 0, raw, np.arange(64))
        x = torch.cat((torch.ones(1, 256), -torch.ones(1, 256)))
        weight = torch.from_numpy(dequantized(name, raw))
        y = bind_with(
            library, problem(torch.float32, 256, (name, 64)), BlockWeight(256, (segment,)), None
        )(x)
        torch.testing.assert_close(y, x @ weight.T, rtol=1e-4, atol=1e-3)


def test_rows_are_packed_in_the_order_asked_for_and_at_any_place(library):
    raw = random_blocks("Q4_K", 90, 256)
    exact = torch.from_numpy(dequantized("Q4_K", raw))
    segment = empty_segment(LAYOUTS["Q4_K"], 150, 256)
    order = np.random.default_rng(1).permutation(90)
    assert pack_rows(library, segment, 60, raw, order) is None
    assert pack_rows(library, segment, 0, raw, np.arange(60)) is None
    wanted = torch.cat((exact[:60], exact[torch.from_numpy(order)]))
    assert torch.equal(dequantize_rows(segment, torch.arange(150)), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_that_is_no_number_is_found(library, name):
    for at in SCALES_AT.get(name, (0,)):
        for bits in (0x7C00, 0xFE01) if name != "MXFP4" else (0xFF,):
            raw = random_blocks(name, 70, 512)
            place = raw.reshape(70, -1, LAYOUTS[name].size)[66, -1, at : at + 2]
            place[:] = (bits & 255, bits >> 8)
            segment = empty_segment(LAYOUTS[name], 70, 512)
            assert pack_rows(library, segment, 0, raw, np.arange(70)) == 66


def test_rows_outside_the_source_are_refused(newest):
    raw = random_blocks("Q8_0", 4, 32)
    segment = empty_segment(LAYOUTS["Q8_0"], 4, 32)
    for wrong in (4, -1):
        with pytest.raises(NativeError, match="index out of range"):
            pack_rows(newest, segment, 0, raw, np.array([0, wrong]))


@pytest.mark.parametrize("name", NAMES)
def test_the_self_checks_accept_it(newest, name):
    for dtype in DTYPES:
        asked = problem(dtype, 1024, (name, 3073), ("Q8_0", 100), bias=True)
        assert OP.error(KERNEL, asked) <= OP.tolerance(asked)
        table = EmbeddingBlocksProblem(device="cpu", dtype=dtype, layout=name, rows=999, width=1024)
        assert EMBEDDING.error(embedding_native.KERNEL, table) == 0


def test_panels_take_hardly_more_than_the_blocks():
    """Multipliers of 6 bits become bytes; only Q2_K, with 4 bits for every 16 inputs, pays for that."""
    for layout in STORED_LAYOUTS.values():
        stored = 64 * 512 // layout.block * layout.size
        ours = layout.packed_bytes(64, 512)
        assert ours <= stored * (1.2 if layout.name == "Q2_K" else 1.04), (
            layout.name,
            ours / stored,
        )


def test_the_codings_are_those_of_the_format():
    for layout in STORED_LAYOUTS.values():
        kind = gguf.GGMLQuantizationType[layout.name]
        assert gguf.GGML_QUANT_SIZES[kind] == (layout.block, layout.size)


def test_no_rows_give_no_rows(newest):
    segment, _ = packed(newest, "Q4_0", 4, 32)
    linear = bind_with(
        newest, problem(torch.float32, 32, ("Q4_0", 4)), BlockWeight(32, (segment,)), None
    )
    assert linear(torch.ones(0, 32)).shape == (0, 4)


@pytest.mark.parametrize(
    "name", ["int4-g32", "int4-asym-g128", "int8-g64", "Q4_K", "Q6_K", "IQ4_XS"]
)
def test_gates_in_the_product_by_the_definition_at_any_number_of_rows(library, name):
    """Also where gate and up are segments of their own."""
    for kinds in (((name, 256),), ((name, 128), (name, 128)), ((name, 192), (name, 64))):
        asked = problem(torch.bfloat16, 512, *kinds)
        asked = replace(asked, activation="silu")
        weight = op.random_weight(asked, torch.Generator().manual_seed(1))
        linear = bind_with(library, asked, weight, None)
        x = values(67, 512, dtype=torch.bfloat16)
        together = linear(x)
        assert together.shape == (67, 128)
        close(together, op.bind_reference(asked, weight, None)(x.float()), torch.bfloat16)
        for rows in (1, 2, 3, 8, 31):
            assert torch.equal(linear(x[:rows]), together[:rows])


def test_what_it_cannot_gate_is_refused_with_the_reason(newest):
    asked = problem(torch.float32, 512, ("Q4_0", 192))
    assert "whole panels" in KERNEL.supports(replace(asked, activation="silu"))
    assert "without a bias" in KERNEL.supports(replace(asked, activation="silu", bias=True))
    asked = problem(torch.float32, 512, ("Q4_K", 3072), ("Q6_K", 3072))
    assert OP.error(KERNEL, replace(asked, activation="silu")) <= 2e-5
