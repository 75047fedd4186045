"""When and how the kernel of triton_gemv_bytes.py is launched."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from headrace.back.kernels.triton.wrap import interpreted, launch

UNIT = 16
"""Inputs that a thread reads of a row at once, and that groups are made of."""


def unfit(weight_OI: torch.Tensor, group: int, activation: str) -> str | None:
    """Why this kernel does not serve a GEMM, if so. `group`: inputs that share a scale."""
    if weight_OI.device.type != "cuda" or interpreted() or torch.version.hip is not None:
        return "runs on NVIDIA's GPUs only"
    if torch.cuda.get_device_capability(weight_OI.device) != (9, 0):
        return "has been measured on Hopper alone"
    if weight_OI.element_size() != 1:
        return f"reads bytes, not {weight_OI.dtype}"
    if activation not in ("", "silu"):
        return f"gates by silu, not {activation}"
    inputs = weight_OI.shape[1]
    if inputs % UNIT or (group < inputs and group % UNIT):
        return f"{inputs} inputs in groups of {group} are no multiples of {UNIT}"
    return None


def bind(
    weight_OI: torch.Tensor,
    scales_OG: torch.Tensor,
    bias_O: torch.Tensor | None,
    norm_I: torch.Tensor | None,
    *,
    group: int,
    eps: float,
    gated: bool,
    add: bool,
    n: int,
    warps: int,
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The launch `f(x_TI, y_TY)` of one token. `n`: outputs of a program."""
    from headrace.back.kernels.linear.triton_gemv_bytes import gemv_bytes_kernel

    outputs, inputs = weight_OI.shape
    results = outputs // (2 if gated else 1)
    constants = {
        "INPUTS": inputs, "OUTPUTS": results, "GROUP": group, "N": n, "WARPS": warps,
        "BIAS": bias_O is not None, "NORM": norm_I is not None, "GATED": gated, "ADD": add,
    }  # fmt: skip
    grid = (triton.cdiv(results, n),)

    def run(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1
        gemv_bytes_kernel[grid](
            x_TI, weight_OI, scales_OG, bias_O, norm_I, y_TY, eps, **constants, num_warps=warps,
            **launch(x_TI.device),
        )  # fmt: skip

    return run
