"""GEMMs with weights of 4-bit integers against the definition: on a GPU, or in the interpreter (test_interpreter.py).
QNT-01."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.linear_int4 import op, stream, triton_linear_int4, triton_tiles_int4
from headrace.back.kernels.linear_int4.layout import dequantize
from headrace.back.kernels.linear_int4.stream import Int4Gemm, StreamPlan
from headrace.back.kernels.triton.wrap import interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
DEVICE = "cpu" if interpreted() else "cuda"
NO_HOPPER = (
    interpreted() or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)
)
DTYPE = torch.float16 if interpreted() else torch.bfloat16
BOUND = 3e-3 if interpreted() else 1e-2
SCHEMES = [(128, False), (64, True), (32, False), (32, True), (None, False), (None, True)]


def problem_of(outputs: int, inputs: int, **more: object) -> op.LinearInt4Problem:
    return op.LinearInt4Problem(device=DEVICE, dtype=DTYPE, inputs=inputs, outputs=outputs, **more)


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    return float((ours.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("group, minima", SCHEMES)
@pytest.mark.parametrize("outputs, inputs", [(40, 256), (136, 400)])
def test_a_whole_weight_becomes_the_numbers_of_the_definition(group, minima, outputs, inputs):
    problem = problem_of(outputs, inputs, group=group, minima=minima)
    weight = op.sample_of(problem, (1,)).weights[0]
    y = torch.full((outputs, inputs), float("nan"), device=DEVICE, dtype=DTYPE)
    triton_tiles_int4.dequantize_into(weight, y)
    # the interpreter rounds float16 otherwise than torch, and a product may be rounded before a difference
    assert error(y, dequantize(weight, DTYPE)) <= (1e-3 if interpreted() else 4e-3)


@pytest.mark.parametrize("levels", ["e2m1", "nf4", "fp4"])
def test_levels_become_those_of_the_definition(levels):
    problem = problem_of(64, 256, group=64, floats=True, levels=levels)
    weight = op.sample_of(problem, (1,)).weights[0]
    y = torch.full((64, 256), float("nan"), device=DEVICE, dtype=DTYPE)
    triton_tiles_int4.dequantize_into(weight, y)
    assert error(y, dequantize(weight, DTYPE)) <= 4e-3


@pytest.mark.parametrize("tokens", [1, 3, 17, 70])
@pytest.mark.parametrize("group, minima", SCHEMES)
@pytest.mark.parametrize(
    "outputs, inputs, bias, activation, add",
    [
        (48, 256, False, None, False),
        (128, 400, True, "silu", False),
        (256, 208, False, "gelu", False),
        (72, 656, True, None, True),
    ],
)
def test_tiles(tokens, group, minima, outputs, inputs, bias, activation, add):
    problem = problem_of(
        outputs, inputs, group=group, minima=minima, bias=bias, activation=activation, add=add
    )
    sample = op.sample_of(problem, (tokens,))
    weight, bias_O, _ = sample.weights
    x, residual = sample.arguments
    y = torch.full((tokens, problem.results), float("nan"), device=DEVICE, dtype=DTYPE)
    if residual is not None:
        y.copy_(residual)
    triton_tiles_int4.multiply(
        x, weight, bias_O, y, activation=activation or "", add=add, most_tokens=32
    )
    assert error(y, op.bind_reference(problem, *sample.weights)(x, residual)) <= BOUND


@pytest.mark.skipif(NO_HOPPER, reason="kernels of Hopper")
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 33, 64, 100])
@pytest.mark.parametrize(
    "group, minima, per_sm, stages, pair, dtype, outputs, inputs, bias, activation, add, eps",
    [
        (128, False, 2, 3, True, torch.bfloat16, 64, 128, False, None, False, None),
        (64, True, 1, 4, False, torch.bfloat16, 200, 400, True, None, True, None),
        (32, False, 2, 3, True, torch.bfloat16, 1024, 656, True, "silu", False, 1e-5),
        (32, True, 1, 4, True, torch.float16, 4096, 4096, False, None, False, 1e-5),
        (None, True, 2, 4, True, torch.bfloat16, 320, 12288, False, None, True, None),
        (None, False, 2, 5, True, torch.float16, 512, 1024, True, "silu", False, None),
        (128, True, 2, 4, True, torch.bfloat16, 24576, 4096, False, "silu", False, 1e-6),
    ],
)
def test_streams(
    tokens, group, minima, per_sm, stages, pair, dtype, outputs, inputs, bias, activation, add, eps
):
    """The kernels of Hopper, by plans that the rule does not take; twice the same bits."""
    problem = replace(
        problem_of(
            outputs, inputs, group=group, minima=minima, bias=bias, activation=activation, add=add,
            eps=eps if tokens == 1 else None,
        ),
        dtype=dtype,
    )  # fmt: skip
    sample = op.sample_of(problem, (tokens,))
    weight, bias_O, norm_I = sample.weights
    x, residual = sample.arguments
    gemm = Int4Gemm(
        weight=weight, bias_O=bias_O, norm_I=norm_I, eps=problem.eps or 0.0, activation=activation,
        add=add,
    )  # fmt: skip
    most = 1 << (tokens - 1).bit_length() if tokens <= 64 else 64
    plan = StreamPlan(stages=stages, per_sm=per_sm, tokens=most, pair=pair)
    assert stream.unfit(gemm) is None
    results = []
    for _ in range(2):
        y = torch.full((tokens, problem.results), float("nan"), device=DEVICE, dtype=dtype)
        if residual is not None:
            y.copy_(residual)
        stream.bind(gemm, plan)(x, y)
        results.append(y)
    expected = op.bind_reference(problem, *sample.weights)(x, residual)
    assert error(results[0], expected) <= BOUND
    assert torch.equal(*results)


@pytest.mark.skipif(NO_HOPPER, reason="kernels of Hopper")
@pytest.mark.parametrize(
    "group, minima, per_sm, depth, pair, outputs, inputs, bias, activation, add, eps",
    [
        (128, False, 2, 4, False, 64, 128, False, None, False, None),
        (128, True, 1, 2, True, 200, 400, True, None, True, None),
        (None, False, 1, 2, True, 256, 2176, True, "silu", False, 1e-5),
        (None, True, 1, 3, False, 136, 1152, True, None, True, None),
        (128, False, 2, 4, False, 6144, 4096, False, None, False, 1e-6),
        (128, False, 2, 2, True, 4096, 12288, False, None, True, None),
        (128, True, 1, 4, True, 24576, 4096, False, "silu", False, 1e-6),
        (128, False, 3, 1, True, 24576, 4096, False, "silu", False, None),
        (32, True, 2, 1, True, 24576, 4096, False, "silu", False, 1e-6),
        (32, True, 2, 1, False, 4096, 12288, False, None, True, None),
        (32, True, 2, 2, False, 6144, 4096, False, None, False, 1e-6),
        (32, False, 1, 1, True, 200, 400, True, None, True, None),
        (16, True, 2, 1, False, 4096, 4096, True, None, True, 1e-6),
        (64, False, 1, 1, True, 1024, 5120, True, "silu", False, 1e-6),
    ],
)
def test_rows(group, minima, per_sm, depth, pair, outputs, inputs, bias, activation, add, eps):
    """One token by programs that share nothing; twice the same bits."""
    problem = problem_of(
        outputs, inputs, group=group, minima=minima, bias=bias, activation=activation, add=add,
        eps=eps,
    )  # fmt: skip
    sample = op.sample_of(problem, (1,))
    weight, bias_O, norm_I = sample.weights
    x, residual = sample.arguments
    gemm = Int4Gemm(
        weight=weight, bias_O=bias_O, norm_I=norm_I, eps=eps or 0.0, activation=activation, add=add
    )
    plan = StreamPlan(stages=3, per_sm=per_sm, tokens=1, pair=pair, depth=depth)
    assert stream.unfit(gemm) is None and stream.by_rows(gemm, plan)
    results = []
    for _ in range(2):
        y = torch.full((1, problem.results), float("nan"), device=DEVICE, dtype=DTYPE)
        if residual is not None:
            y.copy_(residual)
        stream.bind(gemm, plan)(x, y)
        results.append(y)
    assert error(results[0], op.bind_reference(problem, *sample.weights)(x, residual)) <= BOUND
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "more",
    [
        {"eps": 1e-6},
        {"eps": 1e-6, "activation": "silu", "group": 32, "minima": True},
        {"add": True, "bias": True},
        {"group": 64, "wide": True},
        {"group": 32, "floats": True, "eps": 1e-6, "activation": "silu"},
        {"group": 16, "floats": True, "add": True},
        {"group": 64, "floats": True, "levels": "nf4", "bias": True},
        {"group": 64, "floats": True, "levels": "fp4", "eps": 1e-6, "activation": "silu"},
        {"group": 16, "minima": True, "bias": True},
        {"group": 64, "ordered": True, "eps": 1e-6, "activation": "silu"},
    ],
    ids=lambda more: " ".join(more),
)
def test_the_layer_takes_any_number_of_tokens(more, monkeypatch):
    monkeypatch.setattr(triton_linear_int4, "LIBRARY_FROM", 41)
    problem = problem_of(128, 256, **more)
    assert triton_linear_int4.KERNEL.supports(problem) is None
    assert op.OP.error(triton_linear_int4.KERNEL, problem) <= op.OP.tolerance(problem)


@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("more", [{"eps": 1e-6, "bias": True}, {"activation": "silu"}])
def test_many_tokens_become_int8(group, more):
    """W4A8: integers times integers."""
    problem = problem_of(128, 256, group=group, int8_rows=True, **more)
    assert triton_linear_int4.KERNEL.supports(problem) is None
    sample = op.sample_of(problem, (op.INT8_FROM,))
    x, _ = sample.arguments
    expected = op.bind_reference(problem, *sample.weights)(x)
    assert error(triton_linear_int4.bind(problem, *sample.weights)(x), expected) <= BOUND


def test_what_no_kernel_serves_is_told():
    reasons = [
        triton_linear_int4.KERNEL.supports(problem_of(*sizes, **more))
        for sizes, more in (
            ((64, 200), {}),
            ((64, 256), {"group": 256}),
            ((96, 256), {"activation": "silu"}),
            ((128, 256), {"activation": "tanh"}),
        )
    ]
    assert [reason and reason.split()[0] for reason in reasons] == [
        "200",
        "scales",
        "gates",
        "does",
    ]


@pytest.mark.skipif(interpreted(), reason="widths of real models take a GPU")
@pytest.mark.parametrize(
    "group, minima, floats",
    [
        *((128, False, False), (32, True, False), (16, True, False)),
        *((32, False, True), (16, False, True)),
    ],
)
@pytest.mark.parametrize(
    "outputs, inputs, more",
    [
        (6144, 4096, {"eps": 1e-6}),
        (4096, 4096, {"add": True}),
        (24576, 4096, {"eps": 1e-6, "activation": "silu"}),
        (4096, 12288, {"add": True}),
    ],
)
def test_widths_of_8b(outputs, inputs, more, group, minima, floats):
    """All plans of Qwen3-8B's layers, as the self-check at start runs them."""
    problem = problem_of(outputs, inputs, group=group, minima=minima, floats=floats, **more)
    assert triton_linear_int4.KERNEL.supports(problem) is None
    assert op.OP.failures(triton_linear_int4.KERNEL, problem) == []


@pytest.mark.skipif(interpreted(), reason="graphs take a GPU")
@pytest.mark.parametrize("tokens", [1, 32, 200, 400])
def test_the_layer_is_replayed_from_a_graph(tokens):
    problem = problem_of(1024, 1024, eps=1e-6, activation="silu")
    sample = op.sample_of(problem, (tokens,))
    x, residual = sample.arguments
    layer = triton_linear_int4.bind(problem, *sample.weights)
    eager = layer(x, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layer(x, residual)
    for _ in range(3):
        graph.replay()
        assert torch.equal(replayed, eager)
