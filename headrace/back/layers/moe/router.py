"""The router of a mixture as data, and the bias that only chooses."""

from __future__ import annotations

from dataclasses import dataclass

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
