"""Drawing from the best tokens of a row alone, where the step has left these and no logits.

A row whose top_k is less than NUM_CANDIDATES is sampled among them: every token above the last
one's value is there, so all that top_k keeps, ties included, if the k-th value is greater than the
last. Where it is not, or the best value is not finite, the row is not `proven`, and its logits have
to be computed after all.

N rows, K of them sampled, C = NUM_CANDIDATES.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.linear_top.op import NUM_CANDIDATES
from headrace.back.sampling.features import SAMPLED_BY_OP, FeatureRows, RowNumbers, Use
from headrace.back.sampling.in_step import HeadOutput
from headrace.back.sampling.random_rows import Candidates, RandomRows

TopCandidates = tuple[torch.Tensor, torch.Tensor]
"""ids int64 [N, C] and logits float32 [N, C], best first: the order of op linear_top."""


def needs(numbers: RowNumbers, rows: np.ndarray) -> HeadOutput:
    """Top candidates, if each of these rows is greedy or has a top_k that these may prove, and asks
    for nothing they do not tell; else logits."""
    use_N = numbers.use[rows]
    provable_N = (
        (use_N & Use.TOP_K != 0)
        & (use_N & ~SAMPLED_BY_OP == 0)
        & (numbers.top_k[rows] < NUM_CANDIDATES)
    )
    enough = ((use_N == 0) | provable_N).all()
    return HeadOutput.TOP_CANDIDATES if enough else HeadOutput.LOGITS


def sample_candidates(
    top_candidates: TopCandidates, numbers: RowNumbers, feature_rows: FeatureRows
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """token_N and max_logit_N (see sampler.Sampled) of rows that need no more than top candidates,
    and the places of those that are not proven: they are still to be sampled."""
    id_NC, value_NC = top_candidates
    token_N, max_logit_N = id_NC[:, 0].clone(), value_NC[:, 0].clone()
    random_index = np.flatnonzero(numbers.use[feature_rows.rows])
    value_KC = value_NC.numpy()[random_index]
    kth_K = value_KC[
        np.arange(random_index.size), numbers.top_k[feature_rows.rows[random_index]] - 1
    ]
    proven_K = (kth_K > value_KC[:, -1]) & np.isfinite(value_KC[:, 0])
    at = random_index[proven_K]
    if at.size:
        random_rows = RandomRows(numbers, feature_rows.take(at), value_NC.device)
        token_N[at], _ = random_rows.among(
            _rising(id_NC[at], value_NC[at], random_rows.temperature)
        )
    return token_N, max_logit_N, random_index[~proven_K]


def _rising(
    id_KC: torch.Tensor, value_KC: torch.Tensor, temperature_K1: torch.Tensor
) -> Candidates:
    id_KC, order_KC = id_KC.sort(dim=1)
    z_KC = value_KC.gather(1, order_KC).to(torch.float64).div_(temperature_K1)
    return Candidates(ids_KC=id_KC, z_KC=z_KC, cut_K1=value_KC[:, -1:] / temperature_K1)
