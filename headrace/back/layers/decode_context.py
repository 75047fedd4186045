"""Attention over a cache of which each rank has some positions of every sequence (decode context
parallelism, parallel/context.py): what a layer's cache is then, how it is written and how it is
read.

Every query token is a row of its own here, prompts' too: of a rank's positions it sees the first so
many, which is no causal mask of neighbours. T query tokens, H heads of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import AttentionPlan
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.latent_attention.op import OP as LATENT_ATTENTION
from headrace.back.kernels.latent_attention.op import LatentAttentionProblem
from headrace.back.kernels.merge_attention.op import share_beside
from headrace.back.layers.scope import Scope
from headrace.back.parallel.context import (
    gathered_heads,
    local_lengths,
    local_slots,
    own_heads,
)
from headrace.back.parallel.mesh import ContextSplit
from headrace.base.errors import ConfigError

Attend = Callable[..., torch.Tensor]
"""Of q, the cache, a plan and where log-sum-exps go."""


def split_context(scope: Scope, kv_heads: int, *, whole: bool = False) -> DecodeContext | None:
    """How a layer of so many KV heads on all ranks shares out its cache; None: it does not, or
    keeps it `whole`. ConfigError if the ranks do not hold the same heads."""
    split, ranks = scope.mesh.dcp, scope.mesh.tp.size
    if split.axis.size == 1 or whole or scope.mutual:
        return None
    times = ranks // kv_heads if ranks % kv_heads == 0 else 0
    if times % split.axis.size or not times:
        raise ConfigError(
            f"--decode-context-parallel-size {split.axis.size}: {ranks} ranks hold each of "
            f"{kv_heads} KV heads {times or 1} times, which is no multiple of it",
            field="decode_context_parallel_size",
        )
    return DecodeContext(split=split, block_tokens=scope.block_tokens)


@dataclass(frozen=True, kw_only=True)
class DecodeContext:
    """See the top of the file."""

    split: ContextSplit
    block_tokens: int

    @property
    def ranks(self) -> int:
        """That share a sequence."""
        return self.split.axis.size

    def form(self, form: CacheForm) -> CacheForm:
        """That of a cache on each rank."""
        return replace(form, ranks=self.ranks)

    def slots(self, plan: AttentionPlan) -> torch.Tensor:
        """Where this step's tokens are written here; those of other ranks into the null block."""
        return local_slots(plan.slot_T, self.split, self.block_tokens)

    def writes(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """f of what op `write` takes, slots last: those of this rank's tokens."""

        def written(*arguments: Any) -> Any:
            *rest, slot_T = arguments
            return write(*rest, local_slots(slot_T, self.split, self.block_tokens))

        return written

    def of_heads(
        self, scope: Scope, problem: AttentionProblem, sinks_H: torch.Tensor | None = None
    ) -> Attend:
        """Op attention of a layer of this `problem`, whose sinks are put in at the end."""
        heads = problem.heads * self.ranks
        all_heads = replace(problem, heads=heads, sinks=False, verify_queries=1)
        return self.attends(scope.bind(ATTENTION, all_heads), sinks_H)

    def of_latents(self, scope: Scope, problem: LatentAttentionProblem) -> Attend:
        """The same of op latent_attention."""
        all_heads = replace(problem, heads=problem.heads * self.ranks)
        return self.attends(scope.bind(LATENT_ATTENTION, all_heads))

    def attends(self, attend: Attend, sinks_H: torch.Tensor | None = None) -> Attend:
        """f(q_THX, kv, plan) -> out_THD by `attend`, of the heads of all ranks, which sees all that
        a plan's lengths say. `sinks_H`: of this rank's heads."""

        def attention(q_THX: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
            length_T = self._lengths(plan, len(q_THX))
            q_TYX = gathered_heads(q_THX, self.split)
            lse_TY = q_TYX.new_empty(q_TYX.shape[:2], dtype=torch.float32)
            out_TYD = attend(q_TYX, kv, self._own_plan(plan, length_T), lse_TY)
            lse_TY.masked_fill_((length_T == 0)[:, None], float("-inf"))
            out_THD, lse_TH = own_heads(out_TYD, lse_TY, self.split)
            if sinks_H is None:
                return out_THD
            return (out_THD.float() * share_beside(sinks_H, lse_TH)).to(out_THD.dtype)

        return attention

    def _lengths(self, plan: AttentionPlan, tokens: int) -> torch.Tensor:
        """int32 [T]: how many positions on this rank each query token sees; padding sees none."""
        at_T, end_R = torch.arange(tokens, device=plan.kv_len_R.device), plan.query_start_R1[1:]
        row_T = _rows(plan, tokens)
        seen_T = plan.kv_len_R[row_T] - end_R[row_T] + at_T + 1
        seen_T = torch.where(at_T < end_R[-1], seen_T, 0)
        return local_lengths(seen_T, self.split).int()

    def _own_plan(self, plan: AttentionPlan, length_T: torch.Tensor) -> AttentionPlan:
        """The plan of this rank's positions, with a row for each query token. No kernel need know
        rows without any: they read one, and the result is not looked at."""
        tokens, length_T = len(length_T), length_T.clamp(min=1)
        table_TB = plan.block_table_RB.index_select(0, _rows(plan, tokens))
        start_T1 = torch.arange(tokens + 1, dtype=torch.int32, device=length_T.device)
        host = None if plan.host_kv_len is None else length_T.cpu().numpy()
        return replace(
            plan,
            query_start_R1=start_T1,
            kv_len_R=length_T,
            block_table_RB=table_TB,
            host_query_start=None if host is None else np.arange(tokens + 1, dtype=np.int32),
            host_kv_len=host,
            num_decodes=tokens,
            max_query_len=1,
            max_kv_len=table_TB.shape[1] * self.block_tokens if host is None else int(host.max()),
        )


def _rows(plan: AttentionPlan, tokens: int) -> torch.Tensor:
    """The row of each query token; of padding the last one."""
    at_T, end_R = torch.arange(tokens, device=plan.kv_len_R.device), plan.query_start_R1[1:]
    return torch.searchsorted(end_R, at_T, right=True).clamp_(max=len(end_R) - 1)


def check_forms(forms: tuple[CacheForm, ...], ranks: int, family: str) -> None:
    """ConfigError unless every cache that keeps all of a sequence is shared out to so many ranks.
    Those of windows and chunks, and recurrent states, are whole on each."""
    whole = [form for form in forms if form.kind in ("full", "latent") and form.ranks != ranks]
    if whole or not any(form.ranks == ranks for form in forms):
        what = f"{len(whole)} caches" if whole else "no cache"
        raise ConfigError(
            f"--decode-context-parallel-size {ranks}: {what} of family {family} "
            f"{'are read by attention that takes whole ones' if whole else 'keeps whole sequences'}; leave it out",
            field="decode_context_parallel_size",
        )
