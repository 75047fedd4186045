"""The regimes of experts on Hopper: any routing, and the same in a graph behind other kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.back.kernels.experts import op as experts
from headrace.back.kernels.experts import triton_hopper
from headrace.back.kernels.experts.op import ExpertsProblem
from headrace.back.kernels.experts.triton_hopper import ExpertsPlan, plan_for
from tests.kernels.triton.test_kernels import BF16, DEVICE, FP16, close
from tests.kernels.triton.test_prefill import hopper_only


def problem_of(width: int, inner: int, dtype: torch.dtype = BF16) -> ExpertsProblem:
    return ExpertsProblem(device=DEVICE, dtype=dtype, experts=12, slots=3, width=width, inner=inner)


@pytest.mark.parametrize("count", [1, 2, 3, 40, 200, 5000])
def test_a_step_s_plan_depends_on_its_size_alone(count):
    plan = plan_for(problem_of(512, 256), count)
    assert plan in triton_hopper.PLANS
    assert (plan.regime == "few") == (count <= triton_hopper.FEW_TOKENS)
    assert (plan.regime == "wide") == (count * 3 / 12 > max(triton_hopper.STREAM_ROWS))


def test_a_rank_of_four_is_served():
    """192 inner values of an expert of Qwen3-30B-A3B over four ranks; the TMA unit's boxes lie within it."""
    from headrace.back.kernels.triton.wrap import planned_for

    def told(width: int, inner: int) -> str | None:
        given = {"device": "cuda", "dtype": BF16, "experts": 128, "slots": 8}
        with planned_for((9, 0)):
            return triton_hopper.KERNEL.supports(ExpertsProblem(**given, width=width, inner=inner))

    assert told(2048, 192) is None and told(2048, 128) is None
    assert "below 128" in (told(2048, 96) or "")
    assert "no multiple of 8" in (told(2048, 188) or "")


def routed(problem: ExpertsProblem, tokens: int, how: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    order = torch.rand(tokens, problem.experts, generator=generator)
    if how == "one":
        order[:, 5] = 2.0  # of every token
        order[:, 7:] -= 1.0  # of none
    expert = order.argsort(1, descending=True)[:, : problem.slots].int().contiguous()
    x = torch.randn(tokens, problem.width, generator=generator)
    weight = torch.rand(tokens, problem.slots, generator=generator)
    return x.to(DEVICE, problem.dtype), expert.to(DEVICE), weight.to(DEVICE)


def weights_of(problem: ExpertsProblem) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(problem.experts, 2 * problem.inner, problem.width, generator=generator)
    down = torch.randn(problem.experts, problem.width, problem.inner, generator=generator)
    return (
        (up * problem.width**-0.5).to(DEVICE, problem.dtype),
        (down * problem.inner**-0.5).to(DEVICE, problem.dtype),
    )


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("how", ["uniform", "one"])
@pytest.mark.parametrize(
    "width, inner", [(512, 256), (2048, 768), (1032, 328), (2048, 192), (128, 128)]
)
@pytest.mark.parametrize("plan", triton_hopper.PLANS, ids=lambda plan: f"{plan.regime}{plan.m}")
def test_regimes_equal_the_reference(plan: ExpertsPlan, width, inner, how, dtype):
    """KRN-16: experts with none, with all; a tile that is not full, and several of one expert."""
    problem = problem_of(width, inner, dtype)
    weights = weights_of(problem)
    run = triton_hopper.bind(problem, *weights, always=plan)
    reference = experts.bind_reference(problem, *weights)
    for tokens in (1, 3, 150) if plan.regime == "few" else (1, 37, 150, 1700):
        inputs = routed(problem, tokens, how)
        found = run(*inputs)
        assert close(found, reference(*inputs), dtype), tokens
        assert torch.equal(found, run(*inputs))


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("tokens", [1, 20, 130, 900])
def test_a_graph_of_dependent_launches_gives_the_same(tokens):
    """KRN-22: kernels that start before those whose results they read have ended; other routing in
    each replay."""
    problem = problem_of(512, 768)
    run = triton_hopper.bind(problem, *weights_of(problem))
    x, expert, weight = routed(problem, tokens, "uniform")

    def steps() -> torch.Tensor:
        y = x
        for _ in range(6):
            y = y + run(y, expert, weight)
        return y

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = steps()
    for how in ("uniform", "one"):
        expert.copy_(routed(problem, tokens, how)[1])
        graph.replay()
        found = recorded.clone()
        torch.cuda.synchronize()
        assert torch.equal(found, steps())
