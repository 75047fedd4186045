"""One token by linear_int4/triton_rows_int4.py, by the values of its operations: no GPU needed. QNT-01."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from headrace.back.kernels.linear_int4 import op, stream
from headrace.back.kernels.linear_int4.stream import Int4Gemm, StreamPlan
from tests.kernels.triton import gluon_values


@pytest.mark.parametrize(
    "group, minima, depth, outputs, inputs, bias, activation, add, eps",
    [
        (128, True, 1, 72, 400, True, None, True, None),
        (32, True, 1, 72, 400, True, None, True, 1e-5),
        (32, False, 2, 64, 2208, False, "silu", False, 1e-5),
        (16, True, 1, 40, 1200, False, None, False, None),
        (64, True, 1, 24, 704, False, None, True, None),
    ],
)
def test_one_token_equals_the_definition(
    group, minima, depth, outputs, inputs, bias, activation, add, eps, monkeypatch
):
    problem = op.LinearInt4Problem(
        device="cpu", dtype=torch.bfloat16, inputs=inputs, outputs=outputs * (2 if activation else 1), group=group,
        minima=minima, bias=bias, activation=activation, add=add, eps=eps,
    )  # fmt: skip
    sample = op.sample_of(problem, (1,))
    weight, bias_O, norm_I = sample.weights
    x, residual = sample.arguments
    gemm = Int4Gemm(
        weight=weight, bias_O=bias_O, norm_I=norm_I, eps=eps or 0.0, activation=activation, add=add
    )
    plan = StreamPlan(stages=3, per_sm=1, tokens=1, depth=depth, pair=group != 16)
    assert stream.unfit_sizes(gemm) is None and stream.by_rows(gemm, plan)
    from headrace.back.kernels.linear_int4 import triton_rows_int4

    def launched(self, *tensors, grid, warmup, **facts):
        facts = {name: one for name, one in facts.items() if name in self.arg_names}
        gluon_values.run_kernel(self, *grid, *tensors, **facts)

    monkeypatch.setattr(stream, "num_sms", lambda device: 2)
    monkeypatch.setattr(type(triton_rows_int4.rows_kernel), "run", launched)
    y = torch.full((1, problem.results), float("nan"), dtype=torch.bfloat16)
    if residual is not None:
        y.copy_(residual)
    expected = op.bind_reference(problem, *sample.weights)(x, residual)
    stream.bind(gemm, plan)(x, y)
    torch.testing.assert_close(
        y.double(), expected.double(), rtol=0, atol=1e-2 * expected.abs().max().item()
    )
