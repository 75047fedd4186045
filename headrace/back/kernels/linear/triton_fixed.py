"""A GEMM whose rows do not depend on the batch: every result is one chain of sums along the inputs,
in one order.

The inputs are cut into SPLIT shares, by the weight's shape alone. A share is summed by the tensor
cores from its first input to its last; the shares are added up in their order. Whether the shares
are summed by programs side by side (few tokens) or in turn by one (many) makes no difference to the
bits, nor does the tile: tiles have 64 tokens or more, so that the same matrix instruction is taken
for one token as for a thousand. What comes after the GEMM (bias, gated activation, addition into
the residual) is done element by element in the same kernel.

T tokens, I inputs, O outputs; tiles of M tokens, N outputs and K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from headrace.back.kernels.gated_act.triton_gated_act import activate
from headrace.back.kernels.linear.op import Linear, LinearProblem
from headrace.back.kernels.linear.triton_linear import plan_sample
from headrace.back.kernels.linear.triton_small import Gemm, Launch, refusal
from headrace.back.kernels.op import Function, Kernel, PlanCheck, Sample
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.room import fitting_stages
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
    num_sms,
    power_of_two,
    unsupported,
)

FEW = 64
"""Tokens up to which the small tile is taken."""
PROGRAMS = 128
"""What the shares aim at, in tiles of STEP outputs; a number of its own, lest results depend on the
device."""
STEP = 128
LEAST_SHARE = 512
TILE_TOKENS = (1, 65, 300, 600)
"""Numbers of tokens that take tiles of their own."""


@triton.jit
def _share(
    p_x, p_weight, m_m, o_k, begin, b_acc, b_acc_up, UP,
    INPUTS: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Adds the GEMMs of the inputs begin .. begin + SHARE to the sums, in order."""
    for k in range(0, SHARE, K):
        if EVEN:
            b_x = tl.load(p_x + begin + k, mask=m_m[:, None], other=0.0)
            b_weight = tl.load(p_weight + begin + k)
            if GATED:
                b_weight_up = tl.load(p_weight + begin + k + UP)
        else:
            m_k = (begin + k + o_k < INPUTS)[None, :]
            b_x = tl.load(p_x + begin + k, mask=m_m[:, None] & m_k, other=0.0)
            b_weight = tl.load(p_weight + begin + k, mask=m_k, other=0.0)
            if GATED:
                b_weight_up = tl.load(p_weight + begin + k + UP, mask=m_k, other=0.0)
        b_acc = tl.dot(b_x, tl.trans(b_weight), b_acc, input_precision="ieee")
        if GATED:
            b_acc_up = tl.dot(b_x, tl.trans(b_weight_up), b_acc_up, input_precision="ieee")
    return b_acc, b_acc_up


@triton.jit(do_not_specialize=["num_tokens"])
def fixed_kernel(
    x,
    weight,
    bias,
    y,
    partial,
    counters,
    num_tokens,
    x_stride,
    y_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    PARALLEL: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of tokens x tiles of outputs, SPLIT if PARALLEL else 1); `partial` float32
    [tiles, SPLIT, M, N]. OUTPUTS are those of y: with ACTIVATION the weight has twice as many rows,
    gates first. With ADD y is the residual."""
    i_tile = tl.program_id(0)
    tiles_m = tl.cdiv(num_tokens, M)
    GATED: tl.constexpr = ACTIVATION != ""
    UP: tl.constexpr = OUTPUTS * INPUTS
    EVEN: tl.constexpr = SHARE * SPLIT == INPUTS
    o_m = i_tile % tiles_m * M + tl.arange(0, M)
    o_n = i_tile // tiles_m * N + tl.arange(0, N)
    o_k = tl.arange(0, K)
    m_m = o_m < num_tokens
    m_n = o_n < OUTPUTS
    o_row = tl.where(m_n, o_n, 0)
    enter(DEPENDENT)
    p_x = x + o_m.to(tl.int64)[:, None] * x_stride + o_k[None, :]
    p_weight = weight + o_row.to(tl.int64)[:, None] * INPUTS + o_k[None, :]
    b_zero = tl.zeros([M, N], tl.float32)
    b_up = b_zero
    if PARALLEL:
        i_split = tl.program_id(1)
        b_acc, b_up = _share(
            p_x,
            p_weight,
            m_m,
            o_k,
            i_split * SHARE,
            b_zero,
            b_up,
            UP,
            INPUTS,
            SHARE,
            K,
            EVEN,
            GATED,
        )
        TILE: tl.constexpr = M * N
        o_tile = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
        p_tiles = partial + i_tile.to(tl.int64) * (SPLIT * TILE) + o_tile
        tl.store(p_tiles + i_split * TILE, b_acc, mask=m_m[:, None])
        tl.debug_barrier()
        if tl.atomic_add(counters + i_tile, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(counters + i_tile, 0)
        b_acc = b_zero
        for i in tl.static_range(SPLIT):
            b_acc += tl.load(p_tiles + i * TILE, mask=m_m[:, None], other=0.0, cache_modifier=".cg")
    elif SPLIT > 1:
        b_acc = b_zero
        for i in range(0, SPLIT):
            b_part, b_up = _share(
                p_x, p_weight, m_m, o_k, i * SHARE, b_zero, b_up, UP, INPUTS, SHARE, K, EVEN, GATED
            )
            b_acc += b_part
    else:
        b_acc, b_up = _share(
            p_x, p_weight, m_m, o_k, 0, b_zero, b_up, UP, INPUTS, SHARE, K, EVEN, GATED
        )
    if BIAS:
        b_acc += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            b_up += tl.load(bias + OUTPUTS + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
        b_acc = activate(b_acc, ACTIVATION) * b_up
    m_y = m_m[:, None] & m_n[None, :]
    p_y = y + o_m[:, None].to(tl.int64) * y_stride + o_n[None, :]
    if ADD:
        b_acc += tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
    tl.store(p_y, b_acc.to(y.dtype.element_ty), mask=m_y)


@dataclass(frozen=True, kw_only=True)
class FixedOrderTile:
    """Sizes of a program's tile and how it is compiled; none of them changes a bit of the
    result."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tile_for(tokens: int, dtype: torch.dtype, *, gated: bool) -> FixedOrderTile:
    """The tile for a number of tokens, as measured on an H200
    (benchmarks/h200/deterministic.py)."""
    if dtype is torch.float32:
        return FixedOrderTile(m=64, n=32, k=32, warps=4, stages=2)
    if tokens <= FEW:
        return FixedOrderTile(m=64, n=64 if gated else 128, k=64, warps=4, stages=6)
    if gated and 128 < tokens <= 512:
        return FixedOrderTile(m=64, n=128, k=64, warps=4, stages=4)
    return FixedOrderTile(m=128, n=128, k=64, warps=8, stages=3 if gated else 4)


def shares(outputs: int, inputs: int, *, gated: bool) -> int:
    """How many shares the inputs are cut into, a power of two: by the shape alone. Gated GEMMs have
    many outputs."""
    if gated:
        return 1
    wanted = power_of_two(PROGRAMS // -(-outputs // STEP))
    most = max(1, inputs // LEAST_SHARE)
    return min(wanted, 1 << (most.bit_length() - 1), 8)


def fixed(gemm: Gemm, *, tile: FixedOrderTile | None = None) -> Launch:
    """The launch for any number of tokens; `tile` for measurements."""
    assert gemm.norm_I is None, "the norm is a kernel of its own"
    inputs = gemm.weight_OI.shape[1]
    gated, dtype = bool(gemm.activation), gemm.weight_OI.dtype
    split = shares(gemm.results, inputs, gated=gated)
    shared = {
        "INPUTS": inputs, "OUTPUTS": gemm.results, "SPLIT": split,
        "SHARE": triton.cdiv(inputs, STEP * split) * STEP, "BIAS": gemm.bias_O is not None,
        "ACTIVATION": gemm.activation, "ADD": gemm.add,
    }  # fmt: skip

    def run(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1
        num_tokens, device = len(x_TI), x_TI.device
        if not num_tokens:
            return
        size = tile or tile_for(num_tokens, dtype, gated=gated)
        tiles = triton.cdiv(num_tokens, size.m) * triton.cdiv(gemm.results, size.n)
        side_by_side = split > 1 and tiles <= min(COUNTERS, num_sms(device))
        rows = size.m + size.n * (2 if gated else 1)
        stages = fitting_stages(size.stages, rows * size.k * dtype.itemsize)
        partial = x_TI
        if side_by_side:
            parts = tiles * split * size.m * size.n
            partial = torch.empty(parts, dtype=torch.float32, device=device)
        fixed_kernel[(tiles, split if side_by_side else 1)](
            x_TI, gemm.weight_OI, gemm.bias_O, y_TY, partial, counters(device), num_tokens,
            x_TI.stride(0), y_TY.stride(0), **shared, PARALLEL=side_by_side, M=size.m, N=size.n,
            K=size.k, num_warps=size.warps, num_stages=stages, **launch(device),
        )  # fmt: skip

    return run


def bind(problem: LinearProblem, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
    """The kernel for one weight, read as it is."""
    run = fixed(Gemm(weight_OI=weight_OI.contiguous(), bias_O=bias_O))

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        y_TO = x_TI.new_empty(
            len(x_TI), problem.outputs, dtype=torch.float32 if problem.wide else problem.dtype
        )
        run(x_TI, y_TO)
        return y_TO

    return linear


def _supports(problem: LinearProblem) -> str | None:
    return refusal(problem.inputs, None) or unsupported(problem.device, problem.dtype)


def plans(problem: LinearProblem) -> list[PlanCheck]:
    """Each tile, on the whole shape."""
    return tile_checks(partial(plan_sample, problem), bind)


def tile_checks(sample: Callable[[int], Sample], bind: Callable[..., Function]) -> list[PlanCheck]:
    """A number of tokens of each tile (`tile_for`). `sample`: inputs of so many tokens, of the
    whole shape, since the inputs' shares follow from it."""
    return [
        PlanCheck(name=f"{tokens} tokens", sample=partial(sample, tokens), bind=bind)
        for tokens in TILE_TOKENS
    ]


KERNEL = Kernel(
    name="triton fixed order", supports=_supports, bind=bind, plans=plans, invariant=True
)
