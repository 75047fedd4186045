"""Triton kernels of mixtures of experts against their references (KRN-16); see test_kernels.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.experts import op as experts
from headrace.back.kernels.experts import triton_dispatch, triton_experts, triton_hopper
from headrace.back.kernels.fused_route import op as fused_route
from headrace.back.kernels.fused_route import triton_fused_route
from headrace.back.kernels.route import op as route
from headrace.back.kernels.route import triton_route
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.mixture import ROUTERS, beside_error, experts_problem, route_problem
from tests.kernels.triton import test_kernels
from tests.kernels.triton.test_kernels import BOUND, DEVICE, DTYPES

pytestmark = test_kernels.pytestmark


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_equals_the_reference(name):
    assert route.OP.error(triton_route.KERNEL, route_problem(name, DEVICE)) <= 1e-5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("name", ["Qwen", "DeepSeek-V2", "DeepSeek-V4", "Phi-3.5-MoE"])
def test_rows_of_nan_choose_experts_that_exist(name):
    """BEY-26: rows of padding may hold anything; what reads a weight by the number stays within it."""
    problem = route_problem(name, DEVICE)
    logits_TG = torch.full((3, problem.columns), float("nan"), device=DEVICE)
    logits_TG[1] = torch.linspace(-1.0, 1.0, problem.columns)
    bias_X = torch.zeros(problem.experts, device=DEVICE) if problem.bias else None
    expert_TK, _ = triton_route.bind(problem, bias_X)(logits_TG)
    routed_TK = expert_TK[:, : problem.top_k]
    assert routed_TK.min() >= 0 and routed_TK.max() < problem.experts
    expected_TK, _ = route.bind_reference(problem, bias_X)(logits_TG[1:2])
    assert torch.equal(expert_TK[1:2], expected_TK)


FUSED = {"Mixtral": 64, "Qwen": 72, "Granite": 64}


def fused_problem(name: str, **more: object) -> fused_route.FusedRouteProblem:
    given = {"dtype": torch.float32, "width": FUSED.get(name, 64), "eps": 1e-6, **more}
    return fused_route.FusedRouteProblem(route=route_problem(name, DEVICE), **given)


@pytest.mark.parametrize("name", FUSED)
def test_norm_router_and_choice_in_one_equal_the_reference(name, monkeypatch):
    """KRN-16: also of steps that are no divisor of the width, and with a bias of the router's."""
    monkeypatch.setattr(triton_fused_route, "C", 32)
    problem = fused_problem(name, bias=name == "Granite")
    assert triton_fused_route.KERNEL.supports(problem) is None
    assert fused_route.OP.error(triton_fused_route.KERNEL, problem) <= 2e-5


def test_a_bias_chooses_and_does_not_weigh_in_one_kernel_too():
    problem = fused_problem("DeepSeek-V3")
    assert "groups" in (triton_fused_route.KERNEL.supports(problem) or "")
    problem = replace(problem, route=replace(problem.route, groups=1, kept_groups=1))
    assert fused_route.OP.error(triton_fused_route.KERNEL, problem) <= 2e-5
    softmax = replace(problem, route=replace(problem.route, score="softmax"))
    assert "no bias" in (triton_fused_route.KERNEL.supports(softmax) or "")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_a_row_of_nan_chooses_experts_that_exist_in_one_kernel_too():
    """BEY-26: equal logits choose the first experts, and what is no number chooses likewise."""
    problem = fused_problem("Mixtral")
    weight = torch.zeros(8, 64, device=DEVICE)
    run = triton_fused_route.bind(problem, weight, None, torch.ones(64, device=DEVICE))
    for value in (float("nan"), 1.0):
        _, expert_1K, _ = run(torch.full((1, 64), value, device=DEVICE))
        assert expert_1K.tolist() == [[0, 1]]


CASES = [
    ("silu", False),
    ("gelu_tanh", True),
    ("swiglu_oai", False),
    ("swiglu_step", True),
    ("situ", False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "odd"), CASES)
def test_experts_equal_the_reference(dtype, activation, odd):
    problem = experts_problem(dtype, DEVICE, activation=activation, odd=odd)
    assert experts.OP.error(triton_experts.KERNEL, problem) <= BOUND[dtype]


@pytest.mark.parametrize("blocks", [pytest.param((64,), marks=pytest.mark.slow), (4096,)])
def test_slots_without_an_expert_add_nothing(blocks, monkeypatch):
    """PAR-12: those of other ranks' experts, counted by each program and in blocks."""
    monkeypatch.setattr(triton_dispatch, "ONE_BLOCKS", blocks)
    problem = experts_problem(torch.float32, DEVICE, activation="swiglu_oai", odd=True, absent=True)
    assert experts.OP.error(triton_experts.KERNEL, problem) <= BOUND[torch.float32]


def test_results_go_into_a_residual():
    problem = replace(experts_problem(torch.float32, DEVICE), adds=True)
    assert experts.OP.error(triton_experts.KERNEL, problem) <= BOUND[torch.float32]


@pytest.mark.parametrize("adds", [False, True])
def test_few_tokens_equal_the_reference(adds):
    """The kernels of one or two tokens, by themselves; their plans are those of Hopper."""
    problem = replace(experts_problem(torch.float32, DEVICE), adds=adds)
    sample = triton_hopper.sample_of(problem, 2)
    found, expected = (
        bind(sample.problem, *sample.weights)(*(one.clone() for one in sample.arguments))
        for bind in (triton_hopper.bind_few, experts.bind_reference)
    )
    assert (found - expected).abs().max() <= BOUND[torch.float32] * expected.abs().max()


def test_what_adapters_add_goes_in_front_of_the_activation():
    sample = experts.OP.sample(experts_problem(torch.float32, DEVICE, odd=True))
    run = triton_experts.bind(sample.problem, *sample.weights)
    reference = experts.bind_reference(sample.problem, *sample.weights)
    assert beside_error(run, reference, sample.arguments, sample.problem) <= 1e-5


@pytest.mark.skipif(interpreted(), reason="products of the interpreter depend on a row's place")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_among_any_others(dtype):
    sample = experts.OP.sample(experts_problem(dtype, DEVICE))
    x, expert, weight = sample.arguments
    run = triton_experts.bind(sample.problem, *sample.weights)
    whole = run(x, expert, weight)
    for begin, end in ((0, 1), (7, 12), (20, 70)):
        part = run(*(t[begin:end].contiguous() for t in (x, expert, weight)))
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("tokens", [1, 3, 300, 700])
def test_pairs_are_sorted_in_order_into_tiles_of_one_expert(tokens, monkeypatch):
    """One expert that nobody chose, one that every token did."""
    monkeypatch.setattr(triton_dispatch, "ONE_BLOCKS", (64, 1024))
    monkeypatch.setattr(triton_dispatch, "BLOCKS", 2)
    generator = torch.Generator().manual_seed(2)
    others = torch.rand(tokens, 8, generator=generator)[:, 2:].argsort(1)[:, :2] + 1
    order = torch.cat((torch.zeros(tokens, 1), others), dim=1)
    expert = order.to(device=DEVICE, dtype=torch.int32)
    x = torch.randn(tokens, 20, generator=generator).to(DEVICE)
    found = triton_dispatch.dispatched(x, expert, experts=8, m=16)
    count = int(found.tiles[0])
    tile_expert, tile_rows = found.tiles[1 : 1 + 2 * count].cpu().view(count, 2).T
    sizes = expert.flatten().long().bincount(minlength=8).cpu()
    assert torch.equal(tile_expert.long().bincount(minlength=8), (sizes + 15) // 16)
    assert tile_expert.tolist() == sorted(tile_expert.tolist())
    places = found.places_P.long().cpu()
    flat = expert.flatten().long().cpu()
    assert torch.equal(tile_expert.long()[places // 16], flat)
    assert (places % 16 < tile_rows[places // 16]).all() and int(tile_rows.sum()) == 3 * tokens
    for one in range(8):
        mine = places[flat == one]
        assert torch.equal(mine, mine.sort().values)
    assert torch.equal(found.rows_NE[found.places_P.long()], x.repeat_interleave(3, dim=0))
