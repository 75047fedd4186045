"""Attention of decoders in whose prompts tokens may see those behind them: of an image each other
(Gemma 3), or of a prompt all (PaliGemma). Steps that have such spans come in two parts
(back/attention/mutual.py); all others go to the one kernel of any decoder. Where all tokens see
those of their own block (diffusion language models), each row of a plan is one block, and the
kernel without a causal mask is the only one.

T query tokens, H query heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.attention.plan import AttentionPlan
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionFunction, AttentionProblem
from headrace.back.layers.scope import Scope

BLOCKS = "blocks"
"""`Scope.mutual` where each row of a plan is a block of its text, the last of what it knows."""


def bind_attention(
    scope: Scope, problem: AttentionProblem, *weights: torch.Tensor | None
) -> AttentionFunction:
    """The op's kernel for a layer; where the scope says that tokens of spans see each other, beside
    it one that has no causal mask."""
    both = _mutual_problem(scope.mutual, problem)
    if both is not None and scope.mutual == BLOCKS:
        whole: AttentionFunction = scope.bind(ATTENTION, both, *weights)
        return whole
    attend: AttentionFunction = scope.bind(ATTENTION, problem, *weights)
    if both is None:
        return attend
    mutual: AttentionFunction = scope.bind(ATTENTION, both, *weights)

    def attention(
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: AttentionPlan,
        lse_TH: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        if plan.mutual is None:
            return attend(q_THD, kv, plan, lse_TH)
        assert lse_TH is None, "steps with spans give no log-sum-exps"
        out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
        for kernel, part in ((attend, plan.mutual.causal), (mutual, plan.mutual.mutual)):
            if part is not None:
                q_NHD = q_THD.index_select(0, part.at_T)
                out_THD.index_copy_(0, part.at_T, kernel(q_NHD, kv, part.plan))
        return out_THD

    return attention


def _mutual_problem(mutual: str, problem: AttentionProblem) -> AttentionProblem | None:
    """See `Scope.mutual`."""
    if not mutual or (mutual == "local" and problem.window is None):
        return None
    window = None if mutual == "all" else problem.window
    return replace(problem, causal=False, window=window, verify_queries=1)
