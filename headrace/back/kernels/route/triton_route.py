"""Routing in one Triton kernel: a program a token, its scores in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.op import Kernel
from headrace.back.kernels.route.op import (
    CHOSEN_SIGMOID,
    EACH,
    SPARSEMIXER,
    SQRT_SOFTPLUS,
    SUM_EPS,
    Route,
    RouteProblem,
)
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported

MAX_EXPERTS = 1024
MAX_GROUPS = 32


@triton.jit
def _best(b_values, o_values, COUNT: tl.constexpr):
    """Index of the largest value, the lower among equals; the last of COUNT where there is none, as
    in rows of nan, of which padding may be: what reads weights by it stays within them."""
    best = tl.max(b_values, axis=0)
    index = tl.min(tl.where(b_values == best, o_values, COUNT), axis=0)
    return tl.minimum(index, COUNT - 1)


@triton.jit
def _within_groups(
    b_choice, o_x, GROUPS: tl.constexpr, KEPT: tl.constexpr, SIZE: tl.constexpr,
    TOP_TWO: tl.constexpr, G: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """-Inf outside the best groups."""
    o_g = tl.arange(0, G)
    b_worth = tl.full([G], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        b_here = tl.where(o_x // SIZE == g, b_choice, float("-inf"))
        worth = tl.max(b_here, axis=0)
        if TOP_TWO:
            first = _best(b_here, o_x, NONE)
            worth += tl.max(tl.where(o_x == first, float("-inf"), b_here), axis=0)
        b_worth = tl.where(o_g == g, worth, b_worth)
    b_kept = o_x < 0
    for _ in tl.static_range(KEPT):
        group = _best(b_worth, o_g, G)
        b_kept = b_kept | (o_x // SIZE == group)
        b_worth = tl.where(o_g == group, float("-inf"), b_worth)
    return tl.where(b_kept, b_choice, float("-inf"))


@triton.jit
def route_kernel(
    logits, bias, expert, weight, scale, sum_eps, far,
    X: tl.constexpr, NONE: tl.constexpr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr,
    K: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    SOFTMAX_CHOSEN: tl.constexpr, SHARED_GATE: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, G: tl.constexpr, TOP_TWO: tl.constexpr,
    SPARSE: tl.constexpr, CHOSEN_SIGMOID: tl.constexpr, SQRT_SOFTPLUS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. NONE: X padded to a power of two, K likewise the slots."""
    enter(DEPENDENT)
    i_t = tl.program_id(0).to(tl.int64)
    SLOTS: tl.constexpr = TOP_K + SHARED
    o_x = tl.arange(0, NONE)
    o_k = tl.arange(0, K)
    m_x = o_x < X
    b_logits = tl.load(logits + i_t * COLUMNS + o_x, mask=m_x, other=float("-inf"))
    if SPARSE or CHOSEN_SIGMOID:
        b_score = b_logits
    elif SQRT_SOFTPLUS:
        b_score = tl.maximum(b_logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_logits)))
        b_score = tl.sqrt(tl.where(m_x, b_score, 0.0))
    elif SIGMOID:
        b_score = tl.where(m_x, tl.sigmoid(b_logits), 0.0)
    else:
        b_score = tl.exp(b_logits - tl.max(b_logits, axis=0))
        b_score = b_score / tl.sum(b_score, axis=0)
    b_choice = b_score
    if BIAS:
        b_choice += tl.load(bias + o_x, mask=m_x, other=0.0)
    b_choice = tl.where(m_x, b_choice, float("-inf"))
    if GROUPS > 1:
        b_choice = _within_groups(b_choice, o_x, GROUPS, KEPT, X // GROUPS, TOP_TWO, G, NONE)
    b_expert = tl.zeros([K], tl.int32)
    b_weight = tl.full([K], float("-inf") if SOFTMAX_CHOSEN else 0.0, tl.float32)
    for k in tl.static_range(TOP_K):
        chosen = _best(b_choice, o_x, X)
        b_from = b_logits if SOFTMAX_CHOSEN else b_score
        value = tl.sum(tl.where(o_x == chosen, tl.where(m_x, b_from, 0.0), 0.0), axis=0)
        if CHOSEN_SIGMOID:
            value = tl.sigmoid(value)
        if SPARSE:
            top = tl.max(b_choice, axis=0)
            m_far = (top - b_logits) / tl.maximum(tl.abs(b_logits), top) > far
            m_near = (b_choice > float("-inf")) & ~m_far
            value = 1.0 / tl.sum(tl.where(m_near, tl.exp(b_logits - top), 0.0), axis=0)
        b_expert = tl.where(o_k == k, chosen, b_expert)
        b_weight = tl.where(o_k == k, value, b_weight)
        b_choice = tl.where(o_x == chosen, float("-inf"), b_choice)
    if SOFTMAX_CHOSEN:
        b_weight = tl.exp(b_weight - tl.max(b_weight, axis=0))
        b_weight = b_weight / tl.sum(b_weight, axis=0)
    if RENORMALIZE:
        b_weight = b_weight / (tl.sum(b_weight, axis=0) + sum_eps)
    b_weight = b_weight * scale
    if SHARED > 0:
        gate = 1.0
        if SHARED_GATE:
            gate = tl.sigmoid(tl.load(logits + i_t * COLUMNS + X))
        b_expert = tl.where(o_k >= TOP_K, X + o_k - TOP_K, b_expert)
        b_weight = tl.where(o_k >= TOP_K, gate, b_weight)
    m_k = o_k < SLOTS
    tl.store(expert + i_t * SLOTS + o_k, b_expert, mask=m_k)
    tl.store(weight + i_t * SLOTS + o_k, b_weight, mask=m_k)


def bind(problem: RouteProblem, bias_X: torch.Tensor | None = None) -> Route:
    """The kernel for one layer; keeps the bias."""
    constants = {
        "X": problem.experts, "NONE": power_of_two(problem.experts), "COLUMNS": problem.columns,
        "TOP_K": problem.top_k, "K": power_of_two(problem.slots), "SHARED": problem.shared,
        "SPARSE": problem.score == SPARSEMIXER,
        "CHOSEN_SIGMOID": problem.score == CHOSEN_SIGMOID,
        "SQRT_SOFTPLUS": problem.score == SQRT_SOFTPLUS,
        "SIGMOID": problem.score == "sigmoid", "SOFTMAX_CHOSEN": problem.softmax_chosen,
        "RENORMALIZE": problem.renormalize and not problem.softmax_chosen,
        "SHARED_GATE": problem.shared_gate, "BIAS": problem.bias, "GROUPS": problem.groups,
        "KEPT": problem.kept_groups, "G": power_of_two(problem.groups),
        "TOP_TWO": problem.group_score == "top2" and problem.experts > problem.groups,
    }  # fmt: skip

    def route(logits_TG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert logits_TG.dtype == torch.float32 and logits_TG.is_contiguous(), logits_TG.dtype
        shape = (logits_TG.shape[0], problem.slots)
        expert_TK = logits_TG.new_empty(shape, dtype=torch.int32)
        weight_TK = logits_TG.new_empty(shape)
        route_kernel[(shape[0],)](
            logits_TG, bias_X, expert_TK, weight_TK, problem.scale, SUM_EPS, 2 * problem.jitter,
            num_warps=1,
            **constants, **launch(logits_TG.device),
        )  # fmt: skip
        return expert_TK, weight_TK

    return route


def _supports(problem: RouteProblem) -> str | None:
    if problem.group_score == EACH:
        return "chooses from the best groups, not from each"
    if problem.experts > MAX_EXPERTS or problem.groups > MAX_GROUPS:
        return f"knows {MAX_EXPERTS} experts and {MAX_GROUPS} groups at most"
    return unsupported(problem.device, torch.float32)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
