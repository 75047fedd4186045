"""When and how the kernel of triton_wide.py is launched."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from headrace.back.kernels.linear import stream
from headrace.back.kernels.triton.wrap import launch, num_sms

RESULTS = (64, 32)
"""Results of a tile, in two parts."""
K = 64
"""Inputs of a step."""
STAGES = {128: 5, 256: 3}
"""Steps in shared memory by the tokens of a tile."""
GROUP = 16
"""Tiles of tokens that share a tile of the weight in turn. 4, 8 and 32 were within 2 % (H200, 8B,
8192 tokens)."""
BOX = 32


def unfit(
    weight_OI: torch.Tensor, bias_O: torch.Tensor | None, activation: str, *, add: bool
) -> str | None:
    """Why this kernel does not serve a GEMM, if so."""
    if activation != "silu" or bias_O is not None or add:
        return "gates by silu, without a bias or an addition"
    if len(weight_OI) % 16:
        return f"{len(weight_OI) // 2} results are no multiple of 8"
    return stream.unfit(weight_OI, activation)


def bind(
    weight_OI: torch.Tensor, *, m: int, group: int
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The launch `f(x_TI, y_TY)` with tiles of `m` tokens, of which `group` share a tile of the
    weight in turn."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from headrace.back.kernels.linear.triton_wide import wide_kernel

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[weight_OI.dtype]

    def described(of: torch.Tensor, *box: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for(list(box), element)
        return TensorDescriptor(of, list(of.shape), [of.stride(0), 1], list(box), layout)

    weight = described(weight_OI, BOX, K)
    outputs, inputs = weight_OI.shape
    tiles_n = triton.cdiv(outputs // 2, sum(RESULTS))

    def run(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1 and x_TI.stride(0) % 8 == 0, x_TI.stride()
        programs = min(num_sms(x_TI.device), triton.cdiv(len(x_TI), m) * tiles_n)
        wide, narrow = (described(y_TY, m // 2, part) for part in RESULTS)
        wide_kernel[(programs,)](
            described(x_TI, m, K), weight, wide, narrow, len(x_TI), outputs // 2, triton.cdiv(inputs, K),
            STAGES=STAGES[m], GROUP=group, num_warps=4, **launch(x_TI.device),
        )  # fmt: skip

    return run
