"""What a pass over blocks of masks proposes: a token for each mask, sampled as its row asks, and
how likely it was. Which of them stand: back/runner/denoising.py.

Steps as in sampler.py, but for those that need the tokens before (core/blockwise.py refuses them).
A mask that stays is sampled anew in the next pass: noise is a function of (seed, position, pass,
token id).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.back.kernels.upload import to_host
from headrace.back.sampling.features import FeatureRows, zero_failed
from headrace.back.sampling.random_rows import truncated
from headrace.back.sampling.sampler import Sampler

LEAST_CHANCE = 1e-10
"""What keeps logarithms finite, as Dream's sampler has it."""
TURN = 1 << 24
"""Positions between the noise of a pass and that of the next; no text is as long."""


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """Of N masks, on the host: token int64; confidence float64, the probability of the token in the
    distribution it was drawn from (of a greedy row in the model's own), or what else orders them;
    max_logit and chosen_logit: see features.Sampled."""

    token: np.ndarray
    confidence: np.ndarray
    max_logit: np.ndarray
    chosen_logit: np.ndarray

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """All of it."""
        return self.token, self.confidence, self.max_logit, self.chosen_logit


def propose(
    sampler: Sampler,
    logits_NV: torch.Tensor,
    *,
    rows: np.ndarray,
    positions: np.ndarray,
    tokens: torch.Tensor,
    turn: int,
    mask: int,
    order: str = "confidence",
) -> Proposals:
    """For the masks at these positions of these rows in pass `turn`; the logits, float32, may be
    overwritten. `tokens`: see Sampler.sample. `mask` is never proposed. `order`: see
    DiffusionOptions."""
    logits_NV[:, mask] = -torch.inf
    token_N, max_logit_N = sampler.greedy(logits_NV)
    chosen_N, use_N = max_logit_N, sampler.numbers.use[rows]
    zero_failed(logits_NV, max_logit_N)
    if use_N.any():
        num_output = positions - sampler.numbers.num_prompt[rows]
        seen = FeatureRows(rows=rows, positions=positions, num_output=num_output, tokens=tokens)
        sampler.apply(logits_NV, use_N, seen)
        seen = replace(seen, positions=positions + turn * TURN)
        drawn_NV = truncated(logits_NV.clone(), sampler.numbers, seen)
        token_N, chosen_N = sampler.choose(logits_NV, use_N, seen)
        logits_NV = drawn_NV
    confidence_N = _confidence(logits_NV, token_N, order)
    token, confidence, max_logit, chosen_logit = (
        to_host(column).numpy() for column in (token_N, confidence_N, max_logit_N, chosen_N)
    )
    return Proposals(
        token=token, confidence=confidence, max_logit=max_logit, chosen_logit=chosen_logit
    )


def _confidence(logits_NV: torch.Tensor, token_N: torch.Tensor, order: str) -> torch.Tensor:
    """By which of the masks are decided first, float64."""
    if order == "confidence":
        drawn_N = logits_NV.gather(1, token_N[:, None])[:, 0]
        return (drawn_N - logits_NV.logsumexp(1)).to(torch.float64).exp()
    if order == "margin":
        best_N2 = logits_NV.softmax(1).topk(2, dim=1).values.to(torch.float64)
        return best_N2[:, 0] - best_N2[:, 1]
    chance_NV = logits_NV.softmax(1)
    return (chance_NV * (chance_NV + LEAST_CHANCE).log()).sum(1).to(torch.float64)


def joined(parts: Sequence[Proposals]) -> Proposals:
    """One behind the other."""
    return Proposals(
        token=np.concatenate([part.token for part in parts]),
        confidence=np.concatenate([part.confidence for part in parts]),
        max_logit=np.concatenate([part.max_logit for part in parts]),
        chosen_logit=np.concatenate([part.chosen_logit for part in parts]),
    )
