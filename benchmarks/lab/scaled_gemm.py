"""Tiles of the GEMM of bytes (kernels/linear/triton_scaled_gemm.py) for many tokens, beside the library's:
`python -m benchmarks.lab.scaled_gemm --out F`.

int8 by int8 with a scale an output (W8A8) and for groups of 128 (W4A8), e4m3 in blocks of 128; TFLOP/s of each plan.
Plans compile in many processes first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.h200.shapes import device_name
from headrace.back.kernels.linear.triton_scaled_gemm import scaled_gemm_kernel
from headrace.back.kernels.triton.timing import each_us
from headrace.back.kernels.triton.wrap import launch

FORMS = {
    "int8": (torch.int8, None, False),
    "int8, groups": (torch.int8, 128, False),
    "e4m3, blocks": (torch.float8_e4m3fn, 128, True),
}
"""The type, the group of the weight, and whether tokens have groups too."""
SHAPES = ((8192, 8192, 8192), (16384, 24576, 4096), (512, 24576, 4096), (512, 4096, 12288))
"""Tokens, outputs, inputs."""
PLANS = (
    (128, 128, 128, 8, 4, 8), (128, 128, 128, 4, 4, 8), (128, 256, 128, 8, 3, 8), (256, 128, 128, 8, 3, 8),
    (128, 256, 64, 8, 4, 8), (128, 128, 64, 4, 5, 8), (64, 128, 128, 4, 4, 8), (128, 64, 128, 4, 4, 8),
    (64, 256, 128, 8, 4, 8), (128, 256, 128, 8, 4, 16), (128, 128, 128, 8, 3, 16), (64, 256, 128, 4, 4, 8),
)  # fmt: skip
"""M, N, K, warps, stages, turns; the first ships."""
Plan = tuple[int, int, int, int, int, int]


def trial(form: str, shape: tuple[int, int, int], plan: Plan) -> tuple[Callable[[], object], Any]:
    """A launch, and what it reads."""
    dtype, group, grouped_rows = FORMS[form]
    tokens, outputs, inputs = shape
    m, n, k, warps, stages, turns = plan
    new = {"device": "cuda"}
    x = (torch.randn(tokens, inputs, **new) * 30).clamp_(-127, 127).to(dtype)
    weight = (torch.randn(outputs, inputs, **new) * 30).clamp_(-127, 127).to(dtype)
    scales = torch.rand(outputs, inputs // (group or inputs), **new)
    x_scales = torch.rand(tokens, inputs // 128 if grouped_rows else 1, **new)
    y = torch.empty(tokens, outputs, dtype=torch.bfloat16, **new)
    grid = (triton.cdiv(tokens, m) * triton.cdiv(outputs, n),)

    def run() -> object:
        return scaled_gemm_kernel[grid](
            x, x_scales, weight, scales, None, y, tokens, INPUTS=inputs, OUTPUTS=outputs,
            GROUP=group or inputs, X_GROUPS=x_scales.shape[1], INTEGERS=dtype is torch.int8, M=m, N=n,
            K=k, TURNS=turns, BIAS=False, num_warps=warps, num_stages=stages, **launch(y.device),
        )  # fmt: skip

    return run, (x, weight, scales, x_scales, y)


def compiled(job: tuple[str, tuple[int, int, int], Plan]) -> str:
    """Runs a plan once, so that it is in the cache of compiled kernels; why not, if it cannot."""
    try:
        run, _ = trial(*job)
        run()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:120]
    return ""


def library(form: str, shape: tuple[int, int, int]) -> float:
    """Microseconds of PyTorch's GEMM: sums of integers without scales, or e4m3 with a scale a row."""
    tokens, outputs, inputs = shape
    dtype = FORMS[form][0]
    x = (torch.randn(tokens, inputs, device="cuda") * 30).clamp_(-127, 127).to(dtype)
    weight = (torch.randn(outputs, inputs, device="cuda") * 30).clamp_(-127, 127).to(dtype)
    if dtype is torch.int8:
        return each_us([lambda: torch._int_mm(x, weight.t())] * 3)
    rows, columns = (torch.rand(n, 1, device="cuda") for n in (tokens, outputs))
    return each_us(
        [
            lambda: torch._scaled_mm(
                x, weight.t(), scale_a=rows, scale_b=columns.t(), out_dtype=torch.bfloat16
            )
        ]
        * 3
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=14)
    given = parser.parse_args()
    jobs = [(form, shape, plan) for form in FORMS for shape in SHAPES for plan in PLANS]
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        reasons = dict(zip(jobs, pool.map(compiled, jobs), strict=True))
    rows = []
    for form in FORMS:
        for shape in SHAPES:
            flops = 2 * shape[0] * shape[1] * shape[2]
            times: dict[str, float | str] = {"library": flops / library(form, shape) / 1e6}
            for plan in PLANS:
                if reasons[form, shape, plan]:
                    continue
                run, kept = trial(form, shape, plan)
                times[" ".join(map(str, plan))] = flops / each_us([run] * 3) / 1e6
                del kept
            rows.append({"form": form, "shape": shape, "tflop_s": times})
            print(form, shape, {k: round(v) for k, v in times.items()}, flush=True)
    for job, reason in reasons.items():
        if reason:
            print(job[0], job[2], reason)
    if given.out:
        given.out.write_text(json.dumps({"device": device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
