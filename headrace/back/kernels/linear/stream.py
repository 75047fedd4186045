"""When and how the kernel of triton_stream.py is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from headrace.back.kernels.triton.wrap import COUNTERS, counters, interpreted, launch, num_sms

ROWS = 64
"""Outputs of a tile."""
MOST_STEP = 256
"""Inputs of a step at most. The compiler (Triton 3.6) fails on a GEMM of one step."""
LEAST_TOKENS = 8
"""Columns of the smallest matrix instruction."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Streamed:
    """y = x W^T + b; `gated` by SiLU, the gates being the first half of the outputs; `add`: into
    what y holds."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    gated: bool
    add: bool
    results: int


def unfit(weight_OI: torch.Tensor, activation: str) -> str | None:
    """Why this kernel does not serve a GEMM, if so."""
    if weight_OI.device.type != "cuda" or interpreted() or torch.version.hip is not None:
        return "runs on NVIDIA's GPUs only"
    if torch.cuda.get_device_capability(weight_OI.device) != (9, 0):
        return "asks for the TMA unit and the matrix instructions of compute capability 9.0"
    if weight_OI.dtype not in (torch.bfloat16, torch.float16):
        return f"knows bfloat16 and float16, not {weight_OI.dtype}"
    if activation not in ("", "silu"):
        return f"gates by silu, not {activation}"
    if weight_OI.shape[1] % 8 or weight_OI.shape[1] <= MOST_STEP:
        return f"{weight_OI.shape[1]} inputs are no multiple of 8, or one step"
    return None


def shared_bytes(*, k: int, stages: int, tokens: int, gated: bool) -> int:
    """Shared memory of a program: its steps' weight and tokens, and a tile of sums on its way
    out."""
    m = max(LEAST_TOKENS, tokens)
    return stages * (ROWS * (2 if gated else 1) + m) * k * 2 + ROWS * m * 4 + 1024


def bind(
    gemm: Streamed, *, k: int, stages: int, per_sm: int, most_tokens: int
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The launch `f(x_TI, y_TY)` for up to `most_tokens` tokens (a power of two)."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from headrace.back.kernels.linear.triton_stream import stream_kernel

    weight_OI = gemm.weight_OI
    m, inputs = max(LEAST_TOKENS, most_tokens), weight_OI.shape[1]
    assert k < inputs and k <= MOST_STEP, (k, inputs)
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[weight_OI.dtype]
    layout, x_layout = (
        gl.NVMMASharedLayout.get_default_for(box, element) for box in ([ROWS, k], [m, k])
    )
    weight = TensorDescriptor.from_tensor(weight_OI, [ROWS, k], layout)
    tiles, steps = triton.cdiv(gemm.results, ROWS), triton.cdiv(inputs, k)
    assert tiles <= COUNTERS, tiles
    programs = min(per_sm * num_sms(weight_OI.device), tiles * steps)
    constants = {
        "OUTPUTS": gemm.results, "STEPS": steps, "UNITS": tiles * steps, "PROGRAMS": programs,
        "STAGES": stages, "BIAS": gemm.bias_O is not None, "GATED": gemm.gated,
        "ADD": gemm.add,
    }  # fmt: skip
    parts = programs * 2 * (2 if gemm.gated else 1) * m * ROWS

    def run(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1
        device = x_TI.device
        x = TensorDescriptor(
            x_TI,
            list(x_TI.shape),
            [x_TI.stride(0) if len(x_TI) > 1 else inputs, 1],
            [m, k],
            x_layout,
        )
        partial = torch.empty(parts, dtype=torch.float32, device=device)
        stream_kernel[(programs,)](
            weight, x, gemm.bias_O, y_TY, partial, counters(device), len(x_TI), y_TY.stride(0),
            **constants, num_warps=4, **launch(device),
        )  # fmt: skip

    return run
