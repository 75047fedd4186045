"""Mixtures with packed weights: against the definition in every form, odd sizes, biases and activations;
and against the dequantized mixture; batch invariance; NaN (PLT-09)."""

from dataclasses import replace

import pytest
import torch

from headrace.back.kernels.experts import op as plain
from headrace.back.kernels.experts_quant import op
from headrace.back.kernels.experts_quant.layout import FORMS, ExpertsKind, matrix_bytes, mixed_rows
from headrace.back.kernels.experts_quant.native import KERNEL, bind_with
from headrace.back.kernels.experts_quant.op import OP, ExpertsQuantProblem
from headrace.back.kernels.linear_blocks.layout import LAYOUTS, dequantize_rows
from headrace.back.kernels.linear_quant import layout as rows_layout
from headrace.back.kernels.linear_quant.layout import PackedWeight
from headrace.back.kernels.native.library import NativeError
from tests.covering import first_of_each
from tests.kernels.mixture import beside_error, experts_problem

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RARE = ("int8-asym-g32", "int8-asym-g64", "int8-asym-g128", "iq3-xxs", "iq3-s")


def problem_of(form, dtype, activation="silu", odd=False):
    mixture = experts_problem(dtype, "cpu", activation=activation, odd=odd)
    layout = LAYOUTS.get(form)
    if layout is not None and layout.size:  # blocks of checkpoints are whole
        mixture = replace(
            mixture, width=256 + layout.block, inner=layout.block if layout.block > 32 else 96
        )
    kinds = (ExpertsKind(mixture.experts, form, form, form),)
    return ExpertsQuantProblem(mixture=mixture, kinds=kinds)


def weights_of(problem, seed=1):
    generator = torch.Generator().manual_seed(seed)
    parts = op.random_experts(problem, generator)
    mixture = problem.mixture
    if not mixture.bias:
        return parts, None, None
    up, down = (
        torch.randn(mixture.experts, size, generator=generator)
        for size in (2 * mixture.inner, mixture.width)
    )
    return parts, up, down


def arguments_of(problem, tokens, seed=2):
    mixture = problem.mixture
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, mixture.width, generator=generator).to(mixture.dtype)
    expert = torch.rand(tokens, mixture.experts, generator=generator).argsort(1)[:, : mixture.slots]
    return x, expert.int().contiguous(), torch.rand(tokens, mixture.slots, generator=generator)


def close(got, wanted, problem, further=1.0):
    error = (got.double() - wanted.double()).abs().max()
    assert error <= further * OP.tolerance(problem) * wanted.double().abs().max(), error
    return error


@pytest.mark.parametrize("form", ["int8", "fp8", "int4-g64"])
def test_what_adapters_add_goes_in_front_of_the_activation(newest, form):
    problem = problem_of(form, torch.float32)
    weights = weights_of(problem)
    run, reference = bind_with(newest, problem, *weights), op.bind_reference(problem, *weights)
    error = beside_error(run, reference, arguments_of(problem, 7), problem.mixture)
    assert error <= OP.tolerance(problem)


@pytest.mark.slow
@pytest.mark.parametrize("form", RARE)
def test_what_checkpoints_alone_store_equals_the_definition(library, form):
    test_equals_the_definition_in_every_form(library, form, torch.bfloat16)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [form for form in FORMS if form not in RARE])
def test_equals_the_definition_in_every_form(library, form, dtype):
    problem = problem_of(form, dtype)
    weights = weights_of(problem)
    for tokens in (1, 2, 7, 40):
        arguments = arguments_of(problem, tokens)
        wanted = op.bind_reference(problem, *weights)(*arguments)
        close(bind_with(library, problem, *weights)(*arguments), wanted, problem)


@pytest.mark.parametrize("form", ["int8", "fp8", "int4-g64"])
def test_slots_without_an_expert_add_nothing(newest, form):
    """PAR-12: rows of other ranks' experts are not even prepared."""
    problem = problem_of(form, torch.float32, "swiglu_oai")
    weights, (x, expert, weight) = weights_of(problem), arguments_of(problem, 9)
    absent = plain.with_absent(replace(problem.mixture, absent=True), expert.clone())
    run = bind_with(newest, problem, *weights)
    kept = run(x, expert, weight.masked_fill(absent < 0, 0.0))
    assert torch.allclose(run(x, absent, weight), kept, rtol=0, atol=2e-6 * float(kept.abs().max()))
    assert not run(x, torch.full_like(expert, -1), weight).any()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "swiglu_oai", "swiglu_step"])
@pytest.mark.parametrize("form", ["int4-g32", "int8", "fp8"])
def test_equals_the_definition_with_every_activation_at_odd_sizes(library, form, activation):
    problem = problem_of(form, torch.float32, activation=activation, odd=True)
    weights, arguments = weights_of(problem), arguments_of(problem, 33)
    wanted = op.bind_reference(problem, *weights)(*arguments)
    close(bind_with(library, problem, *weights)(*arguments), wanted, problem)


def dequantized(panels):
    rows = []
    for i in range(len(panels.panels_XPB)):
        matrix, every = panels.matrix(i), torch.arange(panels.outputs)
        values = (
            rows_layout.dequantize_rows if isinstance(matrix, PackedWeight) else dequantize_rows
        )
        rows.append(
            values(matrix if isinstance(matrix, PackedWeight) else matrix.segments[0], every)
        )
    return torch.stack(rows)


@pytest.mark.parametrize(
    "form",
    [
        "int8",
        "fp8",
        "int4-g32",
        "int4-asym-g64",
        "int8-g128",
        "Q8_0",
        "Q4_K",
        "Q6_K",
        "MXFP4",
        "nvfp4",
        "fp8-g32",
        "fp8-g128",
    ],
)
def test_is_the_dequantized_mixture_but_for_rounded_activations(library, form):
    problem = problem_of(form, torch.float32)
    weights, arguments = weights_of(problem), arguments_of(problem, 9)
    (part,) = weights[0]
    up = torch.cat((dequantized(part.gate), dequantized(part.up)), 1)
    wanted = plain.bind_reference(problem.mixture, up, dequantized(part.down))(*arguments)
    got = bind_with(library, problem, *weights)(*arguments)
    close(
        got, wanted, problem, further=1.0 if form.startswith("fp8") else 10.0
    )  # 1/127 of a group's largest value


def test_experts_of_several_forms_lie_behind_each_other(library):
    problem = problem_of("Q4_K", torch.bfloat16)
    mixture = replace(problem.mixture, experts=8, bias=False)
    kinds = (ExpertsKind(5, "Q4_K", "Q5_K", "Q6_K"), ExpertsKind(3, "Q8_0", "MXFP4", "Q8_0"))
    problem = ExpertsQuantProblem(mixture=mixture, kinds=kinds)
    weights, arguments = weights_of(problem), arguments_of(problem, 21)
    wanted = op.bind_reference(problem, *weights)(*arguments)
    close(bind_with(library, problem, *weights)(*arguments), wanted, problem)


@pytest.mark.parametrize("form", ["int4-g64", "int8", "fp8", "Q6_K", "MXFP4", "fp8-g32"])
def test_a_token_does_not_depend_on_those_beside_it(library, form):
    problem = problem_of(form, torch.bfloat16)
    run = bind_with(library, problem, *weights_of(problem))
    x, expert, weight = arguments_of(problem, 150)
    whole = run(x, expert, weight)
    for cut in (slice(0, 1), slice(3, 8), slice(90, 150)):
        assert torch.equal(
            run(x[cut].contiguous(), expert[cut].contiguous(), weight[cut].contiguous()), whole[cut]
        )


def test_a_nan_stays_in_its_token(library):
    problem = problem_of("int4-g32", torch.float32)
    run = bind_with(library, problem, *weights_of(problem))
    x, expert, weight = arguments_of(problem, 4)
    whole = run(x, expert, weight)
    x[2, 5] = torch.nan
    lost = run(x, expert, weight)
    assert lost[2].isnan().any() and torch.equal(lost[[0, 1, 3]], whole[[0, 1, 3]])


def test_experts_outside_the_range_and_kinds_that_do_not_go_together_are_refused(library):
    problem = problem_of("int8", torch.float32)
    run = bind_with(library, problem, *weights_of(problem))
    x, expert, weight = arguments_of(problem, 2)
    expert[1, 0] = problem.mixture.experts
    with pytest.raises(NativeError, match="out of range"):
        run(x, expert, weight)
    kinds = (ExpertsKind(2, "int8", "int8", "int8"), ExpertsKind(2, "Q8_0", "Q8_0", "Q8_0"))
    assert "0] and [" in mixed_rows(kinds) or "groups of" in mixed_rows(kinds)
    assert KERNEL.supports(replace(problem, kinds=kinds)) == mixed_rows(kinds)


@pytest.mark.parametrize("form", first_of_each(FORMS, [form[:3] for form in FORMS]))
def test_the_self_check_passes_in_every_form(library, form):
    choice = OP.choose(problem_of(form, torch.bfloat16))
    assert choice.kernel.name == "native", choice


def test_a_matrix_takes_what_its_bits_say():
    assert matrix_bytes("MXFP4", 64, 64) == 64 * 64 * 17 // 32
    assert matrix_bytes("int8", 64, 64) == 64 * 64 + 4 * 64
