"""GEMMs with weights of 8-bit integers against the definition: on a GPU, or in the interpreter
(test_interpreter.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.back.kernels.linear import triton_scaled_rows
from headrace.back.kernels.linear.scaled_rows import FLOAT8, scaled_rows
from headrace.back.kernels.linear.triton_dequantize_bytes import dequantize_into
from headrace.back.kernels.linear_int8 import op, triton_linear_int8
from headrace.back.kernels.linear_int8.layout import dequantize
from headrace.back.kernels.rms_norm.op import RMSNormProblem
from headrace.back.kernels.rms_norm.triton_rms_norm import bind_norm
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.triton.test_linear_int4 import BOUND, DEVICE, DTYPE, error, pytestmark

__all__ = ["pytestmark"]


def problem_of(outputs: int, inputs: int, **more: Any) -> op.LinearInt8Problem:
    return op.LinearInt8Problem(device=DEVICE, dtype=DTYPE, inputs=inputs, outputs=outputs, **more)


@pytest.mark.parametrize("tokens", [1, 3, 40, 70])
@pytest.mark.parametrize("group", [None, 16, 32, 128])
@pytest.mark.parametrize(
    "outputs, inputs, more",
    [
        (48, 256, {}),
        (64, 256, {"minima": True, "activation": "silu", "eps": 1e-6}),
        (128, 384, {"bias": True, "activation": "silu", "eps": 1e-6}),
        (72, 512, {"bias": True, "add": True}),
        (40, 256, {"wide": True}),
    ],
)
def test_the_layer(tokens, group, outputs, inputs, more):
    if "minima" in more:  # of groups, as Q5_K has them
        group = group or 64
    problem = problem_of(outputs, inputs, group=group, **more)
    assert triton_linear_int8.KERNEL.supports(problem) is None
    sample = op.sample_of(problem, (tokens,))
    x, residual = sample.arguments
    expected = op.bind_reference(problem, *sample.weights)(
        x, None if residual is None else residual.clone()
    )
    found = triton_linear_int8.bind(problem, *sample.weights)(x, residual)
    assert error(found, expected) <= BOUND


@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize(
    "outputs, inputs, more",
    [
        (72, 256, {"bias": True, "eps": 1e-6}),
        (128, 384, {"activation": "silu"}),
        (40, 256, {"add": True}),
    ],
)
def test_many_tokens_become_int8(group, outputs, inputs, more):
    """W8A8: as integers times integers; twice the same bits."""
    problem = problem_of(outputs, inputs, group=group, int8_rows=True, **more)
    assert triton_linear_int8.KERNEL.supports(problem) is None
    sample = op.sample_of(problem, (70,))
    x, residual = sample.arguments
    expected, *found = (
        bind(problem, *sample.weights)(x, None if residual is None else residual.clone())
        for bind in (op.bind_reference, triton_linear_int8.bind, triton_linear_int8.bind)
    )
    assert error(found[0], expected) <= BOUND
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("zero", [False, True])
def test_all_tokens_may_have_one_scale_and_a_zero_point(zero):
    """QNT-17: the scheme as it is written down, integers to the bit, sums in float32; a bias, values beyond the range,
    a NaN that stays in its token."""
    problem = problem_of(40, 256, bias=True, int8_rows=True, fixed=True, zero=zero)
    assert triton_linear_int8.KERNEL.supports(problem) is None
    sample = op.sample_of(problem, (70,))
    weight, bias, _ = sample.weights
    x = sample.arguments[0]
    x[3, 4], x[5, 6] = 30, -30
    scale, point = weight.inputs_1, weight.zero_1 if zero else torch.zeros(1, device=DEVICE)
    integers = (x.float() / scale + point).clamp(-128, 127).round()
    fixed = {"scale_1": weight.inputs_1, "zero_1": weight.zero_1}
    rows = triton_scaled_rows.bind(
        256, None, norm_weight_I=None, eps=0.0, dtype=torch.int8, **fixed
    )(x)
    assert torch.equal(rows.values_TI, integers.to(torch.int8))
    assert (rows.scales_TG == scale).all() and integers.min() == -128 and integers.max() == 127
    expected = ((integers - point) * scale) @ dequantize(weight).T + bias.float()
    for bind in (op.bind_reference, triton_linear_int8.bind):
        assert error(bind(problem, *sample.weights)(x, None), expected.to(DTYPE)) <= BOUND
    x[9, 9] = float("nan")
    lost = triton_linear_int8.bind(problem, *sample.weights)(x, None).isnan()
    assert lost[9].all() and not lost[:9].any() and not lost[10:].any()


@pytest.mark.parametrize("group", [None, 32, 128])
def test_a_weight_is_dequantized_to_the_bits_of_its_definition(group):
    """With minima to the last of them: the product may be fused into the difference."""
    for more in ({}, {"minima": True})[: 1 if group is None else 2]:
        problem = problem_of(24, 2048 + 384, group=group, **more)
        weight = op.random_weight(problem, torch.Generator(DEVICE).manual_seed(1))
        found = torch.full_like(weight.values_OI, 7, dtype=DTYPE)
        dequantize_into(weight.values_OI, weight.scales_OG, group, found, weight.minima_OG)
        expected = dequantize(weight).to(DTYPE)
        if more:
            torch.testing.assert_close(found, expected, rtol=torch.finfo(DTYPE).eps, atol=1e-6)
        else:
            assert torch.equal(found, expected)


def test_tokens_become_the_nearest_integers():
    """To the bit; also a token of zeros, one of huge values and one with a NaN, which stays in it."""
    x = torch.randn(5, 400, generator=torch.Generator().manual_seed(5)).to(DEVICE, DTYPE)
    x[1] = 0
    x[2] *= 3e4 / x[2].abs().max()
    x[3, 7] = float("nan")
    rows = triton_scaled_rows.bind(400, None, norm_weight_I=None, eps=0.0, dtype=torch.int8)(x)
    expected = scaled_rows(x.cpu(), None, torch.int8)
    kept = [0, 1, 2, 4]
    assert torch.equal(rows.values_TI.cpu()[kept], expected.values_TI[kept])
    assert torch.equal(rows.scales_TG.cpu()[kept], expected.scales_TG[kept])
    assert rows.scales_TG[3].isnan().all() and expected.scales_TG[3].isnan().all()


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8])
def test_tokens_are_quantized_with_the_norm_before_as_by_two_kernels(dtype, group):
    """KRN-19: the same bits. Squares are whole numbers, whose sum has no order."""
    x = torch.randint(-3, 4, (5, 576), generator=torch.Generator().manual_seed(6)).to(DEVICE, DTYPE)
    weight = torch.rand(576, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    problem = RMSNormProblem(device=DEVICE, dtype=DTYPE, width=576, eps=1e-6)
    apart = bind_norm(problem, weight)(x)
    shared = {"eps": 1e-6, "dtype": dtype}
    whole = triton_scaled_rows.bind(576, group, norm_weight_I=weight, **shared)(x)
    second = triton_scaled_rows.bind(576, group, norm_weight_I=None, **shared)(apart)
    assert torch.equal(whole.values_TI.view(torch.uint8), second.values_TI.view(torch.uint8))
    assert torch.equal(whole.scales_TG, second.scales_TG)
    assert whole.scales_TG.shape[1] == (1 if group is None else 5)


def test_what_no_kernel_serves_is_told():
    reasons = [
        triton_linear_int8.KERNEL.supports(problem_of(*sizes, **more))
        for sizes, more in (
            ((64, 200), {}),
            ((64, 256), {"group": 256}),
            ((64, 272), {"group": 32}),
            ((128, 256), {"activation": "tanh"}),
            ((64, 256), {"group": 16, "int8_rows": True}),
        )
    ]
    assert [reason and reason.split()[0] for reason in reasons] == [
        "200",
        "scales",
        "272",
        "does",
        "multiplies",
    ]


@pytest.mark.skipif(interpreted(), reason="widths of real models take a GPU")
@pytest.mark.parametrize("group", [None, 16, 32, 128])
@pytest.mark.parametrize(
    "outputs, inputs, more",
    [
        (6144, 4096, {"eps": 1e-6}),
        (24576, 4096, {"eps": 1e-6, "activation": "silu"}),
        (4096, 12288, {"add": True}),
    ],
)
def test_widths_of_8b(outputs, inputs, more, group):
    """All plans of Qwen3-8B's layers, as the self-check at start runs them."""
    problem = problem_of(outputs, inputs, group=group, **more)
    assert op.OP.failures(triton_linear_int8.KERNEL, problem) == []
