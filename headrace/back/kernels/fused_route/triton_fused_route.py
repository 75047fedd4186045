"""The fused route in one Triton kernel: programs of a few logits each, of which the last to end
chooses.

One token is bound by how long kernels wait for each other, not by what they read: a norm, a GEMV, a
conversion of its logits and the choice were four launches of 2 to 3 us of a layer of Qwen3-30B-A3B
(H200). The norm's scale is one number, so it is applied to the sums (linear/triton_gemv.py), and
each program writes its share of the normed token. An expert's place among the chosen is how many
are better than it, which all are counted for side by side; taking the best one time after another
is a chain as long as there are slots.

G logits, X experts, E width, N logits of a program, C inputs of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.back.kernels.fused_route.op import FusedRoute, FusedRouteProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.route.op import SUM_EPS
from headrace.back.kernels.triton.wrap import counters, launch, power_of_two, unsupported

MAX_EXPERTS = 256
SCORES = ("softmax", "sigmoid")
N, C, WARPS = 8, 1024, 4
PAIRS = 4096
"""Pairs of experts that are compared at once: 32 of a thread."""


@triton.jit
def _part(p_weight, m_n, o_c, begin: tl.constexpr, E: tl.constexpr, C: tl.constexpr):
    """Columns begin .. begin + C of the program's rows of the router."""
    m_part = m_n[:, None]
    if begin + C > E:
        m_part = m_part & (begin + o_c < E)[None, :]
    return tl.load(p_weight + begin + o_c[None, :], mask=m_part, other=0.0)


@triton.jit
def _choice(logits, bias, o_x, X: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr):
    """What experts are chosen by; softmax does not change their order. The least for what is no
    number, and for what is no expert."""
    m_x = o_x < X
    b_choice = tl.load(logits + o_x, mask=m_x, other=float("-inf"), cache_modifier=".cg")
    if SIGMOID:
        b_choice = tl.sigmoid(b_choice)
    if BIAS:
        b_choice += tl.load(bias + o_x, mask=m_x, other=0.0)
    return tl.where(m_x & (b_choice == b_choice), b_choice, float("-inf"))


@triton.jit
def _choose(
    logits, bias, expert, weight, scale, sum_eps, X: tl.constexpr, NONE: tl.constexpr,
    TOP_K: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, SOFTMAX_CHOSEN: tl.constexpr, SHARED_GATE: tl.constexpr,
    BIAS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Op route, without groups: as route/triton_route.py."""
    o_x = tl.arange(0, NONE)
    m_x = o_x < X
    b_logits = tl.load(logits + o_x, mask=m_x, other=float("-inf"), cache_modifier=".cg")
    b_score = tl.exp(b_logits - tl.max(b_logits, axis=0))
    if SIGMOID:
        b_score = tl.where(m_x, tl.sigmoid(b_logits), 0.0)
    elif not SOFTMAX_CHOSEN:
        b_score = b_score / tl.sum(b_score, axis=0)
    b_choice = _choice(logits, bias, o_x, X, SIGMOID, BIAS)
    b_better = tl.zeros([STEP, NONE], tl.int32)
    for begin in tl.static_range(0, NONE, STEP):
        o_other = begin + tl.arange(0, STEP)
        b_other = _choice(logits, bias, o_other, X, SIGMOID, BIAS)[:, None]
        m_equal = (b_other == b_choice[None, :]) & (o_other[:, None] < o_x[None, :])
        b_better += ((b_other > b_choice[None, :]) | m_equal).to(tl.int32)
    b_place = tl.sum(b_better, axis=0)
    m_chosen = m_x & (b_place < TOP_K)
    b_weight = tl.where(m_chosen, b_score, 0.0)
    if SOFTMAX_CHOSEN:
        b_weight = b_weight / tl.sum(b_weight, axis=0)
    elif RENORMALIZE:
        b_weight = b_weight / (tl.sum(b_weight, axis=0) + sum_eps)
    tl.store(expert + b_place, o_x, mask=m_chosen)
    tl.store(weight + b_place, b_weight * scale, mask=m_chosen)
    if SHARED > 0:
        gate = 1.0
        if SHARED_GATE:
            gate = tl.sigmoid(tl.load(logits + X, cache_modifier=".cg"))
        o_k = tl.arange(0, K)
        m_k = (o_k >= TOP_K) & (o_k < TOP_K + SHARED)
        tl.store(expert + o_k, X + o_k - TOP_K, mask=m_k)
        tl.store(weight + o_k, tl.zeros([K], tl.float32) + gate, mask=m_k)


@triton.jit
def fused_route_kernel(
    x, norm_weight, router, router_bias, bias, y, logits, counters, expert, weight, eps, scale,
    sum_eps, E: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    SHARE: tl.constexpr, ROUTER_BIAS: tl.constexpr, X: tl.constexpr, NONE: tl.constexpr,
    TOP_K: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, SOFTMAX_CHOSEN: tl.constexpr, SHARED_GATE: tl.constexpr,
    BIAS: tl.constexpr, STEP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of logits, each of which writes SHARE values of y. NONE: X padded to a power of
    two, K likewise the slots."""
    i_n = tl.program_id(0)
    o_n = i_n * N + tl.arange(0, N)
    o_c = tl.arange(0, C)
    m_n = o_n < COLUMNS
    p_router = router + o_n[:, None] * E
    b_next = _part(p_router, m_n, o_c, 0, E, C)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    b_acc = tl.zeros([N, C], tl.float32)
    b_squares = tl.zeros([1, C], tl.float32)
    for begin in tl.static_range(0, E, C):
        b_router = b_next.to(tl.float32)
        m_c = (begin + o_c < E)[None, :]
        b_x = tl.load(x + begin + o_c[None, :], mask=m_c, other=0.0).to(tl.float32)
        if begin + C < E:
            b_next = _part(p_router, m_n, o_c, begin + C, E, C)
        b_squares += b_x * b_x
        b_acc += b_x * tl.load(norm_weight + begin + o_c[None, :], mask=m_c, other=0.0) * b_router
    root = tl.rsqrt(tl.sum(tl.sum(b_squares, axis=1), axis=0) / E + eps)
    b_logits = tl.sum(b_acc, axis=1) * root
    if ROUTER_BIAS:
        b_logits += tl.load(router_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(logits + o_n, b_logits, mask=m_n)
    o_e = i_n * SHARE + tl.arange(0, SHARE)
    m_e = o_e < E
    b_y = tl.load(x + o_e, mask=m_e, other=0.0).to(tl.float32) * root
    b_y *= tl.load(norm_weight + o_e, mask=m_e, other=0.0)
    tl.store(y + o_e, b_y.to(y.dtype.element_ty), mask=m_e)
    tl.debug_barrier()
    if tl.atomic_add(counters, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counters, 0)
        _choose(
            logits, bias, expert, weight, scale, sum_eps, X, NONE, TOP_K, K, SHARED, SIGMOID,
            RENORMALIZE, SOFTMAX_CHOSEN, SHARED_GATE, BIAS, STEP,
        )  # fmt: skip


def bind(
    problem: FusedRouteProblem,
    weight_GE: torch.Tensor,
    bias_G: torch.Tensor | None,
    norm_weight_E: torch.Tensor,
    choice_bias_X: torch.Tensor | None = None,
) -> FusedRoute:
    """The kernel for one layer; keeps the weights."""
    weight_GE, norm_weight_E = weight_GE.contiguous(), norm_weight_E.contiguous()
    route, padded = problem.route, power_of_two(problem.route.experts, least=16)
    programs = triton.cdiv(route.columns, N)
    constants = {
        "E": problem.width, "COLUMNS": route.columns, "N": N, "C": min(C, power_of_two(problem.width)),
        "SHARE": power_of_two(triton.cdiv(problem.width, programs)), "ROUTER_BIAS": problem.bias,
        "X": route.experts, "NONE": padded, "TOP_K": route.top_k, "K": power_of_two(route.slots),
        "SHARED": route.shared, "SIGMOID": route.score == "sigmoid",
        "RENORMALIZE": route.renormalize and not route.softmax_chosen,
        "SOFTMAX_CHOSEN": route.softmax_chosen, "SHARED_GATE": route.shared_gate,
        "BIAS": route.bias, "STEP": min(padded, PAIRS // padded),
    }  # fmt: skip

    def fused_route(x_1E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert x_1E.shape == (1, problem.width) and x_1E.stride(1) == 1, (x_1E.shape, problem)
        y_1E = x_1E.new_empty(x_1E.shape)
        logits_G = x_1E.new_empty(route.columns, dtype=torch.float32)
        weight_1K = x_1E.new_empty((1, route.slots), dtype=torch.float32)
        expert_1K = x_1E.new_empty((1, route.slots), dtype=torch.int32)
        fused_route_kernel[(programs,)](
            x_1E, norm_weight_E, weight_GE, bias_G, choice_bias_X, y_1E, logits_G,
            counters(x_1E.device), expert_1K, weight_1K, problem.eps, route.scale, SUM_EPS,
            **constants, num_warps=WARPS, **launch(x_1E.device),
        )  # fmt: skip
        return y_1E, expert_1K, weight_1K

    return fused_route


def _supports(problem: FusedRouteProblem) -> str | None:
    route = problem.route
    if route.experts > MAX_EXPERTS:
        return f"knows {MAX_EXPERTS} experts at most"
    if route.groups > 1 or route.score not in SCORES:
        return f"chooses by {' or '.join(SCORES)}, without groups"
    if route.bias and route.score != "sigmoid":
        return f"adds no bias to scores by {route.score}"
    if route.softmax_chosen and route.score != "softmax":
        return "takes the softmax of chosen logits by softmax alone"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind)
