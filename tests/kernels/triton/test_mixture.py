"""Triton kernels of mixtures of experts against their references (KRN-16); see test_kernels.py."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.experts import op as experts
from headrace.back.kernels.experts import triton_experts
from headrace.back.kernels.route import op as route
from headrace.back.kernels.route import triton_route
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.mixture import ROUTERS, experts_problem, route_problem
from tests.kernels.triton import test_kernels
from tests.kernels.triton.test_kernels import BOUND, DEVICE, DTYPES

pytestmark = test_kernels.pytestmark


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_equals_the_reference(name):
    assert route.OP.error(triton_route.KERNEL, route_problem(name, DEVICE)) <= 1e-5


CASES = [("silu", False), ("gelu_tanh", True), ("swiglu_oai", False)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "odd"), CASES)
def test_experts_equal_the_reference(dtype, activation, odd):
    problem = experts_problem(dtype, DEVICE, activation=activation, odd=odd)
    assert experts.OP.error(triton_experts.KERNEL, problem) <= BOUND[dtype]


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


def test_many_pairs_are_sorted_in_order():
    generator = torch.Generator().manual_seed(2)
    expert = torch.randint(0, 7, (2500,), generator=generator, dtype=torch.int32).to(DEVICE)
    pairs, places = torch.empty_like(expert), torch.empty_like(expert)
    starts = torch.empty(9, dtype=torch.int32, device=DEVICE)
    triton_experts.sort_kernel[(8,)](
        expert, pairs, places, starts, 2500, X=8, BLOCK=1024, DEPENDENT=False
    )
    order = expert.argsort(stable=True)
    assert torch.equal(pairs.long(), order)
    assert torch.equal(pairs[places.long()].long().cpu(), torch.arange(2500))
    assert starts.diff().tolist() == expert.bincount(minlength=8).tolist()
