"""GEMMs with weights of e4m3 numbers against the definition: on a GPU, or in the interpreter (test_interpreter.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.gated_act import op as gated_act
from headrace.back.kernels.gated_act import triton_gated_act
from headrace.back.kernels.linear import triton_scaled_gemm
from headrace.back.kernels.linear import triton_scaled_rows as triton_rows
from headrace.back.kernels.linear.table import GemmPlan
from headrace.back.kernels.linear.triton_small import Gemm, launcher, skinny_launcher
from headrace.back.kernels.linear_fp8 import op, triton_linear_fp8
from headrace.back.kernels.linear_fp8.layout import (
    Fp8Weight,
    dequantize,
    dequantize_rows,
    quantize_rows,
)
from headrace.back.kernels.op import sample_generator
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.triton.test_prefill import hopper_only

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
DEVICE = "cpu" if interpreted() else "cuda"
DTYPE = torch.float16 if interpreted() else torch.bfloat16
BOUND = 3e-3 if interpreted() else 1e-2
GEMV = GemmPlan(kernel="gemv", n=4, k=128, warps=4, prefetch=1)
WIDER_GEMV = GemmPlan(kernel="gemv", n=8, k=256, warps=4)
SPLIT = GemmPlan(kernel="skinny", n=32, k=64, warps=4, stages=3, split=3)
SWAPPED = GemmPlan(kernel="skinny", n=64, k=128, warps=4, stages=4, split=2, prefetch=1, swap=True)


def problem_of(outputs: int, inputs: int, **more: object) -> op.LinearFp8Problem:
    return op.LinearFp8Problem(device=DEVICE, dtype=DTYPE, inputs=inputs, outputs=outputs, **more)


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    return float((ours.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("plan, tokens", [(GEMV, 1), (WIDER_GEMV, 1), (SPLIT, 3), (SWAPPED, 17)])
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize(
    "outputs, inputs, bias, eps, activation, add",
    [
        (48, 256, False, None, None, False),
        (96, 400, True, 1e-5, "silu", False),
        (40, 656, True, None, None, True),
    ],
)
def test_few_tokens(plan, tokens, group, outputs, inputs, bias, eps, activation, add):
    """The kernels that stream the weight, by plans that the rule does not take; twice the same bits."""
    problem = problem_of(
        outputs, inputs, group=group, bias=bias, activation=activation, add=add,
        eps=eps if tokens == 1 else None,
    )  # fmt: skip
    sample = op.sample_of(problem, (tokens,))
    weight, bias_O, norm_I = sample.weights
    x, residual = sample.arguments
    gemm = Gemm(
        weight_OI=weight.values_OI, scales_OG=weight.scales_OG, group=group or inputs, bias_O=bias_O,
        norm_I=norm_I, eps=problem.eps or 0.0, activation=activation or "", add=add,
    )  # fmt: skip
    results = []
    for _ in range(2):
        y = torch.full((tokens, problem.results), float("nan"), device=DEVICE, dtype=DTYPE)
        if residual is not None:
            y.copy_(residual)
        launcher(gemm, plan, 1 << (tokens - 1).bit_length())(x, y)
        results.append(y)
    # a weight with groups of 32 multiplies few tokens as they are
    plain = op.bind_reference(replace(problem, group=32), regrouped(weight), bias_O, norm_I)
    expected = plain(x, residual)
    assert error(results[0], expected) <= BOUND
    assert torch.equal(*results)


@hopper_only
@pytest.mark.parametrize("n, warps", [(4, 4), (8, 2), (1, 1)])
@pytest.mark.parametrize("group", [None, 128, 32])
@pytest.mark.parametrize(
    "outputs, inputs, bias, eps, activation, add",
    [
        (48, 256, False, None, None, False),
        (6144, 4096, False, 1e-6, None, False),
        (2 * 98, 2064, True, 1e-5, "silu", False),
        (43, 1184, True, None, None, True),
    ],
)
def test_one_token_by_bytes(n, warps, group, outputs, inputs, bias, eps, activation, add):
    """Sizes that steps of 512 inputs a warp do not divide, outputs that programs do not; memory
    beside the tensors is not read into the result, and twice come the same bits."""
    problem = problem_of(
        outputs, inputs, group=group, bias=bias, eps=eps, activation=activation, add=add
    )
    sample = op.sample_of(problem, (1,))
    weight, bias_O, norm_I = sample.weights
    x, residual = sample.arguments
    gemm = Gemm(
        weight_OI=weight.values_OI, scales_OG=weight.scales_OG, group=group or inputs, bias_O=bias_O,
        norm_I=norm_I, eps=eps or 0.0, activation=activation or "", add=add,
    )  # fmt: skip
    plan = GemmPlan(kernel="gemv_bytes", n=n, k=512 * warps, warps=warps)
    results = []
    for _ in range(2):
        y = torch.full((1, problem.results), float("nan"), device=DEVICE, dtype=DTYPE)
        if residual is not None:
            y.copy_(residual)
        launcher(gemm, plan, 1)(x, y)
        results.append(y)
    plain = op.bind_reference(replace(problem, group=32), regrouped(weight), bias_O, norm_I)
    assert error(results[0], plain(x, residual)) <= BOUND
    assert torch.equal(*results)


def regrouped(weight: Fp8Weight) -> Fp8Weight:
    """The same weight with a scale for each 32 inputs."""
    scales_OG = weight.scales_OG.repeat_interleave((weight.group or weight.inputs) // 32 + 1, 1)
    if weight.group is not None:
        scales_OG = weight.scales_OG.repeat_interleave(weight.group // 32, 1)
    return Fp8Weight(weight.values_OI, scales_OG[:, : -(-weight.inputs // 32)].contiguous(), 32)


@pytest.mark.parametrize("plan, tokens", [(SPLIT, 3), (SWAPPED, 17)])
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize(
    "outputs, inputs, bias, activation, add",
    [(48, 256, False, None, False), (96, 400, True, "silu", False), (40, 656, True, None, True)],
)
def test_few_quantized_tokens(plan, tokens, group, outputs, inputs, bias, activation, add):
    """QNT-06."""
    problem = problem_of(outputs, inputs, group=group, bias=bias, activation=activation, add=add)
    sample = op.sample_of(problem, (tokens,))
    weight, bias_O, _ = sample.weights
    x, residual = sample.arguments
    gemm = Gemm(
        weight_OI=weight.values_OI, scales_OG=weight.scales_OG, group=group or inputs, bias_O=bias_O,
        activation=activation or "", add=add,
    )  # fmt: skip
    y = torch.empty(tokens, problem.results, device=DEVICE, dtype=DTYPE)
    if residual is not None:
        y.copy_(residual)
    rows = triton_rows.bind(inputs, group, norm_weight_I=None, eps=0.0)(x)
    run = skinny_launcher(gemm, plan, 1 << (tokens - 1).bit_length())
    run(rows.values_TI, y, rows.scales_TG)
    expected = op.bind_reference(problem, *sample.weights)(x, residual)
    assert error(y, expected) <= BOUND


@pytest.mark.parametrize("tokens", [3, 70])
def test_all_tokens_may_have_one_scale(tokens):
    """QNT-17. Values beyond its range become the largest number."""
    problem = problem_of(48, 256, fixed=True, eps=1e-6)
    sample = op.sample_of(problem, (tokens,))
    x, _ = sample.arguments
    weight, _, norm = sample.weights
    norm[5] = 40.0
    rows = triton_rows.bind(256, None, norm_weight_I=norm, eps=1e-6, scale_1=weight.input_scale_1)(
        x
    )
    assert (rows.scales_TG == weight.input_scale_1).all()
    assert rows.values_TI[:, 5].float().abs().max() == 448
    found = triton_linear_fp8.bind(problem, *sample.weights)(x, None)
    assert error(found, op.bind_reference(problem, *sample.weights)(x, None)) <= BOUND


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("norm", [False, True])
def test_tokens_become_the_nearest_numbers(group, norm):
    """Without a norm to the bit; also a token of zeros and one of huge values."""
    width = 400
    generator = sample_generator()
    x = torch.randn(5, width, generator=generator).to(DEVICE, DTYPE)
    x[1] = 0
    x[2] *= 3e4 / x[2].abs().max()
    weight = torch.rand(width, generator=generator).to(DEVICE) + 0.5 if norm else None
    rows = triton_rows.bind(width, group, norm_weight_I=weight, eps=1e-6)(x)
    if weight is None:
        expected = quantize_rows(x.cpu(), group)
        rows = triton_rows.ScaledRows(rows.values_TI.cpu(), rows.scales_TG.cpu())
        assert torch.equal(rows.scales_TG, expected.scales_TG)
        assert torch.equal(rows.values_TI.float(), expected.values_TI.float())
        return
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * weight
    assert error(dequantize_rows(rows, group), normed) <= 1 / 16


@pytest.mark.parametrize("group", [None, 128])
def test_gates_and_ups_become_numbers_in_one_pass(group):
    """To the bit what the activation's kernel and the one behind it give."""
    x = torch.randn(5, 800, generator=sample_generator()).to(DEVICE, DTYPE)
    problem = gated_act.GatedActProblem(device=DEVICE, dtype=DTYPE, width=400, activation="silu")
    inner = triton_gated_act.bind(problem)(x)
    one, two = (
        triton_rows.bind(400, group, norm_weight_I=None, eps=0.0, activation=act)(rows)
        for act, rows in (("silu", x), (None, inner))
    )
    assert torch.equal(one.values_TI.float(), two.values_TI.float())
    assert torch.equal(one.scales_TG, two.scales_TG)


@pytest.mark.parametrize("more", [{}, {"activation": "silu"}, {"dtype": torch.int8}])
def test_wide_tokens_that_are_read_twice_get_the_same_bits(more, monkeypatch):
    """Also one of zeros, one of huge values and one with a NaN."""
    x = torch.randn(5, 800 if "activation" in more else 400, generator=sample_generator())
    x[1], x[2], x[3, 7] = 0, x[2] * 1e4, torch.nan
    x = x.to(DEVICE, DTYPE)
    once = triton_rows.bind(400, None, norm_weight_I=None, eps=0.0, **more)(x)
    for name, value in (("WIDE", 256), ("MANY", 1), ("CHUNK", 128), ("CHUNK_WARPS", 4)):
        monkeypatch.setattr(triton_rows, name, value)
    twice = triton_rows.bind(400, None, norm_weight_I=None, eps=0.0, **more)(x)
    torch.testing.assert_close(
        twice.values_TI.float(), once.values_TI.float(), rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(twice.scales_TG, once.scales_TG, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(interpreted(), reason="the library takes a GPU")
@pytest.mark.parametrize("tokens", [65, 130, 1024])
@pytest.mark.parametrize("more", [{}, {"bias": True}, {"eps": 1e-6, "activation": "silu"}])
def test_groups_by_the_library(tokens, more):
    """128 inputs a scale, of both: by Hopper's library, for any number of tokens."""
    problem = problem_of(256, 384, group=128, **more)
    by_library = torch.cuda.get_device_capability()[0] == 9
    assert (triton_linear_fp8.library_refusal(problem) is None) == by_library
    sample = op.sample_of(problem, (tokens,))
    expected = op.bind_reference(problem, *sample.weights)(*sample.arguments)
    found = triton_linear_fp8.bind(problem, *sample.weights)(*sample.arguments)
    assert error(found, expected) <= BOUND


def test_a_nan_stays_in_its_token():
    x = torch.ones(3, 256, device=DEVICE, dtype=DTYPE)
    x[1, 7] = float("nan")
    values = dequantize_rows(triton_rows.bind(256, None, norm_weight_I=None, eps=0.0)(x), None)
    assert values[1].isnan().any() and not values[[0, 2]].isnan().any()


@pytest.mark.parametrize("tokens", [1, 70, 130])
@pytest.mark.parametrize("outputs, inputs", [(40, 256), (136, 400)])
@pytest.mark.parametrize("group", [None, 32, 128])
def test_many_tokens_by_our_kernel(tokens, outputs, inputs, group):
    problem = problem_of(outputs, inputs, group=group, bias=True)
    sample = op.sample_of(problem, (tokens,))
    weight, bias_O, _ = sample.weights
    rows = quantize_rows(sample.arguments[0], group)
    y = torch.full((tokens, outputs), float("nan"), device=DEVICE, dtype=DTYPE)
    triton_scaled_gemm.multiply(rows, weight.values_OI, weight.scales_OG, weight.group, bias_O, y)
    expected = dequantize_rows(rows, group) @ dequantize(weight).T + bias_O.float()
    assert error(y, expected.to(DTYPE)) <= BOUND


@pytest.mark.parametrize(
    "more",
    [
        {"eps": 1e-6},
        {"eps": 1e-6, "activation": "silu", "group": 128},
        {"eps": 1e-6, "bias": True, "group": 32},
        {"eps": 1e-6, "activation": "silu", "late": True},
        {"gated": "silu", "add": True, "group": 128},
        {"add": True, "bias": True},
        {"group": 128, "wide": True},
    ],
    ids=lambda more: " ".join(more),
)
def test_the_layer_takes_any_number_of_tokens(more):
    problem = problem_of(64, 256, **more)
    assert triton_linear_fp8.KERNEL.supports(problem) is None
    assert op.OP.error(triton_linear_fp8.KERNEL, problem) <= op.OP.tolerance(problem)


def test_where_the_library_fails_its_check_ours_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(64, 256)
    broken = "library's GEMM is broken"

    def product(problem: op.LinearFp8Problem, weight: Fp8Weight, bias_O: object) -> object:
        if triton_linear_fp8.library_refusal(problem) is None:
            raise RuntimeError(broken)
        return ours(problem, weight, bias_O)

    ours = triton_linear_fp8._product
    refused: dict[op.LinearFp8Problem, str] = {}
    monkeypatch.setattr(triton_linear_fp8, "_skipped", refused)
    monkeypatch.setattr(triton_linear_fp8, "library_refusal", refused.get)
    monkeypatch.setattr(triton_linear_fp8, "_product", product)
    kernel = replace(triton_linear_fp8.KERNEL, plans=lambda one: triton_linear_fp8.plans(one)[-1:])
    ((plan, reason),) = op.OP.failures(kernel, problem)
    assert plan == f"{op.CHECKED_ROWS[-1]} tokens" and broken in reason and problem in refused
    assert op.OP.failures(kernel, problem) == []


@pytest.mark.skipif(interpreted(), reason="widths of real models take a GPU")
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize(
    "outputs, inputs, more",
    [
        (6144, 4096, {"eps": 1e-6}),
        (4096, 4096, {"add": True}),
        (24576, 4096, {"eps": 1e-6, "activation": "silu"}),
        (4096, 12288, {"add": True}),
        (24576, 4096, {"eps": 1e-6, "activation": "silu", "late": True}),
        (4096, 12288, {"add": True, "gated": "silu"}),
        (4096, 12288, {"add": True, "group": 32}),
    ],
)
def test_widths_of_8b(outputs, inputs, more, group):
    """All plans of Qwen3-8B's layers, as the self-check at start runs them."""
    problem = problem_of(outputs, inputs, **{"group": group, **more})
    assert triton_linear_fp8.KERNEL.supports(problem) is None
    assert op.OP.failures(triton_linear_fp8.KERNEL, problem) == []


@pytest.mark.skipif(interpreted(), reason="graphs take a GPU")
@pytest.mark.parametrize("tokens", [1, 32, 256])
@pytest.mark.parametrize("group", [None, 128])
def test_the_layer_is_replayed_from_a_graph(tokens, group):
    problem = problem_of(1024, 1024, group=group, eps=1e-6, activation="silu")
    sample = op.sample_of(problem, (tokens,))
    x, residual = sample.arguments
    layer = triton_linear_fp8.bind(problem, *sample.weights)
    eager = layer(x, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layer(x, residual)
    graph.replay()
    assert torch.equal(replayed, eager)
