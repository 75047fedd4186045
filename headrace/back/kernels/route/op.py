"""Which experts a token is sent to, and with which weights.

`bind(problem, bias_X)` returns `f(logits_TG) -> (expert_TK, weight_TK)`. T tokens, X routed
experts, K = `top_k` + `shared` slots of a token; logits float32 [T, G], G = X, or X + 1 with
`shared_gate`; expert int32 and weight float32 [T, K].

A token's scores are softmax or sigmoid of its X logits, or sqrt(softplus(logit)) (`score`; the
last of DeepSeek V4). The `top_k` best are chosen by
score + bias, whose bias (float32, None: there is none) only chooses (DeepSeek-V3, section 2.1.2).
With `groups` g > 1 the experts are g equal groups, of which only the best `kept_groups` are chosen
from: a group is worth its best expert ("max") or the sum of its best two ("top2"); with `each` as
`group_score` top_k / g are chosen from each group (Intern-S1-Pro). Weights are the
scores of the chosen, divided by their sum with `renormalize`, times `scale`; with `softmax_chosen`
the softmax of the chosen logits instead. The lower index wins among equals.

With the score "sparsemixer" (Phi-3.5-MoE; Liu et al. 2023) experts are chosen by their logits, one
after another. The weight of one with logit m is its share of the softmax over those not yet chosen
but for those whose logit l is far from m: (m - l) / max(|l|, m) > 2 * `jitter`.

With the score "chosen_sigmoid" (Kolibri 1) experts are chosen by logit + bias; the weight of a
chosen one is the sigmoid of its logit.

The slots behind them are those of the `shared` experts, X, X + 1, ..., which every token takes,
with weight 1 or the sigmoid of the last logit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
SPARSEMIXER = "sparsemixer"
CHOSEN_SIGMOID = "chosen_sigmoid"
SQRT_SOFTPLUS = "sqrt_softplus"
EACH = "each"
SUM_EPS = 1e-20
"""Added to the sum that renormalized weights are divided by."""


@dataclass(frozen=True, kw_only=True)
class RouteProblem:
    """See the top of the file. `scale` multiplies the routed experts' weights. A sparsemixer has
    neither bias nor groups nor shared experts."""

    device: str
    experts: int
    top_k: int
    score: str = "softmax"
    renormalize: bool = False
    softmax_chosen: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "max"
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    jitter: float = 0.0

    @property
    def columns(self) -> int:
        """G."""
        return self.experts + self.shared_gate

    @property
    def slots(self) -> int:
        """K."""
        return self.top_k + self.shared


def bind_reference(problem: RouteProblem, bias_X: torch.Tensor | None = None) -> Route:
    """The reference."""
    assert (bias_X is not None) == problem.bias, problem

    def route(logits_TG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TX = logits_TG[:, : problem.experts]
        if problem.score == SPARSEMIXER:
            return _sparsemixer(problem, logits_TX)
        score_TX = _scores(problem, logits_TX)
        choice_TX = score_TX if bias_X is None else score_TX + bias_X
        if problem.groups > 1:
            choice_TX = _within_groups(problem, choice_TX)
        expert_TK = choice_TX.sort(dim=1, descending=True, stable=True).indices[:, : problem.top_k]
        weight_TK = score_TX.gather(1, expert_TK)
        if problem.score == CHOSEN_SIGMOID:
            weight_TK = weight_TK.sigmoid()
        if problem.softmax_chosen:
            weight_TK = logits_TX.gather(1, expert_TK).softmax(1)
        elif problem.renormalize:
            weight_TK = weight_TK / (weight_TK.sum(1, keepdim=True) + SUM_EPS)
        weight_TK = weight_TK * problem.scale
        count, shared = len(logits_TG), problem.shared
        if shared:
            ids_S = torch.arange(shared, device=logits_TG.device) + problem.experts
            expert_TK = torch.cat((expert_TK, ids_S.expand(count, shared)), dim=1)
            gate_T1 = logits_TG[:, -1:].sigmoid() if problem.shared_gate else weight_TK.new_ones(1)
            weight_TK = torch.cat((weight_TK, gate_T1.expand(count, shared)), dim=1)
        return expert_TK.to(torch.int32), weight_TK

    return route


def _scores(problem: RouteProblem, logits_TX: torch.Tensor) -> torch.Tensor:
    if problem.score == CHOSEN_SIGMOID:
        return logits_TX
    if problem.score == SQRT_SOFTPLUS:
        return F.softplus(logits_TX).sqrt()
    return logits_TX.sigmoid() if problem.score == "sigmoid" else logits_TX.softmax(1)


def _sparsemixer(
    problem: RouteProblem, logits_TX: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    left_TX, experts, weights = logits_TX.clone(), [], []
    for _ in range(problem.top_k):
        top_T1, chosen_T1 = left_TX.max(1, keepdim=True)
        far_TX = (top_T1 - logits_TX) / logits_TX.abs().maximum(top_T1) > 2 * problem.jitter
        near_TX = left_TX.masked_fill(far_TX, float("-inf"))
        experts.append(chosen_T1)
        weights.append(near_TX.softmax(1).gather(1, chosen_T1) * problem.scale)
        left_TX.scatter_(1, chosen_T1, float("-inf"))
    return torch.cat(experts, 1).to(torch.int32), torch.cat(weights, 1)


def _within_groups(problem: RouteProblem, choice_TX: torch.Tensor) -> torch.Tensor:
    """-Inf outside the best groups."""
    choice_TgX = choice_TX.unflatten(1, (problem.groups, -1))
    if problem.group_score == EACH:
        order_TgX = choice_TgX.sort(dim=2, descending=True, stable=True).indices
        dropped_TgK = order_TgX[:, :, problem.top_k // problem.groups :]
        return choice_TgX.scatter(2, dropped_TgK, float("-inf")).flatten(1)
    if problem.group_score == "top2":
        worth_Tg = choice_TgX.topk(min(2, choice_TgX.shape[2]), dim=2).values.sum(2)
    else:
        worth_Tg = choice_TgX.amax(2)
    order_Tg = worth_Tg.sort(dim=1, descending=True, stable=True).indices
    dropped_Tg = torch.ones_like(worth_Tg, dtype=torch.bool)
    dropped_Tg.scatter_(1, order_Tg[:, : problem.kept_groups], False)
    return choice_TgX.masked_fill(dropped_Tg[:, :, None], float("-inf")).flatten(1)


def _sample(problem: RouteProblem) -> Sample:
    generator = sample_generator()
    new = {"dtype": torch.float32, "device": problem.device, "generator": generator}
    logits = random_tensor(9, problem.columns, **new)
    bias = random_tensor(problem.experts, **new) * 0.1 if problem.bias else None
    return Sample(problem=problem, weights=(bias,), arguments=(logits,))


OP: Op[RouteProblem] = Op(
    name="route",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.route.native:KERNEL",
        "headrace.back.kernels.route.triton_route:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 1e-5,
)
