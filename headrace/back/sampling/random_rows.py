"""Samples tokens for the rows that are not greedy: temperature, truncation, noise, argmax.

K rows, V vocabulary, C candidates. Rows without truncation take noise over the whole vocabulary;
truncated rows only over the candidates that truncation can keep wherever that is proven to be the
same.

Candidates are found without sorting the vocabulary. A cut is chosen so that surely k tokens reach
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

from headrace.back.kernels.gumbel import noise
from headrace.back.kernels.gumbel.op import Gumbel
from headrace.back.kernels.nucleus.op import OP as NUCLEUS
from headrace.back.kernels.nucleus.op import NucleusProblem
from headrace.back.kernels.upload import to_device
from headrace.back.sampling.chains import SamplerChains
from headrace.back.sampling.features import TRUNCATES, FeatureRows, RowNumbers, Use
from headrace.back.sampling.truncation import (
    exclude_top_,
    keep_min_p_,
    keep_top_k_,
    keep_top_p_,
    keep_typical_p_,
)

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


ASKED = (64, 1024)
"""Candidates asked for where top_p or min_p truncates: at the usual p the first are enough, if not
the second are."""
CHUNK = 1 << 18
"""Logits worked on at a time on a CPU: the intermediate results stay in the second-level cache."""
DEVICE_CHUNK = 1 << 26
"""The same on other devices, where it only bounds memory."""

Choice = tuple[torch.Tensor, torch.Tensor]
"""The chosen ids int64 [K], and z of the chosen ones, float64 [K]: -Inf if every token is
masked."""


class RandomRows:
    """The numbers of K rows as columns, and how they are sampled.

    Order: z = logit / temperature, top_k, typical_p, top_p, min_p, XTC, then argmax of z -
    log(exponential noise). Each step sees the distribution that the one before has left, normalised
    anew.
    """

    def __init__(
        self, numbers: RowNumbers, feature_rows: FeatureRows, device: torch.device
    ) -> None:
        rows = feature_rows.rows
        self._source = (numbers, feature_rows)
        self._device = device
        self._nucleus = NUCLEUS.choose(NucleusProblem(device=device.type)).bind()
        self._use = numbers.use[rows]
        self._uses = int(np.bitwise_or.reduce(self._use, initial=0))
        self._top_k = numbers.top_k[rows]
        keys = noise.keys(numbers.seed[rows], feature_rows.positions)
        self._keys = to_device(keys.view(np.int64), device)
        self.temperature = self._column(numbers.temperature[rows])
        self._typical_p = self._column(numbers.typical_p[rows])
        self._top_p = self._column(numbers.top_p[rows])
        with np.errstate(divide="ignore"):
            self._log_min_p = self._column(np.log(numbers.min_p[rows]))
        self._xtc_probability = self._column(numbers.xtc_probability[rows])
        self._xtc_threshold = self._column(numbers.xtc_threshold[rows])

    def _column(self, values_K: np.ndarray) -> torch.Tensor:
        return to_device(values_K, self._device)[:, None]

    def part(self, index: np.ndarray) -> RandomRows:
        """The same for some of the rows."""
        numbers, feature_rows = self._source
        return RandomRows(numbers, feature_rows.take(index), self._device)

    def few_candidates(self, index: np.ndarray, most: int, asked: int) -> np.ndarray:
        """Which rows' truncation may be proven on candidates: top_k, or top_p or min_p without
        typical_p before."""
        use = self._use[index]
        top_k = (use & Use.TOP_K) != 0
        others = ((use & (Use.TOP_P | Use.MIN_P)) != 0) & ((use & Use.TYPICAL_P) == 0)
        return (top_k & (self._top_k[index] <= most)) | (others & ~top_k & (asked <= most))

    def candidates(self, logits_KV: torch.Tensor, asked: int) -> tuple[Choice, torch.Tensor]:
        """The choice among candidates, and bool [K]: whether it is proven to be that among all
        tokens."""
        wanted = np.where(self._use & Use.TOP_K, self._top_k, asked)
        candidates = select(logits_KV, k_K=wanted, temperature_K1=self.temperature)
        lse_K1 = self._whole_row_lse(logits_KV)
        proven_K = self._proven(candidates, lse_K1)
        return self._among(candidates, lse_K1), proven_K

    def among(self, candidates: Candidates) -> Choice:
        """The choice among candidates that hold all that top_k keeps of every row."""
        return self._among(candidates, torch.zeros_like(self.temperature))

    def _among(self, candidates: Candidates, lse_K1: torch.Tensor) -> Choice:
        self._truncate(candidates.z_KC, lse_K1)
        at_K1, best_K = self._argmax(candidates.z_KC, candidates.ids_KC)
        return candidates.ids_KC.gather(1, at_K1)[:, 0], best_K

    def truncated_z(self, logits_KV: torch.Tensor) -> torch.Tensor:
        """z of every token, float64 [K, V]: -Inf for those that truncation removes."""
        z_KV = logits_KV.to(torch.float64).div_(self.temperature)
        if self._uses & TRUNCATES:
            self._truncate(z_KV, z_KV.logsumexp(1, keepdim=True))
        return z_KV

    def whole(self, logits_KV: torch.Tensor) -> Choice:
        """The choice among all tokens."""
        z_KV = self.truncated_z(logits_KV)
        ids_V = torch.arange(z_KV.shape[1], device=self._device)
        at_K1, best_K = self._argmax(z_KV, ids_V)
        return at_K1[:, 0], best_K

    def _whole_row_lse(self, logits_KV: torch.Tensor) -> torch.Tensor:
        """log sum exp of z over the whole rows; only top_p without top_k asks for it."""
        needs = ((self._use & Use.TOP_P) != 0) & ((self._use & Use.TOP_K) == 0)
        if not needs.any():
            return torch.zeros_like(self.temperature)
        return logits_KV.to(torch.float64).div_(self.temperature).logsumexp(1, keepdim=True)

    def _proven(self, candidates: Candidates, lse_K1: torch.Tensor) -> torch.Tensor:
        complete_K1 = candidates.cut_K1 == -torch.inf
        by_top_k_K1 = to_device((self._use & Use.TOP_K) != 0, self._device)[:, None]
        mass_K1 = (candidates.z_KC - lse_K1).exp_().sum(1, keepdim=True)
        by_top_p_K1 = (self._top_p < 1.0) & (mass_K1 >= self._top_p)
        by_min_p_K1 = candidates.cut_K1 <= candidates.z_KC.amax(1, keepdim=True) + self._log_min_p
        return (complete_K1 | by_top_k_K1 | by_top_p_K1 | by_min_p_K1)[:, 0]

    def _truncate(self, z_KC: torch.Tensor, lse_K1: torch.Tensor) -> None:
        """Truncates in place. `lse_K1` is the whole row's; it is taken anew once something was
        removed."""
        if self._uses & Use.TOP_K:
            k_K = to_device(self._top_k, self._device)
            num_left_K1 = keep_top_k_(z_KC, k_K, most=int(self._top_k.max()))
            top_k_K1 = to_device((self._use & Use.TOP_K) != 0, self._device)[:, None]
            lse_K1 = torch.where(top_k_K1, num_left_K1, lse_K1)
        if self._uses & Use.TYPICAL_P:
            keep_typical_p_(z_KC, self._typical_p, lse_K1)
            typical_K1 = self._typical_p < 1.0
            lse_K1 = torch.where(typical_K1, z_KC.logsumexp(1, keepdim=True), lse_K1)
        if self._uses & Use.TOP_P:
            keep_top_p_(z_KC, self._top_p, lse_K1, nucleus=self._nucleus)
        if self._uses & Use.MIN_P:
            keep_min_p_(z_KC, self._log_min_p)
        if self._uses & Use.XTC:
            xtc_id = torch.full((1,), noise.XTC_ID, dtype=torch.int64, device=self._device)
            acts_K1 = noise.uniform(self._keys, xtc_id) < self._xtc_probability
            exclude_top_(z_KC, self._xtc_threshold, acts_K1)

    def _argmax(self, z_KC: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        score_KC = z_KC - noise.exponential(self._keys, ids).log_()
        at_K1 = score_KC.argmax(1, keepdim=True)
        return at_K1, z_KC.gather(1, at_K1)[:, 0]


def sample_random(
    logits_KV: torch.Tensor,
    numbers: RowNumbers,
    feature_rows: FeatureRows,
    gumbel: Gumbel,
    chains: SamplerChains,
) -> Choice:
    """Samples one token for each of K rows from their processed logits, float32 [K, V].

    Rows without truncation are sampled by `gumbel`, those with a chain of their own by `chains`,
    the others on the cheapest way that gives what the whole row would.
    """
    use_K = numbers.use[feature_rows.rows]
    plain_K, chain_K = (use_K & TRUNCATES) == 0, (use_K & Use.CHAIN) != 0
    if plain_K.all():
        return _sample_plain(logits_KV, numbers, feature_rows, gumbel)
    token_K = torch.empty(len(plain_K), dtype=torch.int64, device=logits_KV.device)
    best_K = torch.empty(len(plain_K), dtype=torch.float64, device=logits_KV.device)
    plain, unproven = np.flatnonzero(plain_K), np.flatnonzero(~plain_K & ~chain_K)
    if (chained := np.flatnonzero(chain_K)).size:
        choice = chains.choose(_rows(logits_KV, chained), feature_rows.take(chained))
        _put((token_K, best_K), chained, choice)
    if plain.size:
        choice = _sample_plain(_rows(logits_KV, plain), numbers, feature_rows.take(plain), gumbel)
        _put((token_K, best_K), plain, choice)
    step = (CHUNK if logits_KV.device.type == "cpu" else DEVICE_CHUNK) // logits_KV.shape[1]
    random_rows = RandomRows(numbers, feature_rows, logits_KV.device)
    if logits_KV.device.type == "cpu":
        unproven = _sample_candidates(logits_KV, random_rows, unproven, (token_K, best_K), step)
    for index in _chunks(unproven, step):
        _put((token_K, best_K), index, random_rows.part(index).whole(_rows(logits_KV, index)))
    return token_K, best_K


def truncated(
    logits_KV: torch.Tensor, numbers: RowNumbers, feature_rows: FeatureRows
) -> torch.Tensor:
    """The logits each row is sampled from, float32 [K, V]; of a greedy row the processed logits as
    they are."""
    random_index = np.flatnonzero(numbers.use[feature_rows.rows] & Use.RANDOM)
    if random_index.size:
        some = RandomRows(numbers, feature_rows.take(random_index), logits_KV.device)
        at = to_device(random_index, logits_KV.device)
        logits_KV[at] = some.truncated_z(logits_KV[at]).to(torch.float32)
    return logits_KV


def _sample_plain(
    logits_KV: torch.Tensor, numbers: RowNumbers, feature_rows: FeatureRows, gumbel: Gumbel
) -> Choice:
    keys_K = noise.keys(numbers.seed[feature_rows.rows], feature_rows.positions).view(np.int64)
    temperature_K = numbers.temperature[feature_rows.rows]
    device = logits_KV.device
    return gumbel(logits_KV, to_device(temperature_K, device), to_device(keys_K, device))


def _sample_candidates(
    logits_KV: torch.Tensor,
    random_rows: RandomRows,
    unproven: np.ndarray,
    choice: Choice,
    step: int,
) -> np.ndarray:
    """Samples the rows `unproven` whose truncation few candidates prove into `choice`; returns
    those still to sample."""
    token_K, best_K = choice
    for asked in ASKED:
        few = random_rows.few_candidates(unproven, most_candidates(logits_KV.shape[1]), asked)
        still_unproven = [unproven[~few]]
        for index in _chunks(unproven[few], 4 * step):
            candidates, proven = random_rows.part(index).candidates(logits_KV[index], asked)
            token_K[index], best_K[index] = candidates
            still_unproven.append(index[~proven.numpy()])
        unproven = np.concatenate(still_unproven)
    return unproven


def _rows(logits_KV: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    return logits_KV.index_select(0, to_device(index, logits_KV.device))


def _put(into: Choice, index: np.ndarray, choice: Choice) -> None:
    at = to_device(index, into[0].device)
    for all_K, some in zip(into, choice, strict=True):
        all_K.index_copy_(0, at, some)


def _chunks(index: np.ndarray, step: int) -> list[np.ndarray]:
    step = max(1, step)
    return [index[start : start + step] for start in range(0, index.size, step)]
