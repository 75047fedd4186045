"""One token times a weight of e4m3 numbers or bytes with layouts of its own, beside "gemv" (kernels/linear/
triton_gemv.py), whose tiles of bytes the compiler sends through shared memory: a trial, which does not ship.

    python -m benchmarks.lab.one_token

The layers of Qwen3-8B with a scale an output, over so many weights that no cache helps; a line is: what, microseconds
of one call, share of the floor of the bytes at 4.346 TB/s, and the largest difference from the kernel that ships.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from benchmarks.h200.shapes import BYTES_PER_S
from benchmarks.lab.few_tokens import LAYERS, NEW, timed
from benchmarks.lab.fp8_experts import tell
from headrace.back.kernels.linear.triton_small import Gemm, launcher
from headrace.back.kernels.linear_fp8 import op as fp8
from headrace.back.kernels.linear_fp8.triton_linear_fp8 import plan_of
from headrace.back.kernels.triton.gluon import enter
from headrace.back.kernels.triton.timing import copies
from headrace.back.kernels.triton.wrap import launch

PLANS = ((1, 4), (2, 4), (4, 4), (8, 4), (2, 8), (4, 8), (1, 8), (4, 2), (8, 2))
"""Outputs of a program, warps."""


@gluon.jit
def _tile(weight, o_n, o_k, m_n, k: gl.constexpr, INPUTS: gl.constexpr):
    m_w = m_n[:, None] & (k + o_k < INPUTS)[None, :]
    p_w = weight + o_n.to(gl.int64)[:, None] * INPUTS + (k + o_k)[None, :]
    return gl.load(p_w, mask=m_w, other=0.0, eviction_policy="evict_first")


@gluon.jit
def one_token_kernel(
    x, weight, scales, norm_weight, y, eps, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr,
    N: gl.constexpr, WARPS: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr,
    ADD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A thread has 16 neighbouring inputs of N outputs; every load is in that layout."""
    K: gl.constexpr = 512 * WARPS
    L: gl.constexpr = gl.BlockedLayout([N, 16], [1, 32], [1, WARPS], [1, 0])
    o_n = gl.program_id(0) * N + gl.arange(0, N, layout=gl.SliceLayout(1, L))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, L))
    m_n = o_n < OUTPUTS
    UP: gl.constexpr = OUTPUTS * INPUTS
    b_next = _tile(weight, o_n, o_k, m_n, 0, INPUTS)
    b_next_up = b_next
    if GATED:
        b_next_up = _tile(weight + UP, o_n, o_k, m_n, 0, INPUTS)
    enter(DEPENDENT)
    b_acc = gl.zeros([N, K], gl.float32, L)
    b_acc_up = gl.zeros([N, K], gl.float32, L)
    b_squares = gl.zeros([K], gl.float32, gl.SliceLayout(0, L))
    for k in gl.static_range(0, INPUTS, K):
        b_w = b_next.to(gl.float32)
        b_w_up = b_next_up.to(gl.float32)
        if k + K < INPUTS:
            b_next = _tile(weight, o_n, o_k, m_n, k + K, INPUTS)
            if GATED:
                b_next_up = _tile(weight + UP, o_n, o_k, m_n, k + K, INPUTS)
        m_k = k + o_k < INPUTS
        b_x = gl.load(x + k + o_k, mask=m_k, other=0.0).to(gl.float32)
        if NORM:
            b_squares += b_x * b_x
            b_x = b_x * gl.load(norm_weight + k + o_k, mask=m_k, other=0.0)
        b_acc += b_w * b_x[None, :]
        if GATED:
            b_acc_up += b_w_up * b_x[None, :]
    b_y = gl.sum(b_acc, axis=1) * gl.load(scales + o_n, mask=m_n, other=0.0)
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(b_squares, axis=0) / INPUTS + eps)
    b_y = b_y * factor
    if GATED:
        b_up = gl.sum(b_acc_up, axis=1) * gl.load(scales + OUTPUTS + o_n, mask=m_n, other=0.0)
        b_y = b_y / (1.0 + gl.exp(-b_y)) * (b_up * factor)
    if ADD:
        b_y += gl.load(y + o_n, mask=m_n, other=0.0).to(gl.float32)
    gl.store(y + o_n, b_y.to(y.dtype.element_ty), mask=m_n)


def own(
    gemm: Gemm, n: int, warps: int, x_TI: torch.Tensor, y_TY: torch.Tensor
) -> Callable[[], object]:
    """The launch of one layer."""
    outputs = y_TY.shape[1]
    return partial(
        one_token_kernel[(triton.cdiv(outputs, n),)], x_TI, gemm.weight_OI, gemm.scales_OG,
        gemm.norm_I, y_TY, gemm.eps, INPUTS=x_TI.shape[1], OUTPUTS=outputs, N=n, WARPS=warps,
        NORM=gemm.norm_I is not None, GATED=bool(gemm.activation), ADD=gemm.add, num_warps=warps,
        **launch(y_TY.device),
    )  # fmt: skip


def trials(name: str) -> tuple[list[Gemm], torch.Tensor, torch.Tensor, Any]:
    """Weights of a layer, a token, what it is added to, and the plan that ships."""
    outputs, inputs, around = LAYERS[name]
    problem = fp8.LinearFp8Problem(**NEW, outputs=outputs, inputs=inputs, **around)
    sample = fp8.sample_of(problem, (1,))
    weight, _, norm_I = sample.weights
    x_TI, residual = sample.arguments
    y_TY = torch.zeros(1, problem.results, **NEW) if residual is None else residual
    gemm = Gemm(
        weight_OI=weight.values_OI, scales_OG=weight.scales_OG, group=inputs, bias_O=None,
        activation=problem.activation or "", add=problem.add, norm_I=norm_I,
        eps=problem.eps or 0.0,
    )  # fmt: skip
    count = copies(weight.num_bytes)
    gemms = [replace(gemm, weight_OI=weight.values_OI.clone()) for _ in range(count)]
    plan = plan_of(outputs, inputs, 1, gated=problem.activation is not None, sms=132)
    return gemms, x_TI, y_TY, plan


def main() -> None:
    for name in LAYERS:
        gemms, x_TI, y_TY, plan = trials(name)
        floor_us = gemms[0].weight_OI.nbytes / BYTES_PER_S * 1e6

        def gemv(gemms: Any = gemms, plan: Any = plan, x: Any = x_TI, y: Any = y_TY) -> Any:
            return [partial(launcher(gemm, plan, 1), x, y) for gemm in gemms]

        tell(f"{name}: gemv {plan.n} {plan.k} {plan.warps}", timed(gemv), floor_us)
        for n, warps in PLANS:
            first, second = y_TY.clone(), y_TY.clone()
            try:
                launcher(gemms[0], plan, 1)(x_TI, first)
                own(gemms[0], n, warps, x_TI, second)()
                apart = float((first.float() - second.float()).abs().max() / first.abs().max())
            except Exception as failure:
                print(f"{name}: {n} {warps}", type(failure).__name__, str(failure)[:200])
                continue

            def calls(
                n: int = n, w: int = warps, gemms: Any = gemms, x: Any = x_TI, y: Any = y_TY
            ) -> Any:
                return [own(gemm, n, w, x, y) for gemm in gemms]

            tell(f"{name}: own {n} {warps} (apart {apart:.1e})", timed(calls), floor_us)


if __name__ == "__main__":
    main()
