"""Plans for one token of fp8 layers of Qwen3-8B, for one and 32 of its layers in Q4_K, and of gpt-oss-20b's MXFP4
experts, beside those that are taken, on one H200.

    python -m benchmarks.lab.few_tokens [--seconds 90] [--only fp8,q4_k,mxfp4]

fp8: numbers turned into floats in registers by plans of "gemv" (outputs of a program, inputs of a step, warps, steps
asked for early), and the token quantized for the tensor cores by plans of "skinny" (stages, programs that share the
inputs). q4_k: groups of 32 with minima by rounds ahead (rows) or stages, programs of a multiprocessor, two tiles at
once. mxfp4: stages and programs of a multiprocessor of both GEMMs, rows of a tile, two tiles at once. A line is: what,
microseconds of one call, share of the floor of the bytes at 4.346 TB/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.h200.mixtures import inputs_of
from benchmarks.h200.quantized_experts import OSS
from benchmarks.h200.shapes import BYTES_PER_S
from benchmarks.lab.fp8_experts import per_layer, tell
from headrace.back.kernels.experts.op import biases_of
from headrace.back.kernels.experts_int4 import op as int4
from headrace.back.kernels.experts_int4 import triton_experts_int4
from headrace.back.kernels.experts_int4.layout import Int4Form
from headrace.back.kernels.experts_int4.triton_experts_int4 import PLANS, GroupedPlan
from headrace.back.kernels.linear import triton_scaled_rows
from headrace.back.kernels.linear.table import GemmPlan
from headrace.back.kernels.linear.triton_small import Gemm, launcher, skinny_launcher
from headrace.back.kernels.linear_fp8 import op as fp8
from headrace.back.kernels.linear_fp8.triton_linear_fp8 import plan_of
from headrace.back.kernels.linear_int4 import op as int4_layer
from headrace.back.kernels.linear_int4 import stream
from headrace.back.kernels.linear_int4.triton_linear_int4 import plan_of as plan_of_int4
from headrace.back.kernels.op import sample_generator
from headrace.back.kernels.triton.timing import copies, each_us

NEW: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
LAYERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "gates and ups": (24576, 4096, {"eps": 1e-6, "activation": "silu"}),
    "down": (4096, 12288, {"add": True}),
    "qkv": (6144, 4096, {"eps": 1e-6}),
    "output": (4096, 4096, {"add": True}),
}
GEMV = (
    (2, 2048, 4, 2), (4, 2048, 4, 2), (4, 1024, 4, 2), (8, 512, 4, 2), (8, 1024, 8, 2),
    (2, 4096, 8, 1), (1, 4096, 4, 1), (4, 512, 2, 3), (2, 1024, 2, 2), (16, 512, 8, 2),
)  # fmt: skip
SKINNY = ((6, 1), (8, 1), (6, 2), (6, 4), (8, 4), (4, 8))
OF_LAYERS: tuple[dict[str, Any], ...] = (
    {"stages": 4},
    {"stages": 6},
    {"per_sm": 3},
    {"per_sm": 4},
    {"per_sm": 6},
    {"pair": False},
    {"pair": False, "per_sm": 4},
    {"pair": False, "per_sm": 4, "stages": 4},
    {"pair": False, "per_sm": 6, "stages": 3},
    {"per_sm": 1, "stages": 8},
)
BY_ROWS: tuple[dict[str, Any], ...] = (
    {"depth": 1}, {"depth": 1, "pair": False}, {"depth": 1, "per_sm": 1}, {"depth": 2, "per_sm": 1},
    {"depth": 2, "pair": False}, {"depth": 1, "per_sm": 3, "pair": False},
)  # fmt: skip
OF_EXPERTS: tuple[dict[str, Any], ...] = (
    {"stages": (4, 4)}, {"stages": (6, 6), "per_sm": (2, 2)}, {"per_sm": (2, 2)}, {"per_sm": (3, 3)},
    {"stages": (2, 3), "per_sm": (6, 6)}, {"pair": True}, {"pair": True, "per_sm": (2, 2)},
    {"pair": True, "stages": (4, 4), "per_sm": (1, 2)}, {"stages": (5, 5), "per_sm": (3, 3)},
)  # fmt: skip


def one_token(until: float) -> None:
    """Of fp8 layers."""
    for name, (outputs, inputs, around) in LAYERS.items():
        problem = fp8.LinearFp8Problem(**NEW, outputs=outputs, inputs=inputs, **around)
        sample = fp8.sample_of(problem, (1,))
        weight, _, norm_I = sample.weights
        x_TI, residual = sample.arguments
        y_TY = torch.empty(1, problem.results, **NEW) if residual is None else residual
        gemm = Gemm(
            weight_OI=weight.values_OI, scales_OG=weight.scales_OG, group=inputs, bias_O=None,
            activation=problem.activation or "", add=problem.add,
        )  # fmt: skip
        gemms = [
            replace(gemm, weight_OI=weight.values_OI.clone())
            for _ in range(copies(weight.num_bytes))
        ]
        floor_us = weight.num_bytes / BYTES_PER_S * 1e6
        for what, call in fp8_calls(gemms, problem, norm_I, (x_TI, y_TY)):
            if time.monotonic() > until:
                return
            tell(f"{name}: {what}", timed(call), floor_us)
        del gemms


def fp8_calls(
    gemms: list[Gemm],
    problem: fp8.LinearFp8Problem,
    norm_I: torch.Tensor | None,
    tensors: tuple[torch.Tensor, torch.Tensor],
) -> Iterator[tuple[str, Callable[[], list[Callable[[], object]]]]]:
    """Names, and what makes the chain of calls."""
    x_TI, y_TY = tensors
    gated = problem.activation is not None
    taken = plan_of(problem.outputs, problem.inputs, 1, gated=gated, sms=132)
    plans = [taken] + [
        GemmPlan(kernel="gemv", n=n, k=k, warps=warps, prefetch=early)
        for n, k, warps, early in GEMV
    ]

    def plain(plan: GemmPlan) -> list[Callable[[], object]]:
        normed = [replace(gemm, norm_I=norm_I, eps=problem.eps or 0.0) for gemm in gemms]
        return [partial(launcher(gemm, plan, 1), x_TI, y_TY) for gemm in normed]

    def quantized(plan: GemmPlan) -> list[Callable[[], object]]:
        quantize = triton_scaled_rows.bind(
            problem.inputs, None, norm_weight_I=norm_I, eps=problem.eps or 0.0
        )

        def call(run: Any) -> None:
            rows = quantize(x_TI)
            run(rows.values_TI, y_TY, rows.scales_TG)

        return [partial(call, skinny_launcher(gemm, plan, 1)) for gemm in gemms]

    for plan in plans:
        what = f"gemv {plan.n} {plan.k} {plan.warps} {plan.prefetch}"
        yield what + (" (taken)" if plan is taken else ""), partial(plain, plan)
    for stages, split in SKINNY:
        plan = GemmPlan(
            kernel="skinny", n=64, k=128, warps=4, stages=stages, split=split, prefetch=2, swap=True
        )
        yield f"skinny, {stages} stages, split {split}", partial(quantized, plan)


def timed(call: Callable[[], list[Callable[[], object]]]) -> float | str:
    """Microseconds, or what failed."""
    try:
        return each_us(call())
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"[:160]


def q4_k(until: float) -> None:
    """Of layers with groups of 32 and minima."""
    for tokens in (1, 32):
        for name, (outputs, inputs, around) in LAYERS.items():
            facts = around if tokens == 1 else {k: v for k, v in around.items() if k != "eps"}
            problem = int4_layer.LinearInt4Problem(
                **NEW, outputs=outputs, inputs=inputs, group=32, minima=True, **facts
            )
            sample = int4_layer.sample_of(problem, (tokens,))
            weight, _, norm_I = sample.weights
            x_TI, residual = sample.arguments
            y_TY = torch.empty(tokens, problem.results, **NEW) if residual is None else residual
            gemms = [
                stream.Int4Gemm(
                    weight=replace(weight, words_NBW=weight.words_NBW.clone()), norm_I=norm_I,
                    eps=problem.eps or 0.0, activation=problem.activation, add=problem.add,
                )
                for _ in range(copies(weight.num_bytes))
            ]  # fmt: skip
            floor_us = weight.num_bytes / BYTES_PER_S * 1e6
            taken = plan_of_int4(tokens, gated=problem.activation is not None, group=32)
            rows = BY_ROWS if tokens == 1 else ()
            plans = [taken, *(replace(taken, **{"per_sm": 2, **one}) for one in rows)]
            plans += [replace(taken, depth=0, **one) for one in OF_LAYERS]
            for plan in plans:
                if time.monotonic() > until:
                    return
                by = f"rows {plan.depth}" if plan.depth else f"stages {plan.stages}"
                what = f"q4_k, {tokens} tokens, {name}: {by} {plan.per_sm} {plan.pair}"
                what += " (taken)" if plan is taken else ""

                tell(what, timed(partial(streamed, gemms, plan, x_TI, y_TY)), floor_us)


def streamed(
    gemms: list[stream.Int4Gemm], plan: stream.StreamPlan, x_TI: torch.Tensor, y_TY: torch.Tensor
) -> list[Callable[[], object]]:
    """The chain of calls."""
    return [partial(stream.bind(gemm, plan), x_TI, y_TY) for gemm in gemms]


def mxfp4(until: float) -> None:
    """Of gpt-oss-20b's experts."""
    form = Int4Form(32, floats=True)
    problem = int4.ExpertsInt4Problem(mixture=OSS, form=form)
    generator = sample_generator(OSS.device)
    experts = int4.random_experts(problem, generator)
    biases = biases_of(OSS, generator)
    one_bytes = experts.num_bytes / OSS.experts
    for tokens in (1, 32):
        inputs = [inputs_of(OSS, tokens, seed) for seed in range(6)]
        distinct = sum(len(one[1].unique()) for one in inputs) / len(inputs)
        floor_us = distinct * one_bytes / BYTES_PER_S * 1e6
        taken = triton_experts_int4.plan_for(OSS, tokens)
        rows = [taken, *(plan for plan in PLANS if plan.m in (8, 16) and plan != taken)]
        plans: list[GroupedPlan] = [*rows, *(replace(taken, **one) for one in OF_EXPERTS)]
        for plan in plans:
            if time.monotonic() > until:
                return
            run = triton_experts_int4.bind(problem, experts, *biases, always=plan)
            what = f"mxfp4, {tokens} tokens: {plan.m} {plan.stages} {plan.per_sm} {plan.pair}"
            what += " (taken)" if plan == taken else ""
            tell(what, per_layer(run, inputs), floor_us)


PARTS: dict[str, Callable[[float], None]] = {"fp8": one_token, "q4_k": q4_k, "mxfp4": mxfp4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--only", default=",".join(PARTS))
    given = parser.parse_args()
    names = given.only.split(",")
    for name in names:
        PARTS[name](time.monotonic() + given.seconds / len(names))


if __name__ == "__main__":
    main()
