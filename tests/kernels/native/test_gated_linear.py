"""The native product that gates its own results: near the exact one, the same bits for any number of rows."""

import pytest
import torch

from headrace.back.kernels.fused_linear.op import OP, FusedLinearProblem, bind_reference
from headrace.back.kernels.linear.native import GATED_KERNEL, bind_gated

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 4e-6, torch.bfloat16: 5e-3, torch.float16: 8e-4}


def problem(dtype, results, inputs, activation="silu", **more):
    return FusedLinearProblem(
        device="cpu", dtype=dtype, inputs=inputs, outputs=2 * results, activation=activation, **more
    )


def values(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_for(asked):
    return values(asked.outputs, asked.inputs, dtype=asked.dtype, seed=1) / asked.inputs**0.5


def exact(asked, weight, x):
    wide = FusedLinearProblem(**{**vars(asked), "dtype": torch.float32})
    return bind_reference(wide, weight.float(), None, None)(x.float(), None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, results, inputs",
    [(1, 16, 1), (1, 48, 33), (2, 16, 31), (3, 112, 64), (5, 32, 100), (16, 208, 96), (17, 16, 257),
     (33, 64, 70), (64, 96, 128), (65, 32, 50), (130, 80, 320), (700, 48, 512)],
)  # fmt: skip
def test_is_near_the_exact_result(library, dtype, rows, results, inputs):
    asked = problem(dtype, results, inputs)
    weight, x = weight_for(asked), values(rows, inputs + 4, dtype=dtype)[:, 1 : inputs + 1]
    out, expected = bind_gated(library, asked, weight)(x, None), exact(asked, weight, x)
    assert out.dtype == dtype and out.shape == (rows, results)
    assert (out.float() - expected).abs().max() <= BOUND[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads(library, dtype, activation):
    asked = problem(dtype, 320, 96, activation)
    fused, x = bind_gated(library, asked, weight_for(asked)), values(200, 96, dtype=dtype)
    together = fused(x)
    library.set_threads(1)
    for rows in (1, 2, 3, 8, 15, 17, 31, 64, 65):
        assert torch.equal(fused(x[:rows]), together[:rows])
    assert torch.equal(fused(x[199:]), together[199:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_check_accepts_it(newest, dtype):
    asked = problem(dtype, 3072, 1024)
    assert OP.error(GATED_KERNEL, asked) <= OP.tolerance(asked)


def test_no_rows_give_no_rows(newest):
    asked = problem(torch.float32, 16, 8)
    assert bind_gated(newest, asked, weight_for(asked))(torch.ones(0, 8)).shape == (0, 16)


def test_what_it_cannot_do_is_refused_with_the_reason(newest):
    assert "multiples of 16" in GATED_KERNEL.supports(problem(torch.float32, 24, 64))
    for more in ({"bias": True}, {"eps": 1e-6}, {"add": True}):
        assert "neither norms" in GATED_KERNEL.supports(problem(torch.float32, 32, 64, **more))
    assert "gates by" in GATED_KERNEL.supports(problem(torch.float32, 32, 64, None))
    assert "float64" in GATED_KERNEL.supports(problem(torch.float64, 32, 64))
