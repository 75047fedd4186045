"""Native routing and experts against their references: every kind of router, odd sizes, all tokens to one expert."""

import pytest
import torch

from headrace.back.kernels.experts import native as experts
from headrace.back.kernels.experts import op as experts_op
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.route import native as route
from headrace.back.kernels.route import op as route_op
from tests.kernels.mixture import ROUTERS, beside_error, experts_problem, route_problem

BOUND = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_equals_the_reference(library, name):
    kernel = Kernel(
        name="one",
        supports=lambda problem: None,
        bind=lambda *given: route.bind_with(library, *given),
    )
    assert route_op.OP.error(kernel, route_problem(name, "cpu")) <= 1e-6


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai", "swiglu_step"])
@pytest.mark.parametrize("dtype", BOUND)
def test_experts_equal_the_reference(library, dtype, activation, odd):
    kernel = Kernel(
        name="one",
        supports=lambda problem: None,
        bind=lambda *given: experts.bind_with(library, *given),
    )
    problem = experts_problem(dtype, "cpu", activation=activation, odd=odd)
    assert experts_op.OP.error(kernel, problem) <= BOUND[dtype]


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_slots_without_an_expert_add_nothing(library, activation):
    """PAR-12: those of other ranks' experts; a token may have no other, and a step may."""
    problem = experts_problem(torch.float32, "cpu", activation=activation, odd=True, absent=True)
    sample = experts_op.OP.sample(problem)
    x, expert, weight = sample.arguments
    assert (expert == -1).all(1).any() and (expert == -1).any(0).all()
    run = experts.bind_with(library, sample.problem, *sample.weights)
    kept = run(x, expert.clamp(min=0), weight.masked_fill(expert < 0, 0.0))
    assert torch.allclose(run(x, expert, weight), kept, rtol=0, atol=2e-6 * float(kept.abs().max()))
    assert not run(x, torch.full_like(expert, -1), weight).any()
    with pytest.raises(Exception, match="experts"):
        run(x, torch.full_like(expert, -2), weight)


@pytest.mark.parametrize("dtype", BOUND)
def test_what_adapters_add_goes_in_front_of_the_activation(newest, dtype):
    problem = experts_problem(dtype, "cpu", activation="swiglu_oai", odd=True)
    sample = experts_op.OP.sample(problem)
    run = experts.bind_with(newest, sample.problem, *sample.weights)
    reference = experts_op.bind_reference(sample.problem, *sample.weights)
    assert beside_error(run, reference, sample.arguments, sample.problem) <= 2 * BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
def test_a_token_has_the_same_bits_among_any_others(library, dtype):
    """ENG-17: tokens beside it, and how many go to its experts, change nothing."""
    problem = experts_problem(dtype, "cpu")
    sample = experts_op.OP.sample(problem)
    x, expert, weight = sample.arguments
    run = experts.bind_with(library, sample.problem, *sample.weights)
    whole = run(x, expert, weight)
    for begin, end in ((0, 1), (7, 12), (20, 70)):
        part = run(*(t[begin:end].contiguous() for t in (x, expert, weight)))
        assert torch.equal(part, whole[begin:end])


def test_an_expert_that_is_none_is_refused(library):
    sample = experts_op.OP.sample(experts_problem(torch.float32, "cpu"))
    x, expert, weight = sample.arguments
    run = experts.bind_with(library, sample.problem, *sample.weights)
    with pytest.raises(Exception, match="experts"):
        run(x, torch.full_like(expert, sample.problem.experts), weight)
