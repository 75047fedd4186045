"""The few tokens that truncation can keep, found without sorting the vocabulary.

K rows, V vocabulary, C candidates of the widest row. A cut is chosen so that surely k tokens reach
it: the k-th greatest of the maxima of V/16 disjoint sets of 16 logits (k sets hold one such token
each). Every token that reaches the cut is a candidate, ties included, so that what truncation keeps
is the same as over the whole row, if that is `proven`:

    top_k      at least k tokens reach the cut
    top_p      the candidates hold probability p or more
    min_p      the cut lies below the least logit that min_p keeps

Counting candidates reads them back to the host, hence on the CPU only; elsewhere whole rows are
truncated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

SET = 16


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """ids int64 [K, C], rising in each row, 0 in the padding; z float64 [K, C] = logit /
    temperature, -Inf in the padding; cut_K1 float64: every token of the row with z >= cut is
    here."""

    ids_KC: torch.Tensor
    z_KC: torch.Tensor
    cut_K1: torch.Tensor


def most_candidates(width: int) -> int:
    """The greatest k that is worth selecting: half the number of sets."""
    return width // SET // 2


def select(logits_KV: torch.Tensor, *, k_K: np.ndarray, temperature_K1: torch.Tensor) -> Candidates:
    """The candidates of CPU logits float32 [K, V]: at least k_K[i] of row i, or all its finite
    ones."""
    num_rows, width = logits_KV.shape
    whole = width // SET * SET
    maxima = logits_KV[:, :whole].unflatten(1, (SET, -1)).amax(1)
    best_KC = maxima.topk(int(k_K.max()), dim=1).values
    cut_K1 = best_KC.gather(1, torch.from_numpy(k_K - 1)[:, None])
    lowest = torch.finfo(logits_KV.dtype).min
    reaches = (logits_KV >= cut_K1.clamp(min=lowest)).numpy()
    row_M, id_M = np.divmod(np.flatnonzero(reaches), width)
    counts = np.bincount(row_M, minlength=num_rows)
    place_M = np.arange(row_M.size) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (num_rows, max(1, int(counts.max())))
    ids, z = np.zeros(shape, np.int64), np.full(shape, -np.inf)
    ids[row_M, place_M] = id_M
    z[row_M, place_M] = logits_KV.numpy()[row_M, id_M]
    return Candidates(
        ids_KC=torch.from_numpy(ids),
        z_KC=torch.from_numpy(z).div_(temperature_K1),
        cut_K1=cut_K1 / temperature_K1,
    )
