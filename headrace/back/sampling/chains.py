"""Rows that choose by a chain of steps of their own: in another order than random_rows.py's, or
with a step that it does not have. One row at a time, over its whole logits, behind the step.

    temperature   z = logit / T; with `dynatemp_range` R, T lies in T - R .. T + R, at the entropy
                  of what is left, as a share of the greatest, to the power `dynatemp_exponent` (the
                  temperature by entropy of kalomaze, llama.cpp pull request 4972, 2024)
    top_n_sigma   keeps z >= max z - n * the standard deviation of what is left (Tang et al. 2024,
                  "Top-n sigma: not all logits are you need", section 3)
    top_k, typical_p, top_p, min_p, xtc   truncation.py

The last step may hang on what the row chose before:

    mirostat 1    keeps the k tokens that let the next surprise be mu, if p falls as Zipf's law says
                  (Basu et al. 2020, "Mirostat", algorithm 1; its exponent from the 100 best)
    mirostat 2    keeps tokens of a surprise of at most mu; both: mu -= eta * (surprise - tau), from
                  2 tau on, surprise = -log2 p among what was kept
    adaptive_p    prefers tokens whose p is near a target that makes up for the ones chosen so far
                  (adaptive-p of MrJackSpade and ddh0, llama.cpp pull request 17927, 2025)

With mirostat temperature alone comes before it. What a row chose is kept by the number of its
tokens, also for a while after it has lost its row: a request that is computed again goes on as it
was.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.gumbel import noise
from headrace.back.kernels.nucleus.op import OP as NUCLEUS
from headrace.back.kernels.nucleus.op import NucleusProblem
from headrace.back.kernels.upload import to_device
from headrace.back.sampling.features import COLDEST, HOTTEST, FeatureRows
from headrace.back.sampling.truncation import (
    exclude_top_,
    keep_min_p_,
    keep_top_k_,
    keep_top_p_,
    keep_typical_p_,
)
from headrace.base.wire.request import RowSampling
from headrace.base.wire.sampler_chain import SAMPLERS
from headrace.base.wire.step import RowStart

BEST = 100
"""Tokens from which mirostat 1 estimates how fast probabilities fall."""
WIDTH, PEAK, SHARPNESS = 0.3, 5.0, 10.0
"""adaptive_p: a token at distance d of the target, in widths, has the logit PEAK - SHARPNESS *
d^2 / (1 + d)."""
KEPT = 1024
"""Rows given back whose past is remembered."""
State = tuple[float, ...]
"""Mirostat: (mu,); adaptive_p: the sum of the chosen probabilities and of their weights."""


@dataclass
class _Past:
    """What a row wants, and its state before each token from which on it counts, by the number of
    output tokens, rising."""

    sampling: RowSampling
    states: list[tuple[int, State]]

    def before(self, num_output: int) -> State:
        while len(self.states) > 1 and self.states[-1][0] > num_output:
            self.states.pop()
        return self.states[-1][1]


class SamplerChains:
    """Implements `features.LogitFeature` for its rows: they only start and end; `choose` is theirs
    alone."""

    def __init__(self, device: torch.device) -> None:
        self._nucleus = NUCLEUS.choose(NucleusProblem(device=device.type)).bind()
        self._rows: dict[int, tuple[int, _Past]] = {}
        self._kept: OrderedDict[int, _Past] = OrderedDict()

    def start(self, start: RowStart) -> None:
        """See LogitFeature."""
        past = self._kept.pop(start.request, None)
        if past is None or past.sampling != start.sampling:
            past = _Past(start.sampling, [(0, _first_state(start.sampling))])
        self._rows[start.row] = start.request, past

    def end(self, row: int) -> None:
        """See LogitFeature."""
        request, past = self._rows.pop(row)
        if len(past.states) > 1:
            self._kept[request] = past
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """See LogitFeature: logits stay as they are."""

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """See LogitFeature: `choose` has noted it."""

    def choose(
        self, logits_KV: torch.Tensor, feature_rows: FeatureRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids that K rows choose from their processed logits, int64 [K], and what their chains
        left of these, float64 [K]: -Inf if every token is masked."""
        device = logits_KV.device
        token_K = torch.zeros(len(logits_KV), dtype=torch.int64, device=device)
        best_K = torch.full((len(logits_KV),), -torch.inf, dtype=torch.float64, device=device)
        columns = (feature_rows.rows, feature_rows.positions, feature_rows.num_output)
        for k, (row, position, num_output) in enumerate(zip(*columns, strict=True)):
            z_1V = logits_KV[k : k + 1].to(torch.float64)
            if torch.isneginf(z_1V).all():
                continue
            _, past = self._rows[int(row)]
            seed = np.array([past.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64)
            key = noise.keys(seed, np.array([position])).view(np.int64)
            chain = _Chain(past.sampling, z_1V, to_device(key, device), self._nucleus)
            token_K[k], best_K[k], state = chain.choose(past.before(int(num_output)))
            if state:
                past.states.append((int(num_output) + 1, state))
        return token_K, best_K


def _first_state(s: RowSampling) -> State:
    if s.mirostat:
        return (2 * s.mirostat_tau,)
    if s.adaptive_target >= 0.0:
        return s.adaptive_target / (1 - s.adaptive_decay), 1 / (1 - s.adaptive_decay)
    return ()


class _Chain:
    """One row's choice. z float64 [1, V]: -Inf for what is removed."""

    def __init__(
        self, sampling: RowSampling, z_1V: torch.Tensor, key: torch.Tensor, nucleus: object
    ) -> None:
        self._s, self._z, self._key, self._nucleus = sampling, z_1V, key, nucleus

    def choose(self, state: State) -> tuple[int, float, State]:
        """The token, its z, and the state behind it."""
        s = self._s
        if s.mirostat:
            self._temperature()
            self._keep_unsurprising(state[0])
            token, z, p = self._sample()
            return token, z, (state[0] - s.mirostat_eta * (-math.log2(p) - s.mirostat_tau),)
        for name in s.samplers or SAMPLERS:
            getattr(self, f"_{name}")()
        if s.adaptive_target < 0.0:
            token, z, _ = self._sample()
            return token, z, ()
        p_V = self._z.softmax(1)[0]
        self._prefer_near(p_V, min(max(2 * s.adaptive_target - state[0] / state[1], 0.0), 1.0))
        token, z, _ = self._sample()
        decayed = [s.adaptive_decay * one for one in state]
        return token, z, (float(p_V[token]) + decayed[0], 1 + decayed[1])

    def _sample(self) -> tuple[int, float, float]:
        """Samples from what is left: the token, its z and its probability."""
        ids_V = torch.arange(self._z.shape[1], device=self._z.device)
        at = int((self._z - noise.exponential(self._key, ids_V).log_()).argmax())
        z = float(self._z[0, at])
        return at, z, max(math.exp(min(z - float(self._lse()), 0.0)), sys.float_info.min)

    def _lse(self) -> torch.Tensor:
        return self._z.logsumexp(1, keepdim=True)

    def _column(self, value: float) -> torch.Tensor:
        return torch.tensor([[value]], dtype=torch.float64, device=self._z.device)

    def _num_left(self) -> int:
        return int((self._z > -torch.inf).sum())

    def _temperature(self) -> None:
        s, num_left = self._s, self._num_left()
        temperature, spread = s.temperature, s.dynatemp_range
        if spread > 0.0 and num_left > 1:
            p_V = self._z.softmax(1)
            entropy = float(torch.special.entr(p_V).sum()) / math.log(num_left)
            least, most = max(temperature - spread, 0.0), temperature + spread
            temperature = least + (most - least) * min(entropy, 1.0) ** s.dynatemp_exponent
        self._z.div_(min(max(temperature, COLDEST), HOTTEST))

    def _top_n_sigma(self) -> None:
        if self._s.top_n_sigma > 0.0:
            left = self._z[self._z > -torch.inf]
            least = left.max() - self._s.top_n_sigma * left.std(correction=0)
            self._z.masked_fill_(self._z < least, -torch.inf)

    def _top_k(self) -> None:
        if 0 < self._s.top_k < self._z.shape[1]:
            self._keep_best(self._s.top_k)

    def _keep_best(self, count: int) -> None:
        wanted = torch.tensor([count], device=self._z.device)
        keep_top_k_(self._z, wanted, most=count)

    def _typical_p(self) -> None:
        if self._s.typical_p < 1.0:
            keep_typical_p_(self._z, self._column(self._s.typical_p), self._lse())

    def _top_p(self) -> None:
        if self._s.top_p < 1.0:
            p = self._column(self._s.top_p)
            keep_top_p_(self._z, p, self._lse(), nucleus=self._nucleus)

    def _min_p(self) -> None:
        if self._s.min_p > 0.0:
            keep_min_p_(self._z, self._column(math.log(self._s.min_p)))

    def _xtc(self) -> None:
        s = self._s
        if s.xtc_probability > 0.0:
            xtc_id = torch.full((1,), noise.XTC_ID, dtype=torch.int64, device=self._z.device)
            acts = noise.uniform(self._key, xtc_id) < s.xtc_probability
            exclude_top_(self._z, self._column(s.xtc_threshold), acts)

    def _keep_unsurprising(self, mu: float) -> None:
        p_V = self._z.softmax(1)
        if self._s.mirostat == 1:
            self._keep_best(_zipf_k(p_V[0], mu, self._num_left()))
            return
        best = p_V == p_V.amax()
        self._z.masked_fill_((p_V < 2.0**-mu) & ~best, -torch.inf)

    def _prefer_near(self, p_V: torch.Tensor, target: float) -> None:
        distance = (p_V - target).abs_() / WIDTH
        wanted = PEAK - SHARPNESS * distance.square() / (1 + distance)
        self._z = torch.where(self._z > -torch.inf, wanted, self._z)


def _zipf_k(p_V: torch.Tensor, mu: float, num_left: int) -> int:
    """How many of the best tokens let the surprise be mu."""
    best = p_V.topk(min(BEST, num_left)).values
    best = best[best > 0.0].cpu().numpy()
    if best.size < 2:
        return 1
    place = np.arange(1, best.size)
    steps, falls = np.log((place + 1) / place), np.log(best[:-1] / best[1:])
    exponent = float((steps * falls).sum() / (steps**2).sum())
    epsilon = exponent - 1
    share = (1 - p_V.numel() ** -epsilon) / epsilon if epsilon else math.log(p_V.numel())
    if exponent <= 0.0:
        return num_left
    power = (mu - math.log2(share)) / exponent
    return num_left if power > 62 else min(max(int(2.0**power), 1), num_left)
