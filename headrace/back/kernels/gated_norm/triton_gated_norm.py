"""A gate beside a norm in Triton: one program per row and group, which is read once and stays in
registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem, check_weight
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

MAX_GROUP = 1 << 16
PLAIN = 1024
"""Values of a program without a norm, at most."""


@triton.jit
def gated_norm_kernel(
    x,
    gate,
    weight,
    y,
    x_stride,
    gate_stride,
    eps,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    GATE: tl.constexpr,
    SPREAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_g = tl.arange(0, BLOCK)
    o_e = tl.program_id(1) * GROUP + o_g
    m_e = (o_g < GROUP) & (o_e < WIDTH)
    b_x = tl.load(x + i_row * x_stride + o_e, mask=m_e, other=0.0).to(tl.float32)
    p_gate = gate + i_row * gate_stride + o_e // SPREAD
    b_gate = tl.load(p_gate, mask=m_e, other=0.0).to(tl.float32)
    b_open = b_gate
    if GATE == "sigmoid":
        b_open = tl.sigmoid(b_gate)
    if GATE == "silu":
        b_open = b_gate * tl.sigmoid(b_gate)
    if GATE == "softplus":
        b_open = tl.maximum(b_gate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_gate)))
    b_y = b_x * b_open
    if NORM:
        b_square = b_x * b_x if NORM_FIRST else b_y * b_y
        b_scale = tl.rsqrt(tl.sum(b_square, axis=0) / GROUP + eps)
        b_y = b_y * b_scale * tl.load(weight + o_e, mask=m_e, other=0.0)
    tl.store(y + i_row * WIDTH + o_e, b_y.to(y.dtype.element_ty), mask=m_e)


def bind(problem: GatedNormProblem, weight_E: torch.Tensor | None) -> GatedNorm:
    """The kernel for one width."""
    check_weight(problem, weight_E)
    width, normed = problem.width, weight_E is not None
    group = problem.group if normed else min(PLAIN, width)
    block = power_of_two(group, least=32)

    def gated_norm(x_TE: torch.Tensor, gate_TE: torch.Tensor) -> torch.Tensor:
        assert x_TE.stride(1) == gate_TE.stride(1) == 1, (x_TE.stride(), gate_TE.stride())
        y_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
        gated_norm_kernel[(x_TE.shape[0], triton.cdiv(width, group))](
            x_TE, gate_TE, x_TE if weight_E is None else weight_E, y_TE, x_TE.stride(0),
            gate_TE.stride(0), problem.eps, WIDTH=width, GROUP=group, BLOCK=block, NORM=normed,
            NORM_FIRST=problem.norm_first, GATE=problem.gate, SPREAD=problem.spread,
            num_warps=min(16, max(1, block // 256)), **launch(x_TE.device),
        )  # fmt: skip
        return y_TE

    return gated_norm


def _supports(problem: GatedNormProblem) -> str | None:
    if problem.group > MAX_GROUP:
        return f"a group of {problem.group} is above {MAX_GROUP}"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
