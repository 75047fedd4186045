"""The experts of a mixture with packed weights by the native kernel: tokens are sorted by expert,
each panel is read once a call, and only those of experts that were chosen."""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.experts.native import ACTIVATION_IDS
from headrace.back.kernels.experts.op import Beside, Experts, check_beside
from headrace.back.kernels.experts_quant.layout import (
    ROW_FORMS,
    ExpertPanels,
    PackedExperts,
    mixed_rows,
)
from headrace.back.kernels.experts_quant.op import ExpertsQuantProblem
from headrace.back.kernels.linear_blocks.layout import LAYOUTS
from headrace.back.kernels.linear_quant.native import MAX_INPUTS
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

_ROW_NUMBERS = {"int8": 100, "fp8": 101, "fp8-g32": 133, "fp8-g128": 229}
assert _ROW_NUMBERS.keys() == ROW_FORMS.keys()
_ARGUMENTS = (*(POINTER,) * 9, *(INT64,) * 5, FLOAT, INT32, INT32)


def bind_with(
    library: NativeLibrary,
    problem: ExpertsQuantProblem,
    parts: tuple[PackedExperts, ...],
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
) -> Experts:
    """The kernel of one library; keeps the weights."""
    mixture = problem.mixture
    assert tuple(part.kind for part in parts) == problem.kinds, problem
    kernel = library.bind("experts_quant", *_ARGUMENTS)
    biases = [None if b is None else b.float().contiguous() for b in (up_bias_XI, down_bias_XE)]
    activation, element = ACTIVATION_IDS[mixture.activation], DTYPES[mixture.dtype]
    table = _table(parts)
    assert len(table) == mixture.experts, (len(table), mixture)
    address = table.ctypes.data

    def experts(
        x_TE: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        assert x_TE.dtype == mixture.dtype and x_TE.is_contiguous(), (x_TE.dtype, x_TE.stride())
        assert expert_TK.dtype == torch.int32 and weight_TK.dtype == torch.float32
        assert expert_TK.shape == weight_TK.shape == (x_TE.shape[0], mixture.slots)
        assert expert_TK.is_contiguous() and weight_TK.is_contiguous()
        if beside is not None:
            check_beside(mixture, beside, len(x_TE))
        y_TE = x_TE.new_empty(x_TE.shape)
        kernel(
            x_TE.data_ptr(), address, *(None if bias is None else bias.data_ptr() for bias in biases),
            expert_TK.data_ptr(), weight_TK.data_ptr(), y_TE.data_ptr(),
            *((None, None) if beside is None else (part.data_ptr() for part in beside)), x_TE.shape[0],
            mixture.slots, mixture.experts, mixture.width, mixture.inner, mixture.clamp, activation,
            element,
        )  # fmt: skip
        return y_TE

    experts.__dict__["kept"] = (parts, table)  # the kernel holds their addresses
    return experts


def _table(parts: tuple[PackedExperts, ...]) -> np.ndarray:
    """int64 [X, 6]: address and form of each expert's gates, ups and downs."""
    rows = [
        [number for panels in (part.gate, part.up, part.down) for number in _entry(panels, i)]
        for part in parts
        for i in range(len(part))
    ]
    return np.array(rows, np.int64)


def _entry(panels: ExpertPanels, expert: int) -> tuple[int, int]:
    assert panels.panels_XPB.is_contiguous()
    stride = panels.panels_XPB.stride(0)
    number = _ROW_NUMBERS.get(panels.form)
    address = panels.panels_XPB.data_ptr() + expert * stride
    return address, LAYOUTS[panels.form].number if number is None else number


def _supports(problem: ExpertsQuantProblem) -> str | None:
    mixture = problem.mixture
    if mixture.activation not in ACTIVATION_IDS:
        return f"knows no {mixture.activation}"
    if mixture.adds:
        return "adds into no residual"
    if max(mixture.width, mixture.inner) > MAX_INPUTS:
        return f"sums at most {MAX_INPUTS} inputs"
    return mixed_rows(problem.kinds) or unsupported(mixture.device, mixture.dtype)


KERNEL = Kernel(
    name="native",
    supports=_supports,
    bind=lambda problem, *weights: bind_with(loaded(), problem, *weights),
    invariant=True,
)
