"""An indexer's keys, normed, rotated and written, and its rotated queries, in one Triton kernel: a
program rotates some heads of a token, or takes its key."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.index_write.op import IndexWrite, IndexWriteProblem, check_operands
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.rope.triton_rope import HEADS, rotate_heads
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, power_of_two, unsupported


@triton.jit
def _write_key(
    p_key, p_to, weight, bias, p_angles, eps, DIM: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, OFFSET: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A key's layer norm, rotated as it is written: each element looks at its partner too."""
    o_d = tl.arange(0, D)
    m_d = o_d < DIM
    o_r = o_d - OFFSET
    m_r = (o_r >= 0) & (o_r < 2 * HALF)
    o_r = tl.where(m_r, o_r, 0)
    if PAIRS:
        is_second, o_angle, o_other = o_r % 2 == 1, o_r // 2, o_r ^ 1
    else:
        is_second, o_angle, o_other = o_r >= HALF, o_r % HALF, (o_r + HALF) % (2 * HALF)
    o_other = tl.where(m_r, OFFSET + o_other, o_d)
    b_raw = tl.load(p_key + o_d, mask=m_d, other=0.0)
    b_x = b_raw.to(tl.float32)
    b_y = tl.load(p_key + o_other, mask=m_d, other=0.0).to(tl.float32)
    mean = tl.sum(b_x, axis=0) / DIM
    b_far = tl.where(m_d, b_x - mean, 0.0)
    factor = tl.rsqrt(tl.sum(b_far * b_far, axis=0) / DIM + eps)
    b_x = b_far * factor * tl.load(weight + o_d, mask=m_d, other=0.0)
    b_x += tl.load(bias + o_d, mask=m_d, other=0.0)
    b_y = (b_y - mean) * factor * tl.load(weight + o_other, mask=m_d, other=0.0)
    b_y += tl.load(bias + o_other, mask=m_d, other=0.0)
    b_cos = tl.load(p_angles + o_angle, mask=m_r, other=1.0)
    b_sin = tl.load(p_angles + HALF + o_angle, mask=m_r, other=0.0)
    dtype = b_raw.dtype
    b_x, b_y = b_x.to(dtype).to(tl.float32), b_y.to(dtype).to(tl.float32)  # as the norm gives them
    b_x = b_x * b_cos + tl.where(is_second, b_y, -b_y) * b_sin
    tl.store(p_to + o_d, b_x.to(dtype), mask=m_d)


@triton.jit
def index_write_kernel(
    q, key, positions, angles, keys, slots, weight, bias, q_token_stride, q_head_stride,
    key_stride, block_stride, eps, HEADS: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, F: tl.constexpr, OFFSET: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, tiles of H heads and the key."""
    enter(DEPENDENT)
    i_t, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_angles = angles + tl.load(positions + i_t).to(tl.int64) * (2 * HALF)
    if i_tile * H < HEADS:
        o_h = i_tile * H + tl.arange(0, H)
        p_q = q + i_t * q_token_stride + OFFSET
        rotate_heads(p_q, o_h, o_h < HEADS, q_head_stride, p_angles, HALF, F, PAIRS)
    else:
        slot = tl.load(slots + i_t)
        p_to = keys + slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * DIM
        p_key = key + i_t * key_stride
        _write_key(p_key, p_to, weight, bias, p_angles, eps, DIM, D, HALF, OFFSET, PAIRS)


def bind(problem: IndexWriteProblem, weight_I: torch.Tensor, bias_I: torch.Tensor) -> IndexWrite:
    """The kernel of one shape; keeps weight and bias."""
    heads, dim, half = problem.heads, problem.dim, problem.rotary // 2
    weight_I, bias_I = weight_I.float().contiguous(), bias_I.float().contiguous()
    constants = {
        "HEADS": heads, "H": HEADS, "DIM": dim, "D": power_of_two(dim), "HALF": half,
        "F": power_of_two(half), "OFFSET": problem.offset, "PAIRS": problem.layout == "pairs",
        "BLOCK_TOKENS": problem.block_tokens,
    }  # fmt: skip

    def index_write(
        q_TJI: torch.Tensor,
        key_TI: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        keys: torch.Tensor,
        slot_T: torch.Tensor,
    ) -> None:
        check_operands(problem, q_TJI, key_TI, keys)
        assert table_PR.is_contiguous() and table_PR.shape[1] == 2 * half, table_PR.shape
        assert keys.stride(1) == dim, keys.stride()
        if not len(slot_T):
            return
        index_write_kernel[(len(slot_T), triton.cdiv(heads, HEADS) + 1)](
            q_TJI, key_TI, positions_T.contiguous(), table_PR, keys, slot_T.contiguous(), weight_I,
            bias_I, *q_TJI.stride()[:2], key_TI.stride(0), keys.stride(0), problem.eps, num_warps=2,
            **constants, **launch(q_TJI.device),
        )  # fmt: skip

    return index_write


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=True,
)
