"""Adapters of a table of tokens in Triton: a program has a token and a part of its width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.lora_embedding.op import (
    LoraEmbedding,
    LoraEmbeddingProblem,
    LoraTables,
)
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported

WIDTH = 512
"""Of a program."""
RANKS = 16
"""Of a step."""


@triton.jit
def lora_embedding_kernel(
    ids, x, slots, a, b, scale, rank, x_stride, V: tl.constexpr, E: tl.constexpr,
    MOST: tl.constexpr, N: tl.constexpr, R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, parts of the width."""
    enter(DEPENDENT)
    i_t = tl.program_id(0)
    o_e = tl.program_id(1) * N + tl.arange(0, N)
    m_e = o_e < E
    slot = tl.load(slots + i_t)
    if slot > 0:
        num_ranks = tl.load(rank + slot - 1)
        p_x = x + i_t.to(tl.int64) * x_stride + o_e
        b_x = tl.load(p_x, mask=m_e, other=0.0).to(tl.float32)
        i_a = ((slot - 1).to(tl.int64) * V + tl.load(ids + i_t)) * MOST
        for r in range(0, num_ranks, R):
            o_r = r + tl.arange(0, R)
            m_r = o_r < num_ranks
            b_a = tl.load(a + i_a + o_r, mask=m_r, other=0.0).to(tl.float32)
            b_a = b_a * tl.load(scale + slot - 1)
            p_b = b + ((slot - 1) * MOST + o_r).to(tl.int64)[:, None] * E + o_e[None, :]
            b_b = tl.load(p_b, mask=m_r[:, None] & m_e[None, :], other=0.0).to(tl.float32)
            b_x += tl.sum(b_a[:, None] * b_b, axis=0)
        tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m_e)


def bind(problem: LoraEmbeddingProblem, tables: LoraTables) -> LoraEmbedding:
    """The kernel for one table."""
    sizes = {"V": problem.rows, "E": problem.width, "MOST": problem.rank, "N": WIDTH, "R": RANKS}

    def lora_embedding(ids_T: torch.Tensor, x_TE: torch.Tensor, slot_T: torch.Tensor) -> None:
        assert x_TE.stride(1) == 1, x_TE.stride()
        if not len(ids_T):
            return
        lora_embedding_kernel[(len(ids_T), triton.cdiv(problem.width, WIDTH))](
            ids_T.contiguous(), x_TE, slot_T, tables.a_SVR, tables.b_SRE, tables.scale_S,
            tables.rank_S, x_TE.stride(0), **sizes, num_warps=4, **launch(x_TE.device),
        )  # fmt: skip

    return lora_embedding


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, problem.dtype),
    bind=bind,
    invariant=True,
)
