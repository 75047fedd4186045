"""The plans that Triton attention is checked by at start, each on a step of its own that takes it
(`Kernel.plans`), and which of them a problem goes without.

A plan is a kernel with its tile sizes. The heads, their size and the blocks are the model's; the
rows are few and short. Where a plan has failed another takes its steps: generic kernels those of
Hopper, tiles of the smallest pipeline those that did not fit, and rows that share a prefix read it
each for itself. What serves them then is among the plans of the next look, and so is checked too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from headrace.back.kernels.attention.op import (
    LONG,
    AttentionFunction,
    AttentionProblem,
    SamplePlan,
    sample_of,
    sample_plan,
)
from headrace.back.kernels.op import PlanCheck, Sample

log = logging.getLogger(__name__)

PREFIX = "shared prefix"
FEW_QUERIES = "few queries a row"
PREFILL_TMA = "prefill by TMA"
PROMPTS = "prompts beside decodes"
SHARED_TOKENS = 600
"""Tokens of a prefix that is long enough to be read once."""

_skipped: dict[AttentionProblem, set[str]] = {}


def skipped(problem: AttentionProblem) -> frozenset[str]:
    """The plans that the problem goes without, in this process."""
    return frozenset(_skipped.get(problem, ()))


def skip(problem: AttentionProblem, name: str, reason: str) -> None:
    """Goes on without a plan: its self-check failed."""
    log.warning("attention goes without %s: %s", name, reason)
    _skipped.setdefault(problem, set()).add(name)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows (query tokens, KV length) of a step, behind a prefix that all of them share."""

    rows: tuple[tuple[int, int], ...]
    prefix_tokens: int = 0


def decodes(rows: int, *, prefix_tokens: int = 0) -> Step:
    """One query a row; of the first the cache is long enough to be cut into splits."""
    first = 1 if prefix_tokens else LONG
    lengths = [first, *(1 + 7 * i % 50 for i in range(1, rows))]
    return Step(rows=tuple((1, length) for length in lengths), prefix_tokens=prefix_tokens)


def few_queries(problem: AttentionProblem, *, rows: int = 4, queries: int = 4) -> Step:
    """Rows as when drafts are verified: up to so many queries, in four rows or more."""
    block, three = problem.block_tokens, min(3, queries)
    first = [(1, block), (2, 2), (queries, LONG), (three, three + block)]
    others = [(1 + i % queries, 1 + i % queries + 7 * i % 50) for i in range(4, rows)]
    return Step(rows=tuple(sorted((*first, *others), key=lambda row: row[0] > 1)))


def prompts(problem: AttentionProblem, *, decodes: int) -> Step:
    """Prompts, two of them with a past, beside so many decodes."""
    block = problem.block_tokens
    ones = [(1, 1 + i * (block + 2)) for i in range(decodes)]
    return Step(rows=(*ones, (3, 3), (20, 20 + block), (130, LONG)))


def check(
    problem: AttentionProblem,
    name: str,
    step: Step,
    bind: Callable[..., AttentionFunction],
    *,
    needed: bool = False,
) -> PlanCheck:
    """The check of a plan by a step that takes it. `needed`: there is nothing in its place."""
    return PlanCheck(
        name=name,
        sample=partial(sample, problem, step),
        bind=bind,
        skip=None if needed else partial(skip, problem, name),
    )


def sample(problem: AttentionProblem, step: Step) -> Sample:
    """Inputs of the step."""
    plan, num_blocks = sample_plan(
        list(step.rows),
        block_tokens=problem.block_tokens,
        window=problem.window,
        chunk=problem.chunk,
        device=problem.device,
    )
    prefix_blocks = -(-step.prefix_tokens // problem.block_tokens)
    if prefix_blocks:
        plan = _behind_prefix(plan, prefix_blocks, num_blocks, problem.block_tokens)
    return sample_of(problem, [plan], num_blocks + prefix_blocks)


def _behind_prefix(
    plan: SamplePlan, prefix_blocks: int, first_block: int, block_tokens: int
) -> SamplePlan:
    rows, tokens = len(plan.kv_len_R), prefix_blocks * block_tokens
    table = plan.block_table_RB
    shared = torch.arange(first_block, first_block + prefix_blocks).to(table)
    return replace(
        plan,
        kv_len_R=plan.kv_len_R + tokens,
        block_table_RB=torch.cat((shared.expand(rows, -1), table), dim=1),
        host_kv_len=(plan.host_kv_len + tokens).astype(np.int32),
        max_kv_len=plan.max_kv_len + tokens,
    )
