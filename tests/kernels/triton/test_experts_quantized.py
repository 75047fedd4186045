"""Experts with weights of e4m3 and of 4-bit numbers against their definitions: on a GPU, or in the interpreter
(test_interpreter.py). KRN-16, KRN-17, KRN-18, QNT-01."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.back.kernels.experts.op import ExpertsProblem, biases_of
from headrace.back.kernels.experts.triton_dispatch import dispatched
from headrace.back.kernels.experts_bytes import op as eight
from headrace.back.kernels.experts_bytes import triton_experts_bytes
from headrace.back.kernels.experts_bytes.layout import ByteForm
from headrace.back.kernels.experts_fp8 import op as fp8
from headrace.back.kernels.experts_fp8 import triton_experts_fp8
from headrace.back.kernels.experts_int4 import op as int4
from headrace.back.kernels.experts_int4 import triton_experts_int4
from headrace.back.kernels.experts_int4.layout import Int4Form
from headrace.back.kernels.linear_fp8.layout import quantize_rows
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.triton.test_linear_int4 import DEVICE, DTYPE, NO_HOPPER, error, pytestmark

__all__ = ["pytestmark"]
GPT_OSS: dict[str, Any] = {"activation": "swiglu_oai", "clamp": 7.0, "bias": True}
FORMS = [
    Int4Form(32, floats=True),
    Int4Form(16, floats=True),
    *([] if interpreted() else [Int4Form(16, minima=True)]),
    Int4Form(128),
    Int4Form(32, minima=True),
    Int4Form(None),
]
RARE = (Int4Form(16, floats=True), Int4Form(None))
SOME_FORMS = [
    pytest.param(form, marks=pytest.mark.slow) if form in RARE else form for form in FORMS
]
BOUND = {"int4": 3e-3 if interpreted() else 1e-2, "fp8": 2e-2}
BOUND["bytes"] = BOUND["int4"]


def mixture(width: int, inner: int, **more: Any) -> ExpertsProblem:
    new: dict[str, Any] = {"experts": 12, "slots": 3, "device": DEVICE, "dtype": DTYPE}
    return ExpertsProblem(width=width, inner=inner, **{**new, **more})


def routed(problem: ExpertsProblem, tokens: int, how: str) -> tuple[torch.Tensor, ...]:
    """x, experts and weights; how "one": every token goes to expert 5, none to those from 7 on."""
    generator = torch.Generator().manual_seed(tokens)
    order = torch.rand(tokens, problem.experts, generator=generator)
    if how == "one":
        order[:, 5] = 2.0
        order[:, 7:] -= 1.0
    expert = order.argsort(1, descending=True)[:, : problem.slots].int().contiguous()
    x = torch.randn(tokens, problem.width, generator=generator).to(DEVICE, problem.dtype)
    weight = torch.rand(tokens, problem.slots, generator=generator)
    return x, expert.to(DEVICE), weight.to(DEVICE)


def close(module: Any, problem: Any, sample: Any, run: Any, kind: str) -> None:
    expected = module.bind_reference(sample.problem, *sample.weights)
    for arguments in (sample.arguments, *sample.further):
        assert error(run(*arguments), expected(*arguments)) <= BOUND[kind], len(arguments[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", SOME_FORMS)
@pytest.mark.parametrize(
    "width, inner, more", [(208, 144, GPT_OSS), (256, 64, {}), (64, 272, {"activation": "situ"})]
)
def test_tiles_of_4_bit_numbers(form: Int4Form, width, inner, more):
    problem = int4.ExpertsInt4Problem(mixture=mixture(width, inner, **more), form=form)
    assert triton_experts_int4.KERNEL.supports(problem) is None
    sample = int4.sample_of(problem, (3, 70))
    triton_experts_int4._skipped[sample.problem] = "tiles are asked for"
    try:
        run = triton_experts_int4.bind(sample.problem, *sample.weights)
        close(int4, problem, sample, run, "int4")
    finally:
        del triton_experts_int4._skipped[sample.problem]


@pytest.mark.parametrize(
    "form", [ByteForm(None), ByteForm(16), ByteForm(128), ByteForm(32, floats=True)]
)
@pytest.mark.parametrize("width, inner, more", [(208, 144, GPT_OSS), (64, 272, {})])
def test_tiles_of_bytes(form: ByteForm, width, inner, more):
    """int8 by output and in groups, MXFP8 (KRN-17): odd rows, an expert that nobody chose."""
    problem = eight.ExpertsBytesProblem(mixture=mixture(width, inner, **more), form=form)
    assert triton_experts_bytes.KERNEL.supports(problem) is None
    for m in (16, 64)[: 1 if interpreted() else 2]:
        sample = eight.sample_of(problem, (1, m + 1))
        run = triton_experts_bytes.bind(sample.problem, *sample.weights, always=m)
        close(eight, problem, sample, run, "bytes")


@pytest.mark.covering(1)
@pytest.mark.parametrize("group, fixed", [(None, False), (None, True), (128, False)])
@pytest.mark.parametrize("width, inner, more", [(208, 144, GPT_OSS), (128, 256, {})])
def test_regimes_of_e4m3_numbers(group, fixed, width, inner, more):
    """`fixed`: one scale of all tokens, and one of all inner values (QNT-17)."""
    problem = fp8.ExpertsFp8Problem(mixture=mixture(width, inner, **more), group=group, fixed=fixed)
    assert triton_experts_fp8.KERNEL.supports(problem) is None
    for plan in triton_experts_fp8.all_plans(streamed=False)[:: 2 if interpreted() else 1]:
        sample = fp8.sample_of(problem, (plan.m + 1,))
        run = triton_experts_fp8.bind(sample.problem, *sample.weights, always=plan)
        close(fp8, problem, sample, run, "fp8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "int4", "bytes"])
def test_slots_without_an_expert_add_nothing(kind: str) -> None:
    """PAR-12: in every regime, those of other ranks' experts."""
    whole = mixture(208, 144, absent=True, **GPT_OSS)
    problem: Any
    if kind == "fp8":
        module, kernel = fp8, triton_experts_fp8.KERNEL
        problem = fp8.ExpertsFp8Problem(mixture=whole, group=128)
    elif kind == "int4":
        module, kernel = int4, triton_experts_int4.KERNEL
        problem = int4.ExpertsInt4Problem(mixture=whole, form=Int4Form(128))
    else:
        module, kernel = eight, triton_experts_bytes.KERNEL
        problem = eight.ExpertsBytesProblem(mixture=whole, form=ByteForm(16))
    assert kernel.supports(problem) is None
    sample = module.sample_of(problem, (1, 19))
    triton_experts_int4._skipped[sample.problem] = "tiles are asked for"
    try:
        close(module, problem, sample, kernel.bind(sample.problem, *sample.weights), kind)
    finally:
        del triton_experts_int4._skipped[sample.problem]


@pytest.mark.parametrize("tokens", [3, 700])
def test_rows_are_sorted_as_e4m3_numbers(tokens, monkeypatch):
    """Of few pairs, and of those that are counted first."""
    problem = mixture(304, 64)
    x, expert, _ = routed(problem, tokens, "uniform")
    monkeypatch.setattr("headrace.back.kernels.experts.triton_dispatch.ONE_BLOCKS", (64, 1024))
    found = dispatched(x, expert, experts=problem.experts, m=16, group=128)
    places = found.places_P.long()
    values, scales = quantize_rows(x, 128)
    each = torch.arange(tokens, device=DEVICE).repeat_interleave(problem.slots)
    assert torch.equal(found.scales_NG[places], scales[each])
    rows, expected = found.rows_NE[places].float(), values[each].float()
    assert (rows - expected).abs().max() <= expected.abs().max() / 16  # ties of another division


@pytest.mark.skipif(NO_HOPPER, reason="kernels of Hopper")
@pytest.mark.parametrize("how", ["uniform", "one"])
@pytest.mark.parametrize(
    "width, inner, more",
    [(512, 256, {}), (1040, 336, GPT_OSS), (2048, 768, {}), (2880, 2880, GPT_OSS)],
)
@pytest.mark.parametrize("form", FORMS)
def test_streams_of_4_bit_numbers(form: Int4Form, width, inner, more, how):
    """REG-055: each plan of Hopper's kernels, odd numbers of rows: experts with none, with all; twice the same bits."""
    whole = mixture(width, inner, **more)
    problem = int4.ExpertsInt4Problem(mixture=whole, form=form)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    biases = biases_of(whole, generator)
    weights = int4.random_experts(problem, generator), *biases
    expected = int4.bind_reference(problem, *weights)
    for plan in triton_experts_int4.PLANS:
        run = triton_experts_int4.bind(problem, *weights, always=plan)
        for tokens in (1, 37, 150):
            inputs = routed(whole, tokens, how)
            found = run(*inputs)
            assert error(found, expected(*inputs)) <= BOUND["int4"], (plan, tokens)
            assert torch.equal(found, run(*inputs)), (plan, tokens)


@pytest.mark.skipif(NO_HOPPER, reason="kernels of Hopper")
@pytest.mark.parametrize("how", ["uniform", "one"])
@pytest.mark.parametrize(
    "width, inner, more", [(512, 256, {}), (1040, 336, GPT_OSS), (2048, 768, {})]
)
@pytest.mark.parametrize("group, fixed", [(None, False), (None, True), (128, False)])
def test_streams_of_e4m3_numbers(group, fixed, width, inner, more, how):
    whole = mixture(width, inner, **more)
    problem = fp8.ExpertsFp8Problem(mixture=whole, group=group, fixed=fixed)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    weights = fp8.random_experts(problem, generator), *biases_of(whole, generator)
    expected = fp8.bind_reference(problem, *weights)
    # Sums in another order round a hidden value to the next e4m3 number now and then: the largest one by a 14th of it,
    # which is a share of 3 / 14 / sqrt(inner) of the largest result (a weight and a result of three and four
    # deviations). Two of them in one token.
    bound = max(BOUND["fp8"], 6 / 14 / inner**0.5)
    for plan in triton_experts_fp8.all_plans(streamed=True)[1:]:
        run = triton_experts_fp8.bind(problem, *weights, always=plan)
        for tokens in (2, 37, 150):
            inputs = routed(whole, tokens, how)
            found = run(*inputs)
            assert error(found, expected(*inputs)) <= bound, (plan, tokens)
            assert torch.equal(found, run(*inputs)), (plan, tokens)


@pytest.mark.skipif(interpreted(), reason="graphs take a GPU")
@pytest.mark.parametrize("tokens", [1, 20, 130, 900])
@pytest.mark.parametrize("kind", ["fp8", "int4", "mxfp4"])
def test_a_graph_of_dependent_launches_gives_the_same(kind, tokens):
    """KRN-22: kernels that start before those whose results they read have ended; other routing in
    each replay."""
    whole = mixture(512, 768)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    if kind == "fp8":
        problem = fp8.ExpertsFp8Problem(mixture=whole, group=128)
        run = triton_experts_fp8.bind(problem, fp8.random_experts(problem, generator))
    else:
        form = Int4Form(32, floats=True) if kind == "mxfp4" else Int4Form(128)
        problem = int4.ExpertsInt4Problem(mixture=whole, form=form)
        run = triton_experts_int4.bind(problem, int4.random_experts(problem, generator))
    x, expert, weight = routed(whole, tokens, "uniform")

    def steps() -> torch.Tensor:
        y = x
        for _ in range(6):
            y = torch.nn.functional.rms_norm(y + run(y, expert, weight), (whole.width,))
        return y

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = steps()
    for how in ("uniform", "one"):
        expert.copy_(routed(whole, tokens, how)[1])
        graph.replay()
        found = recorded.clone()
        torch.cuda.synchronize()
        assert found.isfinite().all()
        assert torch.equal(found, steps())


@pytest.mark.skipif(interpreted(), reason="sizes of real models take a GPU")
@pytest.mark.parametrize(
    "name",
    [
        "30B-A3B fp8",
        "30B-A3B fp8 in blocks",
        "gpt-oss",
        "30B-A3B int4",
        "30B-A3B int8",
        "30B-A3B mxfp8",
        "30B-A3B fp8 in blocks, whole experts",
        "30B-A3B int4, whole experts",
    ],
)
def test_sizes_of_real_models(name):
    """All plans, as the self-check at start runs them."""
    whole = mixture(2048, 768, experts=128, slots=8, absent="whole experts" in name)
    module, kernel = (
        (fp8, triton_experts_fp8.KERNEL) if "fp8" in name else (int4, triton_experts_int4.KERNEL)
    )
    problem: Any
    if name == "gpt-oss":
        whole = mixture(2880, 2880, experts=32, slots=4, **GPT_OSS)
        problem = int4.ExpertsInt4Problem(mixture=whole, form=Int4Form(32, floats=True))
    elif "int8" in name or "mxfp8" in name:
        module, kernel = eight, triton_experts_bytes.KERNEL
        form = ByteForm(32, floats=True) if "mxfp8" in name else ByteForm(None)
        problem = eight.ExpertsBytesProblem(mixture=whole, form=form)
    elif "int4" in name:
        problem = int4.ExpertsInt4Problem(mixture=whole, form=Int4Form(128))
    else:
        problem = fp8.ExpertsFp8Problem(mixture=whole, group=128 if "blocks" in name else None)
    assert kernel.supports(problem) is None
    assert module.OP.failures(kernel, problem) == []


def test_what_no_kernel_serves_is_told():
    def told(**more: Any) -> str | None:
        problem = int4.ExpertsInt4Problem(mixture=mixture(256, 128), form=Int4Form(128))
        return triton_experts_int4.KERNEL.supports(replace(problem, **more))

    assert (told(mixture=mixture(200, 128)) or "").startswith("200 inputs")
    assert (told(form=Int4Form(256)) or "").startswith("scales of")
    assert (told(mixture=mixture(256, 128, activation="tanh")) or "").startswith("does not know")
    fp8_problem = fp8.ExpertsFp8Problem(mixture=mixture(256, 128), group=64)
    assert (triton_experts_fp8.KERNEL.supports(fp8_problem) or "").startswith("scales of 128")
