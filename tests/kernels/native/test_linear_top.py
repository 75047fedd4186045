"""The greatest results of a product are those of its whole rows, bit for bit: any weight, any number of rows and
results, with ties, NaN and infinities."""

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.greedy.op import bind_reference as greedy
from headrace.back.kernels.linear import native as linear_native
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.linear_blocks import native as blocks_native
from headrace.back.kernels.linear_blocks import op as blocks_op
from headrace.back.kernels.linear_blocks.op import LinearBlocksProblem
from headrace.back.kernels.linear_quant import native as quant_native
from headrace.back.kernels.linear_quant import op as quant_op
from headrace.back.kernels.linear_quant.op import LinearQuantProblem
from headrace.back.kernels.linear_top.native import KERNEL, bind_with
from headrace.back.kernels.linear_top.op import MAX_COUNT, OP, LinearTopProblem, bind_reference
from headrace.back.parallel.bundle import FP8, FP8_GROUPS, INT8

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = ["plain", "int8", "fp8", "fp8-g32", "int4", "Q4_K+Q6_K", "Q8_0"]
ROWS = (1, 2, 3, 5, 8, 31, 64, 67)


def values(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def head(kind, dtype, outputs, inputs):
    """The problem of a head, its weight, and the module that multiplies by it."""
    new = {"device": "cpu", "dtype": dtype, "inputs": inputs, "wide": True}
    generator = torch.Generator().manual_seed(1)
    if kind == "plain":
        weight = values(outputs, inputs, dtype=dtype, seed=1)
        return LinearProblem(**new, outputs=outputs, shared=True), weight, linear_native
    forms = {"int8": INT8, "fp8": FP8, "fp8-g32": FP8_GROUPS[32]}
    if kind in forms:
        quant = LinearQuantProblem(**new, outputs=outputs, form=forms[kind])
        return quant, quant_op.random_weight(quant, generator), quant_native
    first = outputs // 2 if "+" in kind else outputs
    names = {"int4": "int4-g32"}.get(kind, kind).split("+")
    sizes = (first, outputs - first)
    blocks = LinearBlocksProblem(**new, kinds=tuple(zip(names, sizes, strict=False)))
    return blocks, blocks_op.random_weight(blocks, generator), blocks_native


def best(logits, count):
    """Of whole rows: a NaN first, then the greatest, among equal ones the lowest id."""
    value, token = logits.sort(dim=1, descending=True, stable=True)
    return token[:, :count], value[:, :count]


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].nan_to_num(7.5), expected[1].nan_to_num(7.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("outputs", [64, 1000, 2081])
def test_are_the_best_of_whole_rows(library, dtype, kind, outputs):
    product, weight, native = head(kind, dtype, outputs, 256)
    whole = native.bind_with(library, product, weight, None)
    x = values(max(ROWS), 260, dtype=dtype)[:, 3:259]
    for count in (1, 5, MAX_COUNT):
        top = bind_with(library, LinearTopProblem(gemm=product, count=count), weight)
        for rows in ROWS:
            assert_same(top(x[:rows]), best(whole(x[:rows]), count))


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_results_the_lowest_ids_are_kept(library, dtype):
    """Each output five times, far apart: every value is a tie, across chunks too."""
    product, weight, _ = head("plain", dtype, 5 * 601, 64)
    weight = weight[:601].repeat(5, 1)
    x = values(9, 64, dtype=dtype)
    whole = linear_native.bind_with(library, product, weight, None)(x)
    token, value = greedy(GreedyProblem(device="cpu"))(whole)
    for count in (1, 2, 7, 64):
        top = bind_with(library, LinearTopProblem(gemm=product, count=count), weight)
        found = top(x)
        assert_same(found, best(whole, count))
        assert torch.equal(found[0][:, 0], token) and torch.equal(found[1][:, 0], value)
    assert (token < 601).all()


def test_nan_comes_first_and_infinities_where_they_belong(library):
    product, weight, _ = head("plain", torch.float32, 3000, 1)
    weight.copy_(torch.arange(3000.0)[:, None] % 7)
    weight[2500], weight[17], weight[1999] = float("nan"), float("inf"), float("-inf")
    weight[40:60] = float("nan")
    x = torch.tensor([[1.0], [-1.0], [0.0], [float("nan")]])
    whole = x * weight[:, 0]
    for count in (1, 4, 64):
        top = bind_with(library, LinearTopProblem(gemm=product, count=count), weight)
        assert_same(top(x), best(whole, count))
    rows = torch.full((2, 1), float("-inf"))
    top = bind_with(library, LinearTopProblem(gemm=product, count=3), weight.clamp_(min=1.0))
    assert_same(top(rows), best(rows * weight[:, 0], 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HEADS)
def test_a_row_does_not_depend_on_the_threads(library, dtype, kind):
    product, weight, _ = head(kind, dtype, 5000, 256)
    top = bind_with(library, LinearTopProblem(gemm=product, count=8), weight)
    x = values(37, 256, dtype=dtype)
    together = top(x)
    library.set_threads(1)
    assert_same(top(x), together)
    assert_same(top(x[36:]), [part[36:] for part in together])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("count", [1, 64])
def test_the_self_check_accepts_it(newest, dtype, kind, count):
    product, _, _ = head(kind, dtype, 151_936 if kind == "int4" else 1024, 1024)
    asked = LinearTopProblem(gemm=product, count=count)
    if count == 1:
        assert OP.error(KERNEL, asked) <= OP.tolerance(asked)
    sample = OP.sample(asked)
    ours = KERNEL.bind(sample.problem, *sample.weights)(*sample.arguments)
    theirs = bind_reference(sample.problem, *sample.weights)(*sample.arguments)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


def test_what_it_cannot_do_is_refused_with_the_reason(newest):
    product, _, _ = head("int8", torch.float32, 2000, 64)
    assert KERNEL.supports(LinearTopProblem(gemm=product, count=MAX_COUNT)) is None
    assert "at most 64" in KERNEL.supports(LinearTopProblem(gemm=product, count=65))
    narrow = replace(product, wide=False)
    assert "wide" in KERNEL.supports(LinearTopProblem(gemm=narrow, count=1))
    quantized = replace(product, quantized_rows=True)
    assert "quantized rows" in KERNEL.supports(LinearTopProblem(gemm=quantized, count=1))
    small, _, _ = head("plain", torch.float32, 3, 64)
    assert "at most 3" in KERNEL.supports(LinearTopProblem(gemm=small, count=4))
