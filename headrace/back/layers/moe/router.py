"""The router of a mixture as data, the bias that only chooses, and the ops that a router is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.fused_route.op import OP as FUSED_ROUTE
from headrace.back.kernels.fused_route.op import FusedRoute, FusedRouteProblem
from headrace.back.kernels.route.op import RouteProblem
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope
from headrace.back.parallel.param import Param, WeightPiece


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How experts are chosen and weighed: see op `route`, whose words these are. `name`: the router
    within the module, `weight`: its weight there, stored with inputs first if `transposed`;
    `bias_name`: that of the bias that only chooses, a tensor of `bias_dims` dimensions, of which
    only the last is not 1, and `bias_optional` if the checkpoint may lack it; `bias_row`: it is
    this row of so many. `weighs_inputs`: the weights multiply what goes into the experts, not what
    comes out (Llama 4). `expert_scale`: what each expert's results are multiplied with, a tensor of
    the module. `logit_scale`: what logits are multiplied with. `softcap`: logits are bounded by it,
    c tanh(x / c); 0: they are not. `idle`: so many experts, behind the others, give back what they
    get (LongCat-Flash), or nothing with `idle_drops`."""

    experts: int
    top_k: int
    score: str = "softmax"
    renormalize: bool = False
    softmax_chosen: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "max"
    name: str = "gate"
    weight: str = "weight"
    transposed: bool = False
    bias_name: str | None = None
    bias_row: tuple[int, int] | None = None
    bias_dims: int = 1
    bias_optional: bool = False
    linear_bias: bool = False
    weighs_inputs: bool = False
    jitter: float = 0.0
    expert_scale: str | None = None
    logit_scale: float = 1.0
    softcap: float = 0.0
    idle: int = 0
    idle_drops: bool = False


def choice_bias(scope: Scope, router: RouterSpec) -> Param | None:
    """The bias that only chooses, or its row in a tensor of several routers' biases."""
    if not router.bias_name:
        return None
    pieces = None
    if router.bias_row is not None:
        row, rows = router.bias_row
        name, shape = scope.name(router.bias_name), (rows, router.experts)
        pieces = (WeightPiece(name=name, shape=shape, rows=(row, 1)),)
    return scope.param(
        router.bias_name,
        (*(1,) * (router.bias_dims - 1), router.experts),
        pieces=pieces,
        init="zeros",
        optional=router.bias_optional,
    )


def route_problem(
    router: RouterSpec, device: str, *, shared: int, shared_gate: bool, joint: bool
) -> RouteProblem:
    """The choice of a router with so many shared experts behind it. `joint`: the chosen share their
    scale with experts that it does not know."""
    return RouteProblem(
        device=device,
        experts=router.experts,
        top_k=router.top_k,
        score=router.score,
        renormalize=router.renormalize and not joint,
        softmax_chosen=router.softmax_chosen,
        scale=1.0 if joint else router.scale,
        groups=router.groups,
        kept_groups=router.kept_groups,
        group_score=router.group_score,
        bias=bool(router.bias_name),
        shared=shared,
        shared_gate=shared_gate,
        jitter=router.jitter,
    )


def bind_fused_route(
    scope: Scope,
    router: RouterSpec,
    route: RouteProblem,
    norm: RMSNorm,
    weight_GE: torch.Tensor,
    bias_G: torch.Tensor | None,
    chooses_X: torch.Tensor | None,
) -> FusedRoute | None:
    """The norm before, the router and its choice of one token in one kernel, if there is one."""
    if router.softcap or router.logit_scale != 1.0:
        return None
    problem = FusedRouteProblem(
        route=route,
        dtype=scope.dtype,
        width=weight_GE.shape[1],
        eps=norm.eps,
        bias=bias_G is not None,
    )
    return scope.bind_if_served(FUSED_ROUTE, problem, weight_GE, bias_G, norm.weight_E, chooses_X)
