"""One token times a weight of e4m3 numbers by plans of "gemv_bytes" (kernels/linear/gemv_bytes.py), beside "gemv".

    python -m benchmarks.lab.one_token

The layers of Qwen3-8B with a scale an output, or one for 128 inputs, over so many weights that no cache helps; a line
is: what (outputs of a program, warps), microseconds of one call, share of the floor of the bytes at 4.346 TB/s, and the
largest difference from gemv.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.h200.shapes import BYTES_PER_S
from benchmarks.lab.few_tokens import LAYERS, NEW, timed
from benchmarks.lab.fp8_experts import tell
from headrace.back.kernels.linear.table import GemmPlan
from headrace.back.kernels.linear.triton_small import Gemm, launcher
from headrace.back.kernels.linear_fp8 import op as fp8
from headrace.back.kernels.linear_fp8.triton_linear_fp8 import plan_of
from headrace.back.kernels.triton.timing import copies

PLANS = ((2, 4), (4, 4), (8, 4), (4, 2), (8, 2), (2, 8), (4, 8), (8, 8))
"""Outputs of a program, warps. Eight outputs by one warp, and 16, take 4 to 20 times as long."""


def trials(name: str, group: int | None) -> tuple[list[Gemm], torch.Tensor, torch.Tensor, Any]:
    """Weights of a layer, a token, what it is added to, and the plan of gemv."""
    outputs, inputs, around = LAYERS[name]
    problem = fp8.LinearFp8Problem(**NEW, outputs=outputs, inputs=inputs, group=group, **around)
    sample = fp8.sample_of(problem, (1,))
    weight, _, norm_I = sample.weights
    x_TI, residual = sample.arguments
    y_TY = torch.zeros(1, problem.results, **NEW) if residual is None else residual
    gemm = Gemm(
        weight_OI=weight.values_OI, scales_OG=weight.scales_OG, group=group or inputs, bias_O=None,
        activation=problem.activation or "", add=problem.add, norm_I=norm_I,
        eps=problem.eps or 0.0,
    )  # fmt: skip
    count = copies(weight.num_bytes)
    gemms = [replace(gemm, weight_OI=weight.values_OI.clone()) for _ in range(count)]
    plan = plan_of(outputs, inputs, 1, gated=problem.activation is not None, sms=132)
    return gemms, x_TI, y_TY, plan


def main() -> None:
    for name, group in itertools.product(LAYERS, (None, 128)):
        gemms, x_TI, y_TY, plan = trials(name, group)
        floor_us = gemms[0].weight_OI.nbytes / BYTES_PER_S * 1e6
        what = name + (", in groups" if group else "")

        def calls(
            plan: GemmPlan, gemms: Any = gemms, x: Any = x_TI, y: Any = y_TY
        ) -> list[Callable[[], object]]:
            return [partial(launcher(gemm, plan, 1), x, y) for gemm in gemms]

        tell(f"{what}: gemv {plan.n} {plan.k} {plan.warps}", timed(partial(calls, plan)), floor_us)
        start, first = y_TY.clone(), y_TY.clone()
        launcher(gemms[0], plan, 1)(x_TI, first)
        for n, warps in PLANS:
            plan = GemmPlan(kernel="gemv_bytes", n=n, k=512 * warps, warps=warps)
            second = start.clone()
            try:
                launcher(gemms[0], plan, 1)(x_TI, second)
                apart = float((first.float() - second.float()).abs().max() / first.abs().max())
            except Exception as failure:
                print(f"{what}: {n} {warps}", type(failure).__name__, str(failure)[:200])
                continue
            tell(f"{what}: {n} {warps} (apart {apart:.1e})", timed(partial(calls, plan)), floor_us)


if __name__ == "__main__":
    main()
