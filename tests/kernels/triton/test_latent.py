"""Triton kernels of latent attention against their references (KRN-01); see test_kernels.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.head_linear import op as head_linear
from headrace.back.kernels.head_linear import triton_head_linear
from headrace.back.kernels.kv_write.quantized import E2M1
from headrace.back.kernels.latent_attention import op as latent_attention
from headrace.back.kernels.latent_attention import triton_latent
from headrace.back.kernels.latent_write import op as latent_write
from headrace.back.kernels.latent_write import quantized, triton_latent_write
from headrace.back.kernels.sparse_attention import op as sparse_heads
from headrace.back.kernels.sparse_attention import triton_sparse_attention
from headrace.back.kernels.sparse_attention.op import SparseAttentionProblem
from headrace.back.kernels.sparse_latent_attention import op as sparse_attention
from headrace.back.kernels.sparse_latent_attention import triton_sparse_latent
from headrace.back.kernels.sparse_latent_attention.op import SparseLatentProblem
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.latent import SHAPES as ALL_SHAPES
from tests.kernels.latent import (
    attention_problem,
    check_chunks,
    check_padding,
    head_problem,
    write_problem,
)
from tests.kernels.triton import test_kernels
from tests.kernels.triton.test_kernels import BOUND, DEVICE, DTYPES

pytestmark = test_kernels.pytestmark

SHAPES = [(20, 48, 16, 16), (5, 24, 6, 7)] if interpreted() else ALL_SHAPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_heads_equal_the_reference(shape, dtype):
    problem = head_problem(shape, dtype, DEVICE)
    assert head_linear.OP.error(triton_head_linear.KERNEL, problem) <= BOUND[dtype]


@pytest.mark.parametrize("layout", ["half", "pairs"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_normed_rotated_and_written(dtype, layout):
    for shape in SHAPES:
        problem = write_problem(shape, dtype, DEVICE, layout)
        assert latent_write.OP.error(triton_latent_write.KERNEL, problem) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_the_reference(shape, dtype):
    problem = attention_problem(shape, dtype, DEVICE)
    assert latent_attention.OP.error(triton_latent.KERNEL, problem) <= BOUND[dtype]
    check_padding(problem, triton_latent.bind, BOUND[dtype])


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("fp8", "half"),
        ("nvfp4-4over6", "half"),
        pytest.param("int8", "pairs", marks=pytest.mark.slow),
        pytest.param("nvfp4", "pairs", marks=pytest.mark.slow),
    ],
)
def test_quantized_latents_are_written_and_read_as_the_reference_does(form, layout):
    """KRN-07, QNT-18: values to the nearest code, ties to even, with a scale for a latent and one for its rotated
    part, in the pass that norms and rotates; what is lost is NaN."""
    shape, dtype = (5, 32 if form in E2M1 else 24, 6, 8), torch.float16
    write = replace(write_problem(shape, dtype, DEVICE, layout), quantized=form)
    steps = {"fp8": 16, "int8": 127}.get(form, 3)
    assert latent_write.OP.error(triton_latent_write.KERNEL, write) <= 1 / steps
    sample = latent_write.OP.sample(write)
    caches = []
    for kernel in (latent_write.OP.reference, triton_latent_write.KERNEL):
        q, latent, positions, table, kv, slot, out = (t.clone() for t in sample.arguments)
        latent[1, 3] = float("nan")
        kernel.bind(write, *sample.weights)(q, latent, positions, table, kv, slot, out)
        caches.append(kv)
    values, scales = zip(*map(quantized.values_and_scales, caches), strict=True)
    torch.testing.assert_close(*scales, rtol=1e-3, atol=0, equal_nan=True)
    assert (values[0] != values[1]).float().mean() < 0.02
    assert scales[0].isnan().sum() == 1
    read = replace(attention_problem(shape, dtype, DEVICE), quantized=form)
    assert latent_attention.OP.error(triton_latent.KERNEL, read) <= BOUND[dtype]
    heads, rank, rotary, block_tokens = shape
    sparse = SparseLatentProblem(
        device=DEVICE, dtype=dtype, heads=heads, rank=rank, rotary=rotary, top_k=70,
        block_tokens=block_tokens, scale=(rank + rotary) ** -0.5, quantized=form,
    )  # fmt: skip
    assert sparse_attention.OP.error(triton_sparse_latent.KERNEL, sparse) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_over_chosen_positions_equals_the_reference(shape, dtype):
    """KRN-03: more of them than fit in a tile."""
    heads, rank, rotary, block_tokens = shape
    problem = SparseLatentProblem(
        device=DEVICE, dtype=dtype, heads=heads, rank=rank, rotary=rotary, top_k=70,
        block_tokens=block_tokens, scale=(rank + rotary) ** -0.5,
    )  # fmt: skip
    assert sparse_attention.OP.error(triton_sparse_latent.KERNEL, problem) <= BOUND[dtype]


@pytest.mark.parametrize("sinks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_lists_cut_into_parts_and_wide_tiles_equal_the_reference(monkeypatch, sinks):
    """KRN-03: of few tokens parts of a list, some of them empty, and of many more heads at once."""
    problem = SparseLatentProblem(
        device=DEVICE, dtype=torch.float16, heads=20, rank=32, rotary=16, top_k=70,
        block_tokens=16, scale=0.2, sinks=sinks,
    )  # fmt: skip
    small = {n: replace(tiles, part=32 * n) for n, tiles in triton_sparse_latent.FEW.items()}
    monkeypatch.setattr(triton_sparse_latent, "FEW", small)
    bound = BOUND[torch.float16]
    assert sparse_attention.OP.error(triton_sparse_latent.BY_STEPS, problem) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, dim, lists", [(6, 2, 24, 2), (40, 2, 32, 1)])
def test_heads_over_chosen_positions_equal_the_reference(heads, kv_heads, dim, lists, dtype):
    """KRN-03: a list for each KV head and one for all; more positions, and more heads, than a tile holds."""
    problem = SparseAttentionProblem(
        device=DEVICE, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=dim, lists=lists,
        top_k=70, block_tokens=7, scale=dim**-0.5,
    )  # fmt: skip
    assert sparse_heads.OP.error(triton_sparse_attention.KERNEL, problem) <= BOUND[dtype]


WHOLE_TILES = [(16, 64, 16, 16)] if interpreted() else [(16, 512, 64, 16), (5, 24, 6, 7)]
"""In the interpreter, whose products give a row other bits in another place, a token fills a tile."""


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("shape", WHOLE_TILES)
def test_a_position_has_the_same_bits_in_any_step(shape, dtype):
    few = {"first": 604, "parts": ((606, 607), (605, 608), (607, 610))}  # each query: 0.4 s
    check_chunks(
        attention_problem(shape, dtype, DEVICE), triton_latent.bind, **few if interpreted() else {}
    )


@pytest.mark.parametrize("heads", [1, 16, 40, 128])
def test_results_left_to_be_merged_take_bounded_memory(heads):
    """And a long row on one rank of many heads is still cut."""
    splits = triton_latent.max_cut_splits(heads)
    assert splits * heads * (triton_latent.MAX_RANK + 2) * 4 <= 68e6
    assert splits * triton_latent.SPLIT_TOKENS >= 128 * 1024


@pytest.mark.parametrize("shape", WHOLE_TILES)
def test_rows_beyond_that_memory_go_through_their_splits_in_turn(shape, monkeypatch):
    problem = attention_problem(shape, DTYPES[1], DEVICE)
    rows = [(1, 1500), (1, 1024), (1, 2), (1, 513)]
    plan, blocks = sample_plan(rows, block_tokens=problem.block_tokens, window=None, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(blocks, problem.block_tokens, problem.width, generator=generator)
    q = torch.randn(len(rows), problem.heads, problem.width, generator=generator)
    kv, q = kv.to(DEVICE, problem.dtype), q.to(DEVICE, problem.dtype)
    results = []
    for items in (triton_latent.CUT_ITEMS, 5, 1):
        monkeypatch.setattr(triton_latent, "CUT_ITEMS", items)
        results.append(triton_latent.bind(problem)(q, kv, plan))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
