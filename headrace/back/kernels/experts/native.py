"""The experts of a mixture by the native kernel: tokens are sorted by expert, each weight is read
once a call, and only those of experts that were chosen."""

from __future__ import annotations

import torch

from headrace.back.kernels.experts.op import (
    SWIGLU_OAI,
    SWIGLU_STEP,
    Beside,
    Experts,
    ExpertsProblem,
    check_beside,
)
from headrace.back.kernels.native.library import (
    DTYPES,
    FLOAT,
    INT32,
    INT64,
    POINTER,
    NativeLibrary,
    loaded,
    unsupported,
)
from headrace.back.kernels.op import Kernel

ACTIVATION_IDS = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    SWIGLU_OAI: 100,
    SWIGLU_STEP: 101,
}
_ARGUMENTS = (*(POINTER,) * 10, *(INT64,) * 5, FLOAT, INT32, INT32)


def bind_with(
    library: NativeLibrary,
    problem: ExpertsProblem,
    up_XIE: torch.Tensor,
    down_XEI: torch.Tensor,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
) -> Experts:
    """The kernel of one library; keeps the weights."""
    kernel = library.bind("experts", *_ARGUMENTS)
    up_XIE, down_XEI = up_XIE.contiguous(), down_XEI.contiguous()
    assert up_XIE.shape == (problem.experts, 2 * problem.inner, problem.width), up_XIE.shape
    assert down_XEI.shape == (problem.experts, problem.width, problem.inner), down_XEI.shape
    biases = [None if b is None else b.float().contiguous() for b in (up_bias_XI, down_bias_XE)]
    activation, element = ACTIVATION_IDS[problem.activation], DTYPES[problem.dtype]

    def experts(
        x_TE: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        assert x_TE.dtype == problem.dtype and x_TE.is_contiguous(), (x_TE.dtype, x_TE.stride())
        assert expert_TK.dtype == torch.int32 and weight_TK.dtype == torch.float32
        assert expert_TK.shape == weight_TK.shape == (x_TE.shape[0], problem.slots)
        assert expert_TK.is_contiguous() and weight_TK.is_contiguous()
        if beside is not None:
            check_beside(problem, beside, len(x_TE))
        y_TE = x_TE.new_empty(x_TE.shape)
        kernel(
            x_TE.data_ptr(), up_XIE.data_ptr(), down_XEI.data_ptr(),
            *(None if bias is None else bias.data_ptr() for bias in biases),
            expert_TK.data_ptr(), weight_TK.data_ptr(), y_TE.data_ptr(),
            *((None, None) if beside is None else (part.data_ptr() for part in beside)), x_TE.shape[0],
            problem.slots, problem.experts, problem.width, problem.inner, problem.clamp, activation,
            element,
        )  # fmt: skip
        return y_TE

    return experts


def _supports(problem: ExpertsProblem) -> str | None:
    if problem.activation not in ACTIVATION_IDS:
        return f"knows no {problem.activation}"
    if problem.adds:
        return "adds into no residual"
    return unsupported(problem.device, problem.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)
