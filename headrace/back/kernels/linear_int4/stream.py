"""When and how the kernels of triton_stream_int4.py and triton_rows_int4.py are launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from headrace.back.kernels.linear_int4.layout import BLOCK, ROWS, Int4Weight, block_groups
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    interpreted,
    launch,
    num_sms,
)

LEAST_TOKENS = 8
"""Columns of the smallest matrix instruction."""
CHUNK = 4096
"""Inputs of one token that are loaded together."""
WARPS, COLUMNS = 8, 8
"""Of a program of triton_rows_int4.py, and of its matrix instruction."""
ROW_TILE = 16
"""Outputs of its programs."""
Launch = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Int4Gemm:
    """y = act(norm(x) W^T + b), with `add` added to what y holds. `norm_I` (float32, of one token
    only) and `activation` None: none."""

    weight: Int4Weight
    bias_O: torch.Tensor | None = None
    norm_I: torch.Tensor | None = None
    eps: float = 0.0
    activation: str | None = None
    add: bool = False

    @property
    def results(self) -> int:
        """Columns of y."""
        return self.weight.outputs // (2 if self.activation else 1)


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """pair: a program's tile is two tiles of the weight (always where it is gated); stages: blocks
    on their way; per_sm: programs of a multiprocessor; tokens: of a program. depth: one token by
    triton_rows_int4.py where that serves, with so many rounds on their way instead of stages."""

    stages: int
    per_sm: int
    tokens: int
    pair: bool = True
    depth: int = 0


def unfit(gemm: Int4Gemm) -> str | None:
    """Why these kernels do not serve a GEMM, if so."""
    weight = gemm.weight
    device = weight.words_NBW.device
    if device.type != "cuda" or interpreted() or torch.version.hip is not None:
        return "runs on NVIDIA's GPUs only"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "asks for the TMA unit and the matrix instructions of compute capability 9.0"
    return unfit_sizes(gemm)


def unfit_sizes(gemm: Int4Gemm) -> str | None:
    """The same whatever the device."""
    if gemm.weight.scales_NBSR.dtype not in (torch.bfloat16, torch.float16):
        return f"knows bfloat16 and float16, not {gemm.weight.scales_NBSR.dtype}"
    if gemm.weight.floats and gemm.weight.scales_NBSR.dtype is not torch.bfloat16:
        return "multiplies e2m1 numbers in bfloat16"
    if gemm.weight.levels != "e2m1":
        return f"unpacks e2m1 numbers and integers, not {gemm.weight.levels}"
    if gemm.activation not in (None, "silu"):
        return f"gates by silu, not {gemm.activation}"
    if gemm.activation and gemm.results % ROWS:
        return f"gates multiples of {ROWS} results, not {gemm.results}"
    if gemm.weight.inputs % 8:
        return f"{gemm.weight.inputs} inputs are no multiple of 8"
    return None


def by_rows(gemm: Int4Gemm, plan: StreamPlan) -> bool:
    """Whether triton_rows_int4.py serves: one token, by a plan that asks for it."""
    return plan.tokens == 1 and plan.depth > 0 and known_by_rows(gemm.weight)


def known_by_rows(weight: Int4Weight) -> bool:
    """Whether triton_rows_int4.py knows a weight's numbers: integers, scales of bfloat16."""
    return weight.scales_NBSR.dtype is torch.bfloat16 and not weight.floats


def _shared_inputs(weight: Int4Weight) -> int:
    """Inputs that share a scale in a block, 0: all of them."""
    return 0 if weight.group in (None, BLOCK) else weight.group or 0


def _round(weight: Int4Weight) -> tuple[int, int]:
    """Inputs of all warps of triton_rows_int4.py in a round, and their sums."""
    group = _shared_inputs(weight)
    sums = WARPS * COLUMNS if group else WARPS
    return sums * (group or BLOCK), sums


def shared_bytes(gemm: Int4Gemm, plan: StreamPlan) -> int:
    """Shared memory of a program."""
    tokens = plan.tokens
    if by_rows(gemm, plan):
        inputs, sums = _round(gemm.weight)
        rounds = triton.cdiv(gemm.weight.inputs, inputs * plan.depth) * plan.depth
        return rounds * (inputs * 2 + sums * 4) + 2048
    block = parts(gemm, plan) * ROWS * BLOCK // 2
    if tokens == 1:
        return plan.stages * block + -(-gemm.weight.inputs // CHUNK) * CHUNK * 2 + 1024
    m = max(LEAST_TOKENS, tokens)
    return plan.stages * (block + m * BLOCK * 2) + ROWS * m * 4 + 1024


def parts(gemm: Int4Gemm, plan: StreamPlan) -> int:
    """Tiles of the weight in a program's."""
    if gemm.activation:
        return 2
    return 2 if plan.pair and len(gemm.weight.words_NBW) % 2 == 0 else 1


def bind(gemm: Int4Gemm, plan: StreamPlan) -> Launch:
    """The launch `f(x_TI, y_TY)`."""
    return _bind_rows(gemm, plan) if by_rows(gemm, plan) else _bind_streams(gemm, plan)


def _bind_rows(gemm: Int4Gemm, plan: StreamPlan) -> Launch:
    from headrace.back.kernels.linear_int4.triton_rows_int4 import rows_kernel

    weight, gated = gemm.weight, gemm.activation is not None
    device = weight.words_NBW.device
    pair = 2 if gated or plan.pair else 1
    tiles = triton.cdiv(weight.outputs, ROW_TILE * pair)
    programs = min(plan.per_sm * num_sms(device), tiles)
    constants = {
        "INPUTS": weight.inputs, "OUTPUTS": gemm.results, "STEPS": weight.words_NBW.shape[1],
        "PROGRAMS": programs, "DEPTH": plan.depth, "PAIR": pair, "GROUP": _shared_inputs(weight),
        "WHOLE": weight.group is None, "MINIMA": weight.minima, "NORM": gemm.norm_I is not None,
        "BIAS": gemm.bias_O is not None, "GATED": gated, "ADD": gemm.add, "num_warps": 8,
    }  # fmt: skip

    def one(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1
        rows_kernel[(programs,)](
            weight.words_NBW, weight.scales_NBSR, x_TI, gemm.norm_I, gemm.bias_O, y_TY, gemm.eps,
            **constants, **launch(device),
        )  # fmt: skip

    return one


def _bind_streams(gemm: Int4Gemm, plan: StreamPlan) -> Launch:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from headrace.back.kernels.linear_int4 import triton_stream_int4 as kernels

    weight, pair = gemm.weight, parts(gemm, plan)
    tiles, steps, _ = weight.words_NBW.shape
    units = tiles // pair * steps
    device = weight.words_NBW.device
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.int32)
    words = TensorDescriptor.from_tensor(weight.words_NBW.view(-1, 32), [32, 32], layout)
    programs = min(plan.per_sm * num_sms(device), units)
    constants = {
        "OUTPUTS": gemm.results, "STEPS": steps, "UNITS": units, "PROGRAMS": programs,
        "STAGES": plan.stages, "PAIR": pair, "GROUPS": block_groups(weight.group),
        "WHOLE": weight.group is None, "MINIMA": weight.minima, "FLOATS": weight.floats,
        "BIAS": gemm.bias_O is not None, "GATED": gemm.activation is not None, "ADD": gemm.add,
        "num_warps": 4,
    }  # fmt: skip
    m = max(LEAST_TOKENS, plan.tokens)
    sums = programs * 2 * pair * ROWS

    def one(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1
        partial = torch.empty(sums, dtype=torch.float32, device=device)
        kernels.one_kernel[(programs,)](
            words, weight.scales_NBSR, x_TI, gemm.norm_I, gemm.bias_O, y_TY, partial,
            counters(device), gemm.eps, INPUTS=weight.inputs, NORM=gemm.norm_I is not None,
            **constants, **launch(device),
        )  # fmt: skip

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[weight.scales_NBSR.dtype]
    x_layout = gl.NVMMASharedLayout.get_default_for([m, BLOCK], element)

    def few(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1
        places = triton.cdiv(len(x_TI), m)
        assert places * (units // steps) <= COUNTERS, (places, units, steps)
        stride = x_TI.stride(0) if len(x_TI) > 1 else weight.inputs
        x = TensorDescriptor(x_TI, list(x_TI.shape), [stride, 1], [m, BLOCK], x_layout)
        partial = torch.empty(places * sums * m, dtype=torch.float32, device=device)
        kernels.few_kernel[(programs, places)](
            words, weight.scales_NBSR, x, gemm.bias_O, y_TY, partial, counters(device), len(x_TI),
            y_TY.stride(0), **constants, **launch(device),
        )  # fmt: skip

    if plan.tokens == 1:
        return one
    assert gemm.norm_I is None, "the norm is a kernel of its own"
    return few
