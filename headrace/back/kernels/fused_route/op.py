"""What stands before a mixture's experts, of one token, in one: the norm, the router's GEMM and the
choice.

`bind(problem, weight_GE, bias_G | None, norm_weight_E, choice_bias_X | None)` returns `f(x_1E) ->
(y_1E, expert_1K, weight_1K)`. y is x, normed (kernels/rms_norm; its weight is float32), which the
experts read; the logits of its GEMM with `weight_GE` and `bias_G` are float32 and go into op
`route`, whose symbols, bias and results these are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)
from headrace.back.kernels.rms_norm.op import RMSNormProblem, bind_norm
from headrace.back.kernels.route.op import RouteProblem
from headrace.back.kernels.route.op import bind_reference as bind_route

FusedRoute = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class FusedRouteProblem:
    """`dtype` is that of x, y, the router's weight and its bias, if it has one; `width`: E; `eps`:
    of the norm."""

    route: RouteProblem
    dtype: torch.dtype
    width: int
    eps: float
    bias: bool = False

    @property
    def device(self) -> str:
        """The route's."""
        return self.route.device


def bind_reference(
    problem: FusedRouteProblem,
    weight_GE: torch.Tensor,
    bias_G: torch.Tensor | None,
    norm_weight_E: torch.Tensor,
    choice_bias_X: torch.Tensor | None = None,
) -> FusedRoute:
    """The reference: the references of the separate ops, one after the other."""
    norm = bind_norm(
        RMSNormProblem(
            device=problem.device, dtype=problem.dtype, width=problem.width, eps=problem.eps
        ),
        norm_weight_E,
    )
    route = bind_route(problem.route, choice_bias_X)
    wide_bias_G = None if bias_G is None else bias_G.float()

    def fused_route(x_1E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y_1E = norm(x_1E)
        return y_1E, *route(F.linear(y_1E.float(), weight_GE.float(), wide_bias_G))

    return fused_route


def _sample(problem: FusedRouteProblem) -> Sample:
    """Logits in equal steps, in an order of their own, so that rounding exchanges none; a bias that
    only chooses turns their order round."""
    generator, route = sample_generator(), problem.route
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    x = random_tensor(1, problem.width, **new)
    norm = random_tensor(problem.width, **{**new, "dtype": torch.float32}).abs_() + 0.5
    shuffled = torch.randperm(route.columns, generator=generator).to(problem.device)
    step_G = torch.linspace(-2.0, 2.0, route.columns, device=problem.device)[shuffled]
    along = x[0].float() / norm / x.float().square().sum().sqrt() / problem.width**0.5
    weight = (step_G[:, None] * along).to(problem.dtype)
    bias = step_G.to(problem.dtype) / 4 if problem.bias else None
    chooses = -2.0 * step_G[: route.experts] if route.bias else None
    return Sample(problem=problem, weights=(weight, bias, norm, chooses), arguments=(x,))


OP: Op[FusedRouteProblem] = Op(
    name="fused_route",
    reference=Kernel(
        name="separate ops", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=("headrace.back.kernels.fused_route.triton_fused_route:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
