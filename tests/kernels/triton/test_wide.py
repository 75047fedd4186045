"""The gated product of many tokens on Hopper: any shape, any number of tokens, in a graph behind other kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.fused_linear import op as fused_linear
from headrace.back.kernels.fused_linear.around import norm_problem
from headrace.back.kernels.fused_linear.triton_fused_linear import bind
from headrace.back.kernels.linear import wide
from headrace.back.kernels.linear.table import (
    MAX_TOKENS,
    GemmPlan,
    measured,
    padded,
    plan_for,
    user_file,
    write,
)
from headrace.back.kernels.linear.time_model import gemm_device
from headrace.back.kernels.linear.triton_small import Gemm, gemm_device_of, launcher
from headrace.back.kernels.rms_norm.triton_rms_norm import bind_norm
from tests.kernels.triton.test_kernels import BF16, DEVICE, FP16, NAN, close
from tests.kernels.triton.test_prefill import hopper_only

ONE = gemm_device("one", (9, 0), 132)
PLAN = GemmPlan(kernel="wide", n=192, k=64, warps=4, m=256, stages=3, group=8)


def test_a_size_is_padded_to_a_measured_one():
    sizes = [padded(tokens) for tokens in range(1, 20_000)]
    assert sizes == sorted(sizes)
    assert all(size >= tokens for tokens, size in enumerate(sizes[:MAX_TOKENS], 1))
    assert [padded(tokens) for tokens in (3, 64, 65, 193, 513, 2049, 9000)] == [
        4, 64, 128, 256, 768, 4096, MAX_TOKENS,
    ]  # fmt: skip


@pytest.fixture
def own_tables(tmp_path, monkeypatch):
    """Tables of a test's own, forgotten behind it."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    yield
    measured.cache_clear()


def test_what_it_cannot_compute_is_left_to_the_library(own_tables):
    write(user_file(ONE), ONE, {"4096x4096+act": {1024: PLAN}})
    assert plan_for(ONE, 4096, 4096, 1024, gated=True) == PLAN
    assert plan_for(ONE, 4096, 4096, 1024, gated=True, without={"wide"}) is None
    assert plan_for(ONE, 4096, 4096, 1024, gated=False) is None
    for tokens in (1280, 1536, 8192):
        ruled = plan_for(ONE, 8192, 4096, tokens, gated=True)
        assert (ruled is not None and ruled.kernel == "wide") == (tokens >= 1536)
        assert plan_for(ONE, 8192, 4096, tokens, gated=True, without={"wide"}) is None
        assert plan_for(ONE, 8192, 4096, tokens, gated=False) is None
    weight, bias = torch.zeros(64, 512), torch.zeros(64)
    assert "without a bias" in str(wide.unfit(weight, bias, "silu", add=False))
    assert "silu" in str(wide.unfit(weight, None, "gelu", add=False))
    assert "addition" in str(wide.unfit(weight, None, "silu", add=True))
    assert "multiple of 8" in str(wide.unfit(weight[:40], None, "silu", add=False))
    assert "GPUs" in str(wide.unfit(weight, None, "silu", add=False))


def problem_of(dtype: torch.dtype, inputs: int, results: int, eps: float | None = None):
    return fused_linear.FusedLinearProblem(
        device=DEVICE, dtype=dtype, inputs=inputs, outputs=2 * results, activation="silu", eps=eps
    )


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("m, group", [(128, 1), (128, 16), (256, 3)])
@pytest.mark.parametrize(
    "tokens, inputs, results",
    [(65, 264, 8), (128, 1032, 1000), (300, 520, 96), (1111, 4096, 3072), (2500, 264, 200)],
)
def test_gated_products_of_many_tokens(dtype, m, group, tokens, inputs, results):
    """KRN-20: tiles that no edge fills, fewer tiles than programs and many more; every result is written; sums so large
    that the exponential of a gate overflows."""
    generator = torch.Generator().manual_seed(tokens)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    weight = values(2 * results, inputs) / inputs**0.5
    weight[:results:7] *= 64
    x = values(tokens, inputs + 8)[:, :inputs]
    expected = fused_linear.bind_reference(problem_of(dtype, inputs, results), weight, None, None)(
        x, None
    )
    plan = GemmPlan(kernel="wide", n=192, k=64, warps=4, m=m, stages=wide.STAGES[m], group=group)
    run = launcher(Gemm(weight_OI=weight, activation="silu"), plan, padded(tokens))
    kept = torch.full((tokens + 2, results), NAN, device=DEVICE, dtype=dtype)
    results_seen = []
    for _ in range(2):
        y = kept.clone()
        run(x, y[1:-1])
        assert y[0].isnan().all() and y[-1].isnan().all()
        results_seen.append(y[1:-1])
    assert close(results_seen[0], expected, dtype)
    assert torch.equal(*results_seen)


@pytest.mark.gpu
@hopper_only
def test_a_graph_of_dependent_launches_gives_the_same(own_tables):
    """KRN-22: kernels that start before those whose results they read have ended."""
    inputs, results, tokens = 512, 1024, 700
    device = gemm_device_of(torch.device(DEVICE))
    write(user_file(device), device, {f"{2 * results}x{inputs}+act": {padded(tokens): PLAN}})
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(2 * results, inputs, generator=generator) / inputs**0.5).to(DEVICE, BF16)
    down = (torch.randn(inputs, results, generator=generator) / results**0.5).to(DEVICE, BF16)
    norm = torch.rand(inputs, generator=generator).to(DEVICE) + 0.5
    problem = problem_of(BF16, inputs, results, 1e-6)
    layer = bind(problem, weight, None, norm)
    alone_norm = bind_norm(norm_problem(problem), norm)
    alone_product = launcher(Gemm(weight_OI=weight, activation="silu"), PLAN, padded(tokens))
    start = torch.randn(tokens, inputs, generator=generator).to(DEVICE, BF16)

    def alone(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(tokens, results, device=DEVICE, dtype=BF16)
        normed = alone_norm(x)
        torch.cuda.synchronize()
        alone_product(normed, y)
        torch.cuda.synchronize()
        return y

    def steps(x: torch.Tensor, layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        for _ in range(6):
            x = x + layer(x) @ down.t()
        return x

    expected = steps(start, alone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = steps(start, lambda x: layer(x, None))
    for _ in range(3):
        recorded.fill_(NAN)
        graph.replay()
        assert torch.equal(recorded, expected)
