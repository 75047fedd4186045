"""log of the sum of exp in Triton: one program per row, which reads it twice, the second time from the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.log_sum_exp.op import LogSumExp, LogSumExpProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.wrap import unsupported

TILE = 4096


@triton.jit
def log_sum_exp_kernel(logits, lse, row_stride, V, TILE: tl.constexpr):
    """logits float32 [M, V], lse float32 [M]."""
    i_row = tl.program_id(0).to(tl.int64)
    p_row = logits + i_row * row_stride
    o_v = tl.arange(0, TILE)
    b_max = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, V, TILE):
        b = tl.load(p_row + start + o_v, mask=start + o_v < V, other=float("-inf"))
        b_max = tl.maximum(b_max, b)
    highest = tl.max(b_max, axis=0)
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    b_sum = tl.zeros([TILE], tl.float32)
    for start in range(0, V, TILE):
        b = tl.load(p_row + start + o_v, mask=start + o_v < V, other=float("-inf"))
        b_sum += tl.exp(b - base)
    tl.store(lse + i_row, base + tl.log(tl.sum(b_sum, axis=0)))


def bind(problem: LogSumExpProblem) -> LogSumExp:
    """The kernel."""

    def log_sum_exp(logits_MV: torch.Tensor) -> torch.Tensor:
        assert logits_MV.dtype is torch.float32 and logits_MV.stride(1) == 1
        lse_M1 = logits_MV.new_empty(len(logits_MV), 1)
        if len(logits_MV):
            log_sum_exp_kernel[(len(logits_MV),)](
                logits_MV, lse_M1, logits_MV.stride(0), logits_MV.shape[1], TILE=TILE, num_warps=8
            )
        return lse_M1

    return log_sum_exp


def _supports(problem: LogSumExpProblem) -> str | None:
    return unsupported(problem.device, torch.float32)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
