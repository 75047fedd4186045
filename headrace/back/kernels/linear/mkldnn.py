"""oneDNN linear with the weight packed once: on one Zen 4 core 2.4x torch's bf16 linear at
1x1024x3072, 1.6x at 8x4096x11008, level at 128 rows. The ops are private to torch (inductor's
freezing uses them), so a missing one is a reason to refuse, and the self-check guards their
meaning.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.linear.op import Linear, LinearProblem
from headrace.back.kernels.op import Kernel

EXPECTED_ROWS = 1


def _supports(problem: LinearProblem) -> str | None:
    if problem.device != "cpu":
        return "runs on the CPU only"
    if problem.dtype is not torch.bfloat16:
        return f"packs bfloat16 only, not {problem.dtype}"
    if problem.wide:
        return "gives the dtype it takes"
    if problem.shared:
        return "the weight is tied to the embedding and would be held twice"
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    missing = [
        name
        for name in ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
        if not hasattr(torch.ops.mkldnn, name)
    ]
    if missing:
        return f"this torch lacks {', '.join(missing)}"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 that oneDNN uses"
    return None


def _bind(problem: LinearProblem, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), EXPECTED_ROWS)
    call = torch.ops.mkldnn._linear_pointwise.default

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        return call(x_TI, packed, bias_O, "none", [], "")

    return linear


KERNEL = Kernel(name="mkldnn", supports=_supports, bind=_bind)
