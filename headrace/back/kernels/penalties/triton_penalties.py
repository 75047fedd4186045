"""Penalties in Triton, in one launch: a pass over the counts, which touches the logits of the
tokens seen alone. It needs no word from the host of what a row has seen. The arithmetic is torch's
to the bit: division rounds to nearest, no product is fused with a difference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.op import Kernel
from headrace.back.kernels.penalties.op import PROMPT, Penalise, PenaltiesProblem, Seen
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported

TILE = 4096


@triton.jit(do_not_specialize=["num_drafts"])
def penalties_kernel(
    logits,
    counts,
    numbers,
    slot,
    drafts,
    row_stride,
    width,
    num_drafts,
    PROMPT: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows, tiles of the vocabulary)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_v = tl.program_id(1) * TILE + tl.arange(0, TILE)
    enter(DEPENDENT)
    i_slot = tl.load(slot + i_row)
    repetition = tl.load(numbers + i_slot * 3)
    presence = tl.load(numbers + i_slot * 3 + 1)
    frequency = tl.load(numbers + i_slot * 3 + 2)
    b_count = tl.load(counts + i_slot * width + o_v, mask=o_v < width, other=0)
    for i_d in range(0, num_drafts):
        draft = tl.load(drafts + i_row * num_drafts + i_d)
        b_count += (o_v == draft).to(tl.int32)
    m_seen = b_count != 0
    p_v = logits + i_row * row_stride + o_v
    b_x = tl.load(p_v, mask=m_seen, other=0.0)
    b_count = (b_count & (PROMPT - 1)).to(tl.float32)
    b_divisor = tl.zeros([TILE], tl.float32) + repetition
    b_less = tl.where(b_x > 0.0, tl.div_rn(b_x, b_divisor), b_x * repetition)
    b_less = b_less - b_count * frequency
    b_less = b_less - (b_count > 0.0).to(tl.float32) * presence
    tl.store(p_v, b_less, mask=m_seen)


def bind(problem: PenaltiesProblem) -> Penalise:
    """The kernel."""

    def penalise(
        logits_KV: torch.Tensor,
        counts_SV: torch.Tensor,
        numbers_S3: torch.Tensor,
        slot_K: torch.Tensor,
        seen: Seen,
        drafts_KD: torch.Tensor | None = None,
    ) -> None:
        assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1, logits_KV.stride()
        assert counts_SV.is_contiguous() and numbers_S3.is_contiguous()
        assert slot_K.dtype == torch.int64 and slot_K.is_contiguous(), slot_K.dtype
        rows, width = logits_KV.shape
        drafts, num_drafts = slot_K, 0  # a pointer that is not read
        if drafts_KD is not None:
            assert drafts_KD.dtype == torch.int64 and drafts_KD.is_contiguous(), drafts_KD.dtype
            drafts, num_drafts = drafts_KD, drafts_KD.shape[1]
        assert counts_SV.shape[1] == width, (counts_SV.shape, width)
        if rows:
            penalties_kernel[(rows, triton.cdiv(width, TILE))](
                logits_KV, counts_SV, numbers_S3, slot_K, drafts,
                logits_KV.stride(0), width, num_drafts,
                PROMPT=PROMPT, TILE=TILE, num_warps=8, enable_fp_fusion=False,
                **launch(logits_KV.device),
            )  # fmt: skip

    return penalise


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
    invariant=True,
)
