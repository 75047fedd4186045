"""Problems that tests of kernels for mixtures of experts share, native and Triton."""

from __future__ import annotations

from typing import Any

import torch

from headrace.back.kernels.experts.op import ExpertsProblem
from headrace.back.kernels.route.op import RouteProblem

ROUTERS = {
    "Mixtral": {"experts": 8, "top_k": 2, "renormalize": True},
    "Qwen": {"experts": 60, "top_k": 4, "shared": 4, "shared_gate": True},
    "Granite": {"experts": 32, "top_k": 8, "softmax_chosen": True},
    "DeepSeek-V2": {"experts": 160, "top_k": 6, "groups": 8, "kept_groups": 3, "scale": 16.0},
    "DeepSeek-V3": {
        **{"experts": 256, "top_k": 8, "score": "sigmoid", "renormalize": True, "scale": 2.5},
        **{"groups": 8, "kept_groups": 4, "group_score": "top2", "bias": True, "shared": 1},
    },
    "Kolibri 1": {
        "experts": 24,
        "top_k": 6,
        "score": "chosen_sigmoid",
        "renormalize": True,
        "bias": True,
    },
    "DeepSeek-V4": {
        **{"experts": 24, "top_k": 6, "score": "sqrt_softplus", "renormalize": True, "bias": True},
        **{"scale": 1.5, "shared": 1},
    },
    "Phi-3.5-MoE": {"experts": 16, "top_k": 2, "score": "sparsemixer", "jitter": 0.3},
    "one a group": {"experts": 4, "top_k": 1, "groups": 4, "kept_groups": 2, "group_score": "top2"},
}


def route_problem(name: str, device: str) -> RouteProblem:
    return RouteProblem(device=device, **ROUTERS[name])


def experts_problem(
    dtype: torch.dtype,
    device: str,
    *,
    activation: str = "silu",
    odd: bool = False,
    absent: bool = False,
) -> ExpertsProblem:
    is_oai = activation == "swiglu_oai"
    return ExpertsProblem(
        device=device,
        dtype=dtype,
        experts=5 if odd else 8,
        slots=2 if odd else 4,
        width=75 if odd else 128,
        inner=37 if odd else 64,
        activation=activation,
        clamp={"swiglu_oai": 7.0, "swiglu_step": 0.4}.get(activation, 0.0),
        bias=is_oai,
        absent=absent,
    )


def beside_error(run: Any, reference: Any, arguments: Any, problem: ExpertsProblem) -> float:
    """How far results and inner values are from the reference's, of their greatest, where something is added in
    front of the activation (op experts)."""
    tokens, found = len(arguments[0]), []
    generator = torch.Generator().manual_seed(3)
    more = torch.randn(tokens, problem.slots, 2 * problem.inner, generator=generator)
    more = more.to(arguments[0].device)
    for experts in (run, reference):
        inner = arguments[0].new_full((tokens, problem.slots, problem.inner), 9.0)
        found.append((experts(*arguments, (more.clone(), inner)).float(), inner.float()))
    assert not torch.equal(found[0][0], run(*arguments).float()), "nothing was added"
    pairs = zip(*found, strict=True)
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
