"""Native kernels of latent attention against their references (KRN-01): odd sizes, padding, bits of any chunk."""

import pytest
import torch

from headrace.back.kernels.expanded_attention import native as expanded_attention
from headrace.back.kernels.expanded_attention import op as expanded_attention_op
from headrace.back.kernels.head_linear import native as head_linear
from headrace.back.kernels.head_linear import op as head_linear_op
from headrace.back.kernels.latent_attention import native as latent_attention
from headrace.back.kernels.latent_attention import op as latent_attention_op
from headrace.back.kernels.latent_write import native as latent_write
from headrace.back.kernels.latent_write import op as latent_write_op
from headrace.back.kernels.op import Kernel
from tests.kernels.latent import (
    SHAPES,
    attention_problem,
    check_chunks,
    check_padding,
    head_problem,
    write_problem,
)

BOUND = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def kernel_of(bind):
    return Kernel(name="one", supports=lambda problem: None, bind=bind)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_heads_equal_the_reference(library, shape, dtype):
    kernel = kernel_of(lambda *given: head_linear.bind_with(library, *given))
    problem = head_problem(shape, dtype, "cpu")
    assert head_linear_op.OP.error(kernel, problem) <= BOUND[dtype]


@pytest.mark.parametrize("layout", ["half", "pairs"])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", SHAPES)
def test_latents_are_normed_rotated_and_written(library, shape, dtype, layout):
    kernel = kernel_of(lambda *given: latent_write.bind_with(library, *given))
    problem = write_problem(shape, dtype, "cpu", layout)
    assert latent_write_op.OP.error(kernel, problem) <= BOUND[dtype]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_the_reference(library, shape, dtype, whole):
    """REG-031: in splits and whole, with log-sum-exps, beside rows of no length."""
    problem = attention_problem(shape, dtype, "cpu")

    def bind(problem):
        return latent_attention.bind_with(library, problem, whole=whole)

    assert latent_attention_op.OP.error(kernel_of(bind), problem) <= BOUND[dtype]
    check_padding(problem, bind, BOUND[dtype])


@pytest.mark.parametrize("dtype", BOUND)
def test_whole_rows_have_the_bits_of_any_chunk(library, dtype):
    problem = attention_problem(SHAPES[0], dtype, "cpu")
    check_chunks(problem, lambda p: latent_attention.bind_with(library, p, whole=True))


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("heads, own, values, rotary", [(16, 128, 128, 64), (3, 24, 20, 6)])
def test_expanded_attention_equals_the_reference(library, heads, own, values, rotary, dtype):
    """KRN-06: new rows and rows behind a prefix, values shorter than keys."""
    problem = expanded_attention_op.ExpandedAttentionProblem(
        device="cpu",
        dtype=dtype,
        heads=heads,
        own=own,
        values=values,
        rotary=rotary,
        scale=(own + rotary) ** -0.5,
    )
    kernel = kernel_of(lambda problem: expanded_attention.bind_with(library, problem))
    assert expanded_attention_op.OP.error(kernel, problem) <= BOUND[dtype]
