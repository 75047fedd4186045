"""Masks and biases in Triton, in two launches: a pass over the rows that have a mask, in tiles, and
a program per row for the entries of its list. Rows without rules end at their first word.

A bias added to a logit that a mask has made -Inf leaves it so: the order is the reference's result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.logit_masks.op import (
    BANNED,
    BIASES,
    HEADER,
    LONGEST,
    MASKED,
    SUPPRESSED,
    UNTIL,
    WORDS,
    LogitMasks,
    LogitMasksProblem,
    MaskTables,
)
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import launch, unsupported

TILE = 4096
ENTRIES = 256
"""Entries of a list that are worked on at a time."""


@triton.jit
def _forbidden(b_x):
    """-Inf, unless the logit tells that the row has failed."""
    return tl.where(b_x < float("inf"), float("-inf"), b_x)


@triton.jit
def mask_kernel(
    logits,
    rules,
    allowed,
    grammar,
    grammar_at,
    row,
    row_stride,
    width,
    num_words,
    WORDS: tl.constexpr,
    MASKED: tl.constexpr,
    GRAMMAR: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows, tiles of the vocabulary)."""
    i_k = tl.program_id(0).to(tl.int64)
    o_v = tl.program_id(1) * TILE + tl.arange(0, TILE)
    enter(DEPENDENT)
    i_row = tl.load(row + i_k).to(tl.int64)
    own = tl.load(rules + i_row * WORDS + MASKED) != 0
    has_mask = own & False
    i_mask = i_row
    if GRAMMAR:
        i_mask = tl.load(grammar_at + i_k).to(tl.int64)
        has_mask = i_mask >= 0
    if own | has_mask:
        m_v = o_v < width
        p_word = i_row * num_words + o_v // 32
        b_allowed = tl.load(allowed + p_word, mask=m_v & own, other=-1)
        if GRAMMAR:
            p_mask = grammar + i_mask * num_words + o_v // 32
            b_allowed = b_allowed & tl.load(p_mask, mask=m_v & has_mask, other=-1)
        m_forbidden = m_v & (((b_allowed >> (o_v % 32)) & 1) == 0)
        p_x = logits + i_k * row_stride + o_v
        b_x = tl.load(p_x, mask=m_forbidden, other=0.0)
        tl.store(p_x, _forbidden(b_x), mask=m_forbidden)


@triton.jit
def rules_kernel(
    logits,
    rules,
    tokens,
    row,
    position,
    row_stride,
    columns,
    WORDS: tl.constexpr,
    HEADER: tl.constexpr,
    BIASES: tl.constexpr,
    SUPPRESSED: tl.constexpr,
    UNTIL: tl.constexpr,
    BANNED: tl.constexpr,
    ENTRIES: tl.constexpr,
    LONGEST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows)."""
    i_k = tl.program_id(0).to(tl.int64)
    enter(DEPENDENT)
    i_row = tl.load(row + i_k).to(tl.int64)
    i_position = tl.load(position + i_k)
    p_rules = rules + i_row * WORDS
    p_x = logits + i_k * row_stride
    num_biases = tl.load(p_rules + BIASES)
    p_entry = p_rules + HEADER
    for start in range(0, num_biases, ENTRIES):
        o_e = start + tl.arange(0, ENTRIES)
        m_e = o_e < num_biases
        o_id = tl.load(p_entry + 2 * o_e, mask=m_e, other=0)
        b_bias = tl.load(p_entry + 2 * o_e + 1, mask=m_e, other=0).to(tl.float32, bitcast=True)
        b_x = tl.load(p_x + o_id, mask=m_e, other=0.0)
        tl.store(p_x + o_id, b_x + b_bias, mask=m_e)
    tl.debug_barrier()
    p_entry += 2 * num_biases
    num_suppressed = tl.load(p_rules + SUPPRESSED)
    if i_position < tl.load(p_rules + UNTIL):
        for start in range(0, num_suppressed, ENTRIES):
            o_e = start + tl.arange(0, ENTRIES)
            m_e = o_e < num_suppressed
            o_id = tl.load(p_entry + o_e, mask=m_e, other=0)
            b_x = tl.load(p_x + o_id, mask=m_e, other=0.0)
            tl.store(p_x + o_id, _forbidden(b_x), mask=m_e)
        tl.debug_barrier()
    p_entry += num_suppressed
    p_history = tokens + i_row * columns
    for _ in range(0, tl.load(p_rules + BANNED)):
        before = tl.load(p_entry) - 1
        o_i = tl.arange(0, LONGEST)
        o_p = i_position - before + o_i
        b_word = tl.load(p_entry + 1 + o_i, mask=o_i < before, other=0)
        b_token = tl.load(p_history + o_p, mask=(o_i < before) & (o_p >= 0), other=-1)
        differing = tl.sum(((o_i < before) & (b_token != b_word)).to(tl.int32), axis=0)
        i_last = tl.load(p_entry + 1 + before)
        matches = differing == 0
        x = tl.load(p_x + i_last)
        tl.store(p_x + i_last, _forbidden(x), mask=matches)
        p_entry += before + 2


def bind(problem: LogitMasksProblem) -> LogitMasks:
    """See the op."""

    def logit_masks(
        logits_KV: torch.Tensor,
        tables: MaskTables,
        tokens_MC: torch.Tensor,
        row_K: torch.Tensor,
        position_K: torch.Tensor,
        grammar: bool,
    ) -> None:
        assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1, logits_KV.stride()
        assert row_K.is_contiguous() and position_K.is_contiguous() and tokens_MC.is_contiguous()
        (count, width), device = logits_KV.shape, logits_KV.device
        assert len(tables.grammar_at_P) >= count, (len(tables.grammar_at_P), count)
        if not count:
            return
        mask_kernel[(count, triton.cdiv(width, TILE))](
            logits_KV, tables.rules_MW, tables.allowed_MB, tables.grammar_GB,
            tables.grammar_at_P, row_K, logits_KV.stride(0), width, tables.allowed_MB.shape[1],
            WORDS=WORDS, MASKED=MASKED, GRAMMAR=grammar, TILE=TILE, num_warps=8, **launch(device),
        )  # fmt: skip
        rules_kernel[(count,)](
            logits_KV, tables.rules_MW, tokens_MC, row_K, position_K, logits_KV.stride(0),
            tokens_MC.shape[1], WORDS=WORDS, HEADER=HEADER, BIASES=BIASES, SUPPRESSED=SUPPRESSED,
            UNTIL=UNTIL, BANNED=BANNED, ENTRIES=ENTRIES, LONGEST=LONGEST, num_warps=4,
            **launch(device),
        )  # fmt: skip

    return logit_masks


KERNEL = Kernel(
    name="triton",
    supports=lambda problem: unsupported(problem.device, torch.float32),
    bind=bind,
    invariant=True,
)
