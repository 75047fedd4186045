"""GEMMs with weights of 8-bit integers against the definition: on a GPU, or in the interpreter (test_interpreter.py).
KRN-19."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from headrace.back.kernels.linear_int8 import op, triton_linear_int8
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
        (128, 384, {"bias": True, "activation": "silu", "eps": 1e-6}),
        (72, 512, {"bias": True, "add": True}),
        (40, 256, {"wide": True}),
    ],
)
def test_the_layer(tokens, group, outputs, inputs, more):
    problem = problem_of(outputs, inputs, group=group, **more)
    assert triton_linear_int8.KERNEL.supports(problem) is None
    sample = op.sample_of(problem, (tokens,))
    x, residual = sample.arguments
    expected = op.bind_reference(problem, *sample.weights)(
        x, None if residual is None else residual.clone()
    )
    found = triton_linear_int8.bind(problem, *sample.weights)(x, residual)
    assert error(found, expected) <= BOUND


def test_what_no_kernel_serves_is_told():
    reasons = [
        triton_linear_int8.KERNEL.supports(problem_of(*sizes, **more))
        for sizes, more in (
            ((64, 200), {}),
            ((64, 256), {"group": 256}),
            ((64, 272), {"group": 32}),
            ((128, 256), {"activation": "tanh"}),
        )
    ]
    assert [reason and reason.split()[0] for reason in reasons] == ["200", "scales", "272", "does"]


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
