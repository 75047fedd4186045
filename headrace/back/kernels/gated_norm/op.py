"""A gate on the output of a recurrent layer, with the root mean square norm beside it:
`bind(problem, weight_E)` returns `f(x_TE, gate_TE) -> y_TE`.

With a = act(gate) and n(v) = v / sqrt(mean(v^2) + eps) over each `group` of neighbouring values:

    y = n(x * a) * w        the gate before the norm (Mamba 2, Dao and Gu 2024, section 7.1)
    y = n(x) * w * a        `norm_first` (gated delta nets, Yang et al. 2024, section 3.4)
    y = x * a               group 0: no norm; the weight is None

act may be none: then a is the gate itself. Without a norm a gate may stand for `spread` values:
that of value e is at e // spread. x_TE and gate_TE may be views into merged projections;
all in the model's dtype, weight_E float32.

T query tokens, E width.
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

GatedNorm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GATES = ("silu", "sigmoid", "", "softplus")


@dataclass(frozen=True, kw_only=True)
class GatedNormProblem:
    """`group` divides `width`; 0: there is no norm. `gate`: one of GATES. `spread` divides `width`;
    above 1 there is no norm."""

    device: str
    dtype: torch.dtype
    width: int
    group: int
    eps: float = 0.0
    norm_first: bool = False
    gate: str = "silu"
    spread: int = 1


def bind_reference(problem: GatedNormProblem, weight_E: torch.Tensor | None) -> GatedNorm:
    """The reference; safe in graphs."""
    check_weight(problem, weight_E)

    def gated_norm(x_TE: torch.Tensor, gate_TE: torch.Tensor) -> torch.Tensor:
        wide_TE, opened_TE = x_TE.float(), gate_TE.float()
        if problem.spread > 1:
            opened_TE = opened_TE.repeat_interleave(problem.spread, dim=1)
        opened_TE = _opened(problem.gate, opened_TE)
        if weight_E is None:
            return (wide_TE * opened_TE).to(x_TE.dtype)
        wide_TE = wide_TE if problem.norm_first else wide_TE * opened_TE
        parts_TGE = wide_TE.unflatten(1, (-1, problem.group))
        scale_TG1 = torch.rsqrt(parts_TGE.square().mean(-1, keepdim=True) + problem.eps)
        y_TE = (parts_TGE * scale_TG1).flatten(1) * weight_E
        return (y_TE * opened_TE if problem.norm_first else y_TE).to(x_TE.dtype)

    return gated_norm


def _opened(gate: str, gate_TE: torch.Tensor) -> torch.Tensor:
    if gate == "softplus":
        return F.softplus(gate_TE)
    if not gate:
        return gate_TE
    return gate_TE.sigmoid() * (gate_TE if gate == "silu" else 1.0)


def check_weight(problem: GatedNormProblem, weight_E: torch.Tensor | None) -> None:
    """Asserts that the weight is that of the problem."""
    assert problem.gate in GATES, problem.gate
    assert (problem.group > 0) == (weight_E is not None), problem
    assert problem.spread == 1 or (weight_E is None and problem.width % problem.spread == 0)
    if weight_E is not None:
        assert problem.width % problem.group == 0, problem
        assert weight_E.dtype == torch.float32 and weight_E.shape == (problem.width,), weight_E


def _sample(problem: GatedNormProblem) -> Sample:
    new = {"dtype": problem.dtype, "device": problem.device, "generator": sample_generator()}
    both = random_tensor(5, 2 * problem.width + 8, **new)
    weight = random_tensor(problem.width, **{**new, "dtype": torch.float32})
    return Sample(
        problem=problem,
        weights=(weight if problem.group else None,),
        arguments=(
            both[:, : problem.width],
            both[:, problem.width : problem.width + problem.width // problem.spread],
        ),
    )


OP: Op[GatedNormProblem] = Op(
    name="gated_norm",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=(
        "headrace.back.kernels.gated_norm.native:KERNEL",
        "headrace.back.kernels.gated_norm.triton_gated_norm:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)
