"""A few tokens through a model in chunks over a paged cache, compared with the same tokens run
whole.

For models whose code is not ours: it catches positions that are made up inside, masks that get
lost, and state that leaks from one row of a step to the next.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.layers.scope import Scope
from headrace.back.models.protocol import CausalModel

LENGTHS = (7, 5)
STEPS = ((4, 0), (1, 3), (2, 2))
"""Tokens of each row in each step: chunks, a decode beside a prefill, a late start."""


def check_paged(
    model: CausalModel, whole: Callable[[list[int]], torch.Tensor], scope: Scope
) -> float:
    """The difference of the logits of two rows, relative to the largest logit; `whole` gives the
    truth [T, V].

    In float32 it is the largest of all tokens. In shorter types rounding may send a token of a
    mixture of experts to another expert, which is no fault: there it is the token at seven tenths
    (a lost position, mask or row shows in at least four of the twelve).
    """
    rows = [
        [(37 * row + 11 * place + 1) % model.logits_width for place in range(length)]
        for row, length in enumerate(LENGTHS)
    ]
    with torch.inference_mode():
        truth_TV = torch.cat([whole(row) for row in rows])
        paged_TV = torch.cat(_paged_logits(model, rows, scope))
    scale = max(float(truth_TV.abs().max()), 1e-6)
    errors_T = (paged_TV - truth_TV).abs().amax(-1).nan_to_num(float("inf")).sort().values / scale
    rank = -1 if scope.dtype is torch.float32 else len(errors_T) * 7 // 10
    return float(errors_T[rank])


def _paged_logits(model: CausalModel, rows: list[list[int]], scope: Scope) -> list[torch.Tensor]:
    block_tokens, blocks = scope.block_tokens, -(-max(LENGTHS) // scope.block_tokens)
    kv = tuple(
        torch.zeros(
            (1 + len(rows) * blocks, *form.shape_beside(block_tokens)),
            dtype=form.storage_dtype(scope.dtype),
            device=scope.device,
        )
        for form in model.kv_forms
    )
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    done = [0] * len(rows)
    for step in STEPS:
        chunks = sorted(
            ((row, done[row], count) for row, count in enumerate(step) if count),
            key=lambda chunk: chunk[2] != 1,
        )
        batch = _batch(rows, chunks, blocks, kv, scope)
        logits = model.logits(model.forward(batch))
        counts = [count for _, _, count in chunks]
        for (row, start, count), part in zip(chunks, logits.split(counts), strict=True):
            parts[row].append(part)
            done[row] = start + count
    return [torch.cat(part) for part in parts]


def _batch(
    rows: list[list[int]],
    chunks: list[tuple[int, int, int]],
    blocks: int,
    kv: tuple[torch.Tensor, ...],
    scope: Scope,
) -> Batch:
    """One step of (row, start, count) chunks; row r owns `blocks` neighbouring blocks from 1 + r *
    blocks on."""
    device, block_tokens = scope.device, scope.block_tokens
    ids, positions, slots = [], [], []
    for row, start, count in chunks:
        ids += rows[row][start : start + count]
        positions += range(start, start + count)
        first = (1 + row * blocks) * block_tokens
        slots += range(first + start, first + start + count)
    counts = [count for _, _, count in chunks]
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    kv_len = np.array([start + count for _, start, count in chunks], np.int32)
    table = np.array([[1 + row * blocks + i for i in range(blocks)] for row, _, _ in chunks])
    plan = AttentionPlan(
        query_start_R1=torch.from_numpy(query_start).to(device),
        kv_len_R=torch.from_numpy(kv_len).to(device),
        block_table_RB=torch.from_numpy(table.astype(np.int32)).to(device),
        slot_T=torch.tensor(slots, device=device),
        host_query_start=query_start,
        host_kv_len=kv_len,
        num_decodes=counts.count(1),
        max_query_len=max(counts),
        max_kv_len=int(kv_len.max()),
    )
    return Batch(
        token_ids_T=torch.tensor(ids, device=device),
        positions_T=torch.tensor(positions, device=device),
        plans=(plan,),
        group_of_layer=(0,) * len(kv),
        kv=kv,
        logits_at_N=torch.arange(len(ids), device=device),
    )
