"""Triton kernels of latent attention against their references (KRN-01); see test_kernels.py."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from headrace.back.kernels.head_linear import op as head_linear
from headrace.back.kernels.head_linear import triton_head_linear
from headrace.back.kernels.latent_attention import op as latent_attention
from headrace.back.kernels.latent_attention import triton_latent
from headrace.back.kernels.latent_write import op as latent_write
from headrace.back.kernels.latent_write import triton_latent_write
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


WHOLE_TILES = [(16, 64, 16, 16)] if interpreted() else [(16, 512, 64, 16), (5, 24, 6, 7)]
"""In the interpreter, whose products give a row other bits in another place, a token fills a tile."""


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("shape", WHOLE_TILES)
def test_a_position_has_the_same_bits_in_any_step(shape, dtype):
    check_chunks(attention_problem(shape, dtype, DEVICE), triton_latent.bind)
