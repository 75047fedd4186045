"""KV write in Triton: a program copies the keys or the values of a token's head, or makes numbers
of less than a byte of them (triton_narrow_write.py)."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.back.kernels.kv_write.op import KVWrite, KVWriteProblem
from headrace.back.kernels.kv_write.triton_narrow_write import NARROW, unfit_narrow, write
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported


@triton.jit
def kv_write_kernel(
    k, v, kv, slots, k_token_stride, k_head_stride, v_token_stride, v_head_stride, block_stride,
    kind_stride, head_stride, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, KV heads, keys and values. D: HEAD_DIM, padded."""
    enter(DEPENDENT)
    i_t, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, D)
    m_d = o_d < HEAD_DIM
    slot = tl.load(slots + i_t)
    p_to = kv + slot // BLOCK_TOKENS * block_stride + i_k * head_stride
    p_to += slot % BLOCK_TOKENS * HEAD_DIM + o_d
    if tl.program_id(2) == 0:
        b_x = tl.load(k + i_t * k_token_stride + i_k * k_head_stride + o_d, mask=m_d)
        tl.store(p_to, b_x, mask=m_d)
    else:
        b_x = tl.load(v + i_t * v_token_stride + i_k * v_head_stride + o_d, mask=m_d)
        tl.store(p_to + kind_stride, b_x, mask=m_d)


def bind(problem: KVWriteProblem) -> KVWrite:
    """The kernel of one cache."""
    head_dim = problem.head_dim
    if problem.quantized:
        return partial(write, problem.quantized)
    constants = {
        "HEAD_DIM": head_dim, "D": power_of_two(head_dim), "BLOCK_TOKENS": problem.block_tokens,
    }  # fmt: skip

    def kv_write(
        k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: torch.Tensor, slot_T: torch.Tensor
    ) -> None:
        assert k_TKD.dtype == v_TKD.dtype == kv.dtype == problem.dtype, (k_TKD.dtype, kv.dtype)
        assert k_TKD.shape == v_TKD.shape and len(slot_T) == len(k_TKD), k_TKD.shape
        assert k_TKD.stride(2) == v_TKD.stride(2) == 1, (k_TKD.stride(), v_TKD.stride())
        assert kv.stride()[3:] == (head_dim, 1), kv.stride()
        if not len(slot_T):
            return
        kv_write_kernel[(len(slot_T), k_TKD.shape[1], 2)](
            k_TKD, v_TKD, kv, slot_T.contiguous(), *k_TKD.stride()[:2], *v_TKD.stride()[:2],
            *kv.stride()[:3], num_warps=1, **constants, **launch(k_TKD.device),
        )  # fmt: skip

    return kv_write


def _supports(problem: KVWriteProblem) -> str | None:
    form = problem.quantized
    if form and form not in NARROW:
        return f"writes no caches of {form}"
    reason = unfit_narrow(form, problem.head_dim, problem.block_tokens)
    return reason or unsupported(problem.device, problem.dtype)


KERNEL = Kernel(name="triton", supports=_supports, bind=bind, invariant=True)
