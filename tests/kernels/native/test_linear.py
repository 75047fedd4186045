"""The native linear against float64: odd sizes, strides, extreme values; batch and thread invariance."""

import pytest
import torch

from headrace.back.kernels.linear.native import KERNEL, bind_with
from headrace.back.kernels.linear.op import OP, LinearProblem
from headrace.back.kernels.native.library import unsupported

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# rows, outputs, inputs: below, at and above every tile and vector width
SIZES = [(1, 1, 1), (1, 5, 7), (1, 8, 64), (2, 13, 33), (3, 6, 31), (5, 37, 100), (8, 64, 96),
         (17, 33, 64), (31, 130, 257), (32, 48, 1000), (49, 31, 65), (64, 25, 1030), (65, 16, 32),
         (100, 50, 70), (131, 100, 600)]  # fmt: skip


PANEL_ROWS = 64  # of the kernel


def problem(dtype, outputs, inputs, bias=True):
    return LinearProblem(device="cpu", dtype=dtype, inputs=inputs, outputs=outputs, bias=bias)


def values(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours, exact, dtype):
    bound = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]
    error = (ours.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-3)
    assert error <= bound, error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, outputs, inputs", SIZES)
def test_equals_the_exact_product_at_odd_sizes(library, dtype, rows, outputs, inputs):
    x, weight = values(rows, inputs, dtype=dtype), values(outputs, inputs, dtype=dtype, seed=1)
    bias = values(outputs, dtype=dtype, seed=2)
    y = bind_with(library, problem(dtype, outputs, inputs), weight, bias)(x)
    close(y, x.double() @ weight.double().T + bias.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_strided_rows_and_weights(library, dtype):
    wide, weights = values(6, 90, dtype=dtype), values(20, 200, dtype=dtype, seed=1)
    x, weight = wide[::2, 3:74], weights[:, 5:76]
    y = bind_with(library, problem(dtype, 20, 71, bias=False), weight, None)(x)
    close(y, x.double() @ weight.double().T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads(library, dtype):
    x, weight = values(23, 300, dtype=dtype), values(500, 300, dtype=dtype, seed=1)
    linear = bind_with(library, problem(dtype, 500, 300, bias=False), weight, None)
    together = linear(x)
    library.set_threads(1)
    for row in range(23):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_nan_or_inf_stays_in_its_row(library, dtype):
    x, weight = values(5, 70, dtype=dtype), values(40, 70, dtype=dtype, seed=1).abs()
    linear = bind_with(library, problem(dtype, 40, 70, bias=False), weight, None)
    clean = linear(x)
    x[1], x[3, 69] = float("nan"), float("inf")
    y = linear(x)
    assert y[1].isnan().all() and (y[3] == float("inf")).all()
    assert torch.equal(y[[0, 2, 4]], clean[[0, 2, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_the_largest_and_the_smallest_values(library, dtype):
    weight = torch.eye(40, dtype=dtype)
    largest, smallest = min(3e38, torch.finfo(dtype).max), max(1e-30, torch.finfo(dtype).tiny)
    x = torch.tensor([[largest, -largest, smallest, 1.0, -smallest] * 8]).to(dtype)
    assert torch.equal(bind_with(library, problem(dtype, 40, 40, False), weight, None)(x), x)


def test_no_rows_give_no_rows(newest):
    linear = bind_with(newest, problem(torch.float32, 4, 8), torch.ones(4, 8), torch.ones(4))
    assert linear(torch.ones(0, 8)).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_long_prompt_is_what_it_is_alone(library, dtype):
    """Whoever shares the step: the same bits, over the borders of panels too (P17)."""
    x, weight = (
        values(2 * PANEL_ROWS + 7, 136, dtype=dtype)[:, 3:133],
        values(50, 130, dtype=dtype, seed=1),
    )
    linear = bind_with(library, problem(dtype, 50, 130, False), weight, None)
    together = linear(x)
    for row in (0, PANEL_ROWS - 1, PANEL_ROWS, 2 * PANEL_ROWS + 6):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
    close(together, x.double() @ weight.double().T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_check_accepts_it(newest, dtype):
    assert OP.error(KERNEL, problem(dtype, 3072, 1025)) <= OP.tolerance(problem(dtype, 3072, 1025))


def test_other_devices_and_dtypes_are_refused_with_the_reason(newest):
    assert unsupported("cuda", torch.float32) == "runs on the CPU only"
    assert "float64" in KERNEL.supports(problem(torch.float64, 4, 4))
