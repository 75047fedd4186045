"""Routing by the native kernel."""

from __future__ import annotations

import torch

from headrace.back.kernels.native.library import (
    FLOAT,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.route.op import (
    CHOSEN_SIGMOID,
    EACH,
    SPARSEMIXER,
    SQRT_SOFTPLUS,
    Route,
    RouteProblem,
)

MAX_EXPERTS = 1024
MAX_GROUPS = 64
_ARGUMENTS = (*(POINTER,) * 4, *(INT64,) * 7, FLOAT, FLOAT, INT32)


def bind_with(
    library: NativeLibrary, problem: RouteProblem, bias_X: torch.Tensor | None = None
) -> Route:
    """The kernel of one library; keeps the bias."""
    kernel = library.bind("route", *_ARGUMENTS)
    bias = None if bias_X is None else bias_X.float().contiguous()
    mode = (
        (problem.score == "sigmoid")
        + 2 * problem.renormalize
        + 4 * problem.softmax_chosen
        + 8 * (problem.group_score == "top2")
        + 16 * problem.shared_gate
        + 32 * (problem.score == SPARSEMIXER)
        + 64 * (problem.score == CHOSEN_SIGMOID)
        + 128 * (problem.score == SQRT_SOFTPLUS)
    )

    def route(logits_TG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert logits_TG.dtype == torch.float32 and logits_TG.is_contiguous(), logits_TG.dtype
        assert logits_TG.shape[1] == problem.columns, (logits_TG.shape, problem)
        count = logits_TG.shape[0]
        expert_TK = logits_TG.new_empty((count, problem.slots), dtype=torch.int32)
        weight_TK = logits_TG.new_empty((count, problem.slots))
        kernel(
            logits_TG.data_ptr(), bias.data_ptr() if bias is not None else None,
            expert_TK.data_ptr(), weight_TK.data_ptr(), count, problem.experts, problem.columns,
            problem.top_k, problem.shared, problem.groups, problem.kept_groups, problem.scale, problem.jitter,
            mode,
        )  # fmt: skip
        return expert_TK, weight_TK

    return route


def _supports(problem: RouteProblem) -> str | None:
    if problem.group_score == EACH:
        return "chooses from the best groups, not from each"
    if problem.experts > MAX_EXPERTS or problem.groups > MAX_GROUPS:
        return f"knows {MAX_EXPERTS} experts and {MAX_GROUPS} groups at most"
    return unsupported(problem.device, torch.float32)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, bias: bind_with(loaded(), problem, bias),
    invariant=True,
)
