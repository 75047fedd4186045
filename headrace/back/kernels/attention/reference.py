"""Paged attention in PyTorch: gather, then dense attention.

Decode rows go together: their blocks are gathered, padded to the longest row of a group, and two
batched products do the rest. Groups are cut so that the gathered KV stays within `GATHER_BYTES`,
about the share of last-level cache a core has. Rows with several queries go one by one, in tiles of
queries, each over exactly the KV positions its tile can see, so no mask of prompt length squared is
ever built. Shapes: R rows, H query heads, K KV heads, G = H/K, Q queries of a tile, S KV positions,
B blocks, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from headrace.back.kernels.kv_write.quantized import dequantize

if TYPE_CHECKING:
    from headrace.back.kernels.attention.op import AttentionFunction, AttentionProblem, Plan

GATHER_BYTES = 16 << 20
SCORE_BYTES = 32 << 20
QUERY_TILE = 256


@dataclass(frozen=True, kw_only=True)
class PartialAttention:
    """What a call fills: outputs, and log-sum-exps [T, H] if they are asked for. bias_HW: the
    position bias that is added to scores; with `states_THR` it is bias_RW, by which the bias of
    each query follows from its states."""

    out_THD: torch.Tensor
    lse_TH: torch.Tensor | None
    bias_HW: torch.Tensor | None = None
    states_THR: torch.Tensor | None = None

    def biases(self, start: int, stop: int, distance: torch.Tensor) -> torch.Tensor:
        """[H, Q, S] of queries start .. stop and keys `distance` [Q, S] positions before them."""
        assert self.bias_HW is not None, "there is no position bias"
        if self.states_THR is None:
            return _table_bias(self.bias_HW, distance)
        bias_QHW = self.states_THR[start:stop] @ self.bias_HW.float()
        width = bias_QHW.shape[2]
        index_QHS = distance.clamp(0, width - 1)[:, None].expand(-1, bias_QHW.shape[1], -1)
        near_Q1S = (distance < width)[:, None]
        return (bias_QHW.gather(2, index_QHS) * near_Q1S).transpose(0, 1)


def bind_reference(
    problem: AttentionProblem,
    sinks_H: torch.Tensor | None = None,
    bias_HW: torch.Tensor | None = None,
) -> AttentionFunction:
    """The reference."""
    assert (bias_HW is not None) == bool(problem.bias_width), problem

    def attention(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        lse_TH: torch.Tensor | None = None,
        states_THR: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert (states_THR is not None) == bool(problem.bias_rank), problem
        if problem.quantized:
            kv, plan = dequantized(problem, kv, plan)
        result = PartialAttention(
            out_THD=torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device),
            lse_TH=lse_TH,
            bias_HW=bias_HW,
            states_THR=states_THR,
        )
        if lse_TH is not None:
            lse_TH.fill_(float("-inf"))
        for start, end in _decode_groups(problem, plan):
            _decode(problem, q_THD, kv, plan, start, end, sinks_H, result)
        for row in range(plan.num_decodes, len(plan.host_kv_len)):
            _prefill_row(problem, q_THD, kv, plan, row, sinks_H, result)
        return result.out_THD

    return attention


def dequantized(
    problem: AttentionProblem, kv: torch.Tensor, plan: Plan
) -> tuple[torch.Tensor, Plan]:
    """The blocks of the plan in the dtype of the queries, and the plan with their new numbers."""
    blocks = plan.block_table_RB.unique()
    table_RB = torch.searchsorted(blocks, plan.block_table_RB).to(plan.block_table_RB.dtype)
    narrow: Any = plan
    return dequantize(kv[blocks.long()], problem.dtype, problem.quantized), replace(
        narrow, block_table_RB=table_RB
    )


def _lowest(problem: AttentionProblem, position: int) -> int:
    """The lowest position the query at `position` sees."""
    if problem.chunk:
        return position // problem.chunk * problem.chunk
    return max(0, position - problem.window + 1) if problem.window else 0


def _decode_groups(problem: AttentionProblem, plan: Plan) -> Iterator[tuple[int, int]]:
    """Cuts the decode rows into runs whose padded gather fits in GATHER_BYTES (at least one row
    each)."""
    token_bytes = 2 * problem.kv_heads * problem.head_dim * problem.dtype.itemsize
    start, longest = 0, 0
    for row in range(plan.num_decodes):
        kv_len = int(plan.host_kv_len[row])
        visible = kv_len - _lowest(problem, kv_len - 1) + problem.block_tokens
        longest = max(longest, visible)
        if row > start and (row + 1 - start) * longest * token_bytes > GATHER_BYTES:
            yield start, row
            start, longest = row, visible
    if start < plan.num_decodes:
        yield start, plan.num_decodes


def _decode(
    problem: AttentionProblem,
    q_THD: torch.Tensor,
    kv: torch.Tensor,
    plan: Plan,
    start: int,
    end: int,
    sinks_H: torch.Tensor | None,
    result: PartialAttention,
) -> None:
    """Rows start..end with one query each, where query token i belongs to row i, into `result`."""
    block_tokens, kv_heads = problem.block_tokens, problem.kv_heads
    kv_len_R = plan.kv_len_R[start:end].long()
    if problem.chunk:
        lowest_R = (kv_len_R - 1) // problem.chunk * problem.chunk
    else:
        lowest_R = (kv_len_R - (problem.window or plan.max_kv_len)).clamp_(min=0)
    first_R = torch.div(lowest_R, block_tokens, rounding_mode="floor")
    kv_lens = [int(length) for length in plan.host_kv_len[start:end]]
    num_blocks = max(
        (kv_len - 1) // block_tokens - _lowest(problem, kv_len - 1) // block_tokens + 1
        for kv_len in kv_lens
    )
    index_RB = first_R[:, None] + torch.arange(num_blocks, device=kv.device)
    last_block = plan.block_table_RB.shape[1] - 1
    table_RB = plan.block_table_RB[start:end].gather(1, index_RB.clamp_(max=last_block))
    gathered = kv.permute(1, 2, 0, 3, 4)[:, :, table_RB.long()]
    k_KRSD, v_KRSD = gathered.view(2, kv_heads, end - start, -1, problem.head_dim).unbind(0)

    position_RS = first_R[:, None] * block_tokens + torch.arange(
        num_blocks * block_tokens, device=kv.device
    )
    hidden_RS = (position_RS < lowest_R[:, None]) | (position_RS >= kv_len_R[:, None])
    v_KRSD.masked_fill_(hidden_RS[..., None], 0.0)
    q_KRGD = q_THD[start:end].unflatten(1, (kv_heads, -1)).transpose(0, 1)
    scores = scores_of(problem, q_KRGD, k_KRSD)
    if problem.late_length:
        scores *= late_factors(problem, kv_len_R - 1)[:, None, None]
    if result.bias_HW is not None:
        bias_HRS = result.biases(start, end, kv_len_R[:, None] - 1 - position_RS)
        scores += bias_HRS.unflatten(0, (kv_heads, -1)).transpose(1, 2)
    shape = (kv_heads, 1, -1, 1)
    if problem.slopes:
        scores += bias_of(problem, (position_RS - kv_len_R[:, None] + 1)[:, None], shape)
    scores = scores.masked_fill_(hidden_RS[:, None], float("-inf"))
    if problem.stripes is not None:
        hidden_HRS = problem.stripes.hidden(kv_len_R[:, None] - 1, position_RS)
        scores.masked_fill_(hidden_HRS.unflatten(0, (kv_heads, -1)).transpose(1, 2), float("-inf"))
    weights = softmax_of(scores, sinks_H, shape)
    if not problem.causal:
        weights = weights.masked_fill((kv_len_R == 0)[:, None, None], 0.0)
    weights = weights.to(problem.dtype)
    result.out_THD[start:end] = torch.matmul(weights, v_KRSD).transpose(0, 1).flatten(1, 2)
    if result.lse_TH is not None:
        lse_KRG = log_sum_exp_of(scores, sinks_H, shape)
        result.lse_TH[start:end] = lse_KRG.transpose(0, 1).flatten(1, 2)


def softmax_of(
    scores: torch.Tensor, sinks_H: torch.Tensor | None, shape: tuple[int, ...]
) -> torch.Tensor:
    """Over the last dimension; the sinks, viewed as `shape`, take their share and are left out."""
    if sinks_H is None:
        return scores.softmax(-1)
    sink = sinks_H.view(shape).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def log_sum_exp_of(
    scores: torch.Tensor, sinks_H: torch.Tensor | None, shape: tuple[int, ...]
) -> torch.Tensor:
    """Over the last dimension, in float32; the sinks, viewed as `shape`, count."""
    lse = scores.logsumexp(-1)
    if sinks_H is None:
        return lse
    return torch.logaddexp(lse, sinks_H.float().view(shape)[..., 0].expand_as(lse))


def scores_of(problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled and capped scores in float32: q [..., Q, D], k [..., S, D] -> [..., Q, S]."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * problem.scale
    if problem.softcap is not None:
        scores = scores.div_(problem.softcap).tanh_().mul_(problem.softcap)
    return scores


def late_factors(problem: AttentionProblem, position: torch.Tensor) -> torch.Tensor:
    """What the scores of queries at these positions are multiplied with, float32."""
    late = position.clamp(min=problem.late_length).float()
    return late.log() / math.log(problem.late_length)


def bias_of(
    problem: AttentionProblem, distance: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """What ALiBi adds to scores, float32: the slopes, viewed as `shape`, times the position's
    distance from the query, which is 0 or negative where the query sees it."""
    slopes_H = torch.tensor(problem.slopes, dtype=torch.float32, device=distance.device)
    return slopes_H.view(shape) * distance


def _table_bias(bias_HW: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """[H, ...] of keys so many positions before their queries."""
    return bias_HW.float()[:, distance.clamp(0, bias_HW.shape[1] - 1)]


def _prefill_row(
    problem: AttentionProblem,
    q_THD: torch.Tensor,
    kv: torch.Tensor,
    plan: Plan,
    row: int,
    sinks_H: torch.Tensor | None,
    result: PartialAttention,
) -> None:
    """One row with several queries, tile by tile, into its part of `result`."""
    begin, end = int(plan.host_query_start[row]), int(plan.host_query_start[row + 1])
    kv_len = int(plan.host_kv_len[row])
    if kv_len == 0:
        if result.lse_TH is not None and sinks_H is not None:
            result.lse_TH[begin:end] = sinks_H.float()
        return
    offset = kv_len - end
    block_tokens = problem.block_tokens
    origin = _lowest(problem, offset + begin) // block_tokens * block_tokens
    blocks = plan.block_table_RB[row, origin // block_tokens : -(-kv_len // block_tokens)].long()
    gathered = kv.permute(1, 2, 0, 3, 4)[:, :, blocks]
    k_KSD, v_KSD = gathered.view(2, problem.kv_heads, -1, problem.head_dim).unbind(0)
    tile = _tile_queries(problem, kv_len)
    for start in range(begin, end, tile):
        stop = min(start + tile, end)
        low, high = _lowest(problem, offset + start), offset + stop
        if not problem.causal:
            high = kv_len
            if problem.window is None:
                low = 0
        seen = slice(low - origin, high - origin)
        result.out_THD[start:stop] = _tile(
            problem,
            q_THD[start:stop],
            k_KSD[:, seen],
            v_KSD[:, seen],
            first_query=offset + start - low,
            origin=low,
            sinks_H=sinks_H,
            biases=None if result.bias_HW is None else partial(result.biases, start, stop),
            lse_QH=None if result.lse_TH is None else result.lse_TH[start:stop],
        )


def _plain(problem: AttentionProblem) -> bool:
    """Whether torch's own attention serves: not on GPUs, where with a mask it was wrong for a row
    of 129 (torch 2.11, float32, H200)."""
    return (
        problem.device == "cpu"
        and problem.causal
        and problem.softcap is None
        and problem.stripes is None
        and not (problem.sinks or problem.slopes or problem.bias_width)
    )


def _tile_queries(problem: AttentionProblem, kv_len: int) -> int:
    if _plain(problem):
        return QUERY_TILE
    return max(16, min(QUERY_TILE, SCORE_BYTES // (4 * problem.heads * kv_len)))


def _tile(
    problem: AttentionProblem,
    q_QHD: torch.Tensor,
    k_KSD: torch.Tensor,
    v_KSD: torch.Tensor,
    *,
    first_query: int,
    origin: int,
    sinks_H: torch.Tensor | None,
    biases: Callable[[torch.Tensor], torch.Tensor] | None,
    lse_QH: torch.Tensor | None,
) -> torch.Tensor:
    """Queries at positions first_query .. over S positions counted from the same `origin`;
    returns [Q, H, D], and fills `lse_QH` if there is one."""
    q_KGQD = q_QHD.unflatten(1, (problem.kv_heads, -1)).permute(1, 2, 0, 3)
    query_Q1 = torch.arange(first_query, first_query + len(q_QHD), device=q_QHD.device)[:, None]
    key_S = torch.arange(k_KSD.shape[1], device=q_QHD.device)
    seen_QS = (key_S <= query_Q1) | (not problem.causal)
    if problem.window is not None:
        seen_QS &= key_S > query_Q1 - problem.window
    if problem.chunk is not None:
        seen_QS &= key_S >= (query_Q1 + origin) // problem.chunk * problem.chunk - origin
    shape = (problem.kv_heads, q_KGQD.shape[1], *k_KSD.shape[1:])
    k_KGSD, v_KGSD = k_KSD[:, None].expand(shape), v_KSD[:, None].expand(shape)
    if _plain(problem) and lse_QH is None:
        out = F.scaled_dot_product_attention(
            q_KGQD, k_KGSD, v_KGSD, attn_mask=seen_QS, scale=problem.scale
        )
    else:
        scores = scores_of(problem, q_KGQD, k_KGSD)
        if problem.late_length:
            scores *= late_factors(problem, query_Q1 + origin)
        if biases is not None:
            scores += biases(query_Q1 - key_S).unflatten(0, (problem.kv_heads, -1))
        head_shape = (problem.kv_heads, -1, 1, 1)
        if problem.slopes:
            scores += bias_of(problem, key_S - query_Q1, head_shape)
        scores = scores.masked_fill_(~seen_QS, float("-inf"))
        if problem.stripes is not None:
            hidden_HQS = problem.stripes.hidden(query_Q1 + origin, key_S + origin)
            hidden_KGQS = hidden_HQS.unflatten(0, (problem.kv_heads, -1))
            scores.masked_fill_(hidden_KGQS, float("-inf"))
        weights = softmax_of(scores, sinks_H, head_shape)
        out = torch.matmul(weights.to(problem.dtype), v_KGSD)
        if lse_QH is not None:
            lse_KGQ = log_sum_exp_of(scores, sinks_H, head_shape)
            lse_QH.copy_(lse_KGQ.permute(2, 0, 1).flatten(1, 2))
    return out.permute(2, 0, 1, 3).flatten(1, 2)
