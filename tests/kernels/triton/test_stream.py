"""The streaming product of Hopper: any shape, any number of tokens up to 64, whatever is around it."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.fused_linear import op as fused_linear
from headrace.back.kernels.linear import stream
from headrace.back.kernels.linear.table import GemmPlan, plan_for, write
from headrace.back.kernels.linear.time_model import gemm_device
from headrace.back.kernels.linear.triton_small import Gemm, launcher
from tests.kernels.triton.test_kernels import BF16, DEVICE, FP16, NAN, close
from tests.kernels.triton.test_prefill import hopper_only

pytestmark = pytest.mark.gpu


@hopper_only
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 64])
@pytest.mark.parametrize(
    "outputs, inputs, k, per_sm, bias, activation, add",
    [
        (64, 264, 64, 1, False, None, False),
        (4096, 1032, 128, 2, True, None, True),
        (1000, 264, 64, 1, True, None, False),
        (2 * 1544, 520, 128, 1, True, "silu", False),
        (6144, 4096, 256, 1, False, None, False),
        (2 * 12288, 512, 128, 1, False, "silu", False),
    ],
)
def test_streamed_products(dtype, tokens, outputs, inputs, k, per_sm, bias, activation, add):
    """KRN-20, KRN-22: twice the same bits, whichever program of a tile comes last; fewer units than programs, and runs
    of many tiles."""
    problem = fused_linear.FusedLinearProblem(
        device=DEVICE, dtype=dtype, inputs=inputs, outputs=outputs, bias=bias,
        activation=activation, add=add,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(tokens)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    weight = values(outputs, inputs) / inputs**0.5
    bias_O, residual = values(outputs) if bias else None, values(tokens, problem.results)
    x = values(tokens, inputs + 8)[:, :inputs]
    expected = fused_linear.bind_reference(problem, weight, bias_O, None)(
        x, residual.clone() if add else None
    )
    plan = GemmPlan(kernel="stream", n=64, k=k, warps=4, stages=2, split=per_sm)
    product = Gemm(weight_OI=weight, bias_O=bias_O, activation=activation or "", add=add)
    run = launcher(product, plan, 1 << (tokens - 1).bit_length())
    results = []
    for _ in range(2):
        y = residual.clone() if add else torch.full_like(residual, NAN)
        run(x, y)
        results.append(y)
    assert close(results[0], expected, dtype)
    assert torch.equal(*results)


def test_where_it_cannot_run_the_rule_is_taken(tmp_path, monkeypatch):
    """A table holds for a device and not for what is asked of it."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    plan = GemmPlan(kernel="stream", n=64, k=256, warps=4, stages=4)
    one = gemm_device("one", (9, 0), 132)
    write(tmp_path / "gemms" / "one.json", one, {"4096x4096": {8: plan}})
    assert plan_for(one, 4096, 4096, 8, gated=False) == plan
    ruled = plan_for(one, 4096, 4096, 8, gated=False, without={"stream"})
    assert ruled is not None and ruled.kernel == "skinny"
    weight = torch.zeros(64, 64)
    assert "GPUs" in str(stream.unfit(weight, "silu"))
