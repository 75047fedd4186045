"""A naive sampler: one row at a time, sorted lists and dictionaries, written from the definitions."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from headrace.base.wire.request import RowSampling

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, token: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mix(mix((seed + golden) & MASK) ^ (position * 0xD1B54A32D192ED03 & MASK))
    bits = mix((key + (token + 1) * golden) & MASK)
    return min(((bits >> 1) + 0.5) / 2**63, 1 - 2**-53)


def processed(logits: np.ndarray, s: RowSampling, tokens: list[int], num_prompt: int) -> np.ndarray:
    """Logits after penalties, bias, DRY and masks, float32."""
    x = logits.astype(np.float32).copy()
    outputs = Counter(tokens[num_prompt:])
    for token in set(tokens):
        x[token] = (
            x[token] / np.float32(s.repetition_penalty)
            if x[token] > 0
            else x[token] * np.float32(s.repetition_penalty)
        )
    for token, count in outputs.items():
        x[token] -= np.float32(count) * np.float32(s.frequency_penalty)
        x[token] -= np.float32(s.presence_penalty)
    for token, bias in s.logit_bias.items():
        x[token] += np.float32(bias)
    if s.dry_multiplier > 0:
        _dry(x, s, tokens)
    if s.allowed_ids is not None:
        x[[i for i in range(len(x)) if i not in s.allowed_ids]] = -np.inf
    if len(tokens) - num_prompt < s.min_tokens:
        x[list(s.suppressed_ids)] = -np.inf
    for word in s.bad_words:
        before = list(word[:-1])
        if len(tokens) >= len(before) and tokens[len(tokens) - len(before) :] == before:
            x[word[-1]] = -np.inf
    return x


def _dry(x: np.ndarray, s: RowSampling, tokens: list[int]) -> None:
    history = tokens[-s.dry_range :] if s.dry_range else tokens
    longest: dict[int, int] = {}
    for place in range(1, len(history)):
        if history[place] in s.dry_breaker_ids:
            continue
        length = 0
        while length < place:
            last = history[len(history) - 1 - length]
            if last in s.dry_breaker_ids or history[place - 1 - length] != last:
                break
            length += 1
        longest[history[place]] = max(longest.get(history[place], 0), length)
    for token, length in longest.items():
        if length >= max(1, s.dry_allowed_length):
            x[token] -= np.float32(s.dry_multiplier * s.dry_base ** (length - s.dry_allowed_length))


def softmax(z: dict[int, float]) -> dict[int, float]:
    top = max(z.values())
    weights = {token: math.exp(value - top) for token, value in z.items()}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def kept(x: np.ndarray, s: RowSampling, position: int) -> dict[int, float]:
    """token -> z of the tokens that truncation keeps."""
    z = {i: float(v) / s.temperature for i, v in enumerate(x) if v != -np.inf}
    if 0 < s.top_k < len(z):
        least = sorted(z.values(), reverse=True)[s.top_k - 1]
        z = {token: value for token, value in z.items() if value >= least}
    if s.typical_p < 1.0:
        p = softmax(z)
        entropy = -math.fsum(q * math.log(q) for q in p.values() if q > 0)
        far = {t: abs(-math.log(q) - entropy) if q > 0 else math.inf for t, q in p.items()}
        z = _prefix(z, p, s.typical_p, sorted(z, key=lambda t: far[t]), far)
    if s.top_p < 1.0:
        p = softmax(z)
        z = _prefix(z, p, s.top_p, sorted(z, key=lambda t: -p[t]), {t: -q for t, q in p.items()})
    if s.min_p > 0.0:
        least = max(z.values()) + math.log(s.min_p)
        z = {token: value for token, value in z.items() if value >= least}
    if s.xtc_probability > 0.0 and uniform(s.seed, position, -1) < s.xtc_probability:
        p = softmax(z)
        top_candidates = sorted((t for t in p if p[t] >= s.xtc_threshold), key=lambda t: (-p[t], t))
        z = {token: value for token, value in z.items() if token not in top_candidates[:-1]}
    return z


def _prefix(
    z: dict[int, float],
    p: dict[int, float],
    wanted: float,
    order: list[int],
    measure: dict[int, float],
) -> dict[int, float]:
    """The shortest prefix of `order` with probability `wanted`, and what ties with its last token."""
    total = 0.0
    for token in order:
        total += p[token]
        if total >= wanted:
            break
    return {t: value for t, value in z.items() if measure[t] <= measure[token]}


def sample(logits: np.ndarray, s: RowSampling, tokens: list[int], num_prompt: int) -> int:
    """The token that follows `tokens`."""
    x = processed(logits, s, tokens, num_prompt)
    if s.temperature == 0.0:
        return int(x.argmax())
    z = kept(x, s, len(tokens))
    noise = {t: -math.log(-math.log1p(-uniform(s.seed, len(tokens), t))) for t in z}
    return max(z, key=lambda t: z[t] + noise[t])


class Chain:
    """A row that chooses step by step (samplers, mirostat, adaptive_p): what it chose before counts."""

    def __init__(self, s: RowSampling) -> None:
        self.s = s
        self.mu = 2 * s.mirostat_tau
        self.chosen: list[float] = []

    def sample(self, logits: np.ndarray, tokens: list[int], num_prompt: int) -> int:
        x = processed(logits, self.s, tokens, num_prompt)
        z = {i: float(v) for i, v in enumerate(x) if v != -np.inf}
        if self.s.mirostat:
            z = _tempered(z, self.s)
            z = _mirostat(z, self.s.mirostat, self.mu, len(x))
            token = self._draw(z, len(tokens))
            self.mu -= self.s.mirostat_eta * (-math.log2(softmax(z)[token]) - self.s.mirostat_tau)
            return token
        for name in self.s.samplers:
            z = STEPS[name](z, self.s, len(tokens))
        if self.s.adaptive_target < 0:
            return self._draw(z, len(tokens))
        p, target, decay = softmax(z), self.s.adaptive_target, self.s.adaptive_decay
        # as if the target had been met for ever before the first token
        weights = [decay**age for age in range(len(self.chosen) - 1, -1, -1)]
        before = decay ** len(self.chosen) / (1 - decay)
        mean = (
            math.fsum(map(math.prod, zip(weights, self.chosen, strict=True))) + before * target
        ) / (math.fsum(weights) + before)
        near = min(max(2 * target - mean, 0.0), 1.0)
        far = {t: abs(q - near) / 0.3 for t, q in p.items()}
        token = self._draw({t: 5 - 10 * d * d / (1 + d) for t, d in far.items()}, len(tokens))
        self.chosen.append(p[token])
        return token

    def _draw(self, z: dict[int, float], position: int) -> int:
        noise = {t: -math.log(-math.log1p(-uniform(self.s.seed, position, t))) for t in z}
        return max(z, key=lambda t: z[t] + noise[t])


def _tempered(z: dict[int, float], s: RowSampling, _: int = 0) -> dict[int, float]:
    t = s.temperature
    if s.dynatemp_range > 0 and len(z) > 1:
        share = -math.fsum(q * math.log(q) for q in softmax(z).values() if q) / math.log(len(z))
        low, high = max(0.0, t - s.dynatemp_range), t + s.dynatemp_range
        t = low + (high - low) * min(share, 1.0) ** s.dynatemp_exponent
    return {token: value / max(t, 1e-6) for token, value in z.items()}


def _sigma(z: dict[int, float], s: RowSampling, _: int) -> dict[int, float]:
    if s.top_n_sigma <= 0:
        return z
    mean = math.fsum(z.values()) / len(z)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in z.values()) / len(z))
    least = max(z.values()) - s.top_n_sigma * spread
    return {t: v for t, v in z.items() if v >= least}


def _mirostat(z: dict[int, float], version: int, mu: float, width: int) -> dict[int, float]:
    p = softmax(z)
    order = sorted(z, key=lambda t: -p[t])
    if version == 2:
        return {t: z[t] for t in order if -math.log2(p[t]) <= mu or p[t] == p[order[0]]}
    best = [p[t] for t in order[:100]]
    steps = [math.log((i + 1) / i) for i in range(1, len(best))]
    falls = [math.log(a / b) for a, b in itertools.pairwise(best)]
    slope = math.fsum(map(math.prod, zip(steps, falls, strict=True))) / math.fsum(
        t * t for t in steps
    )
    e = slope - 1
    k = int(((e * 2**mu) / (1 - width**-e)) ** (1 / slope))
    least = p[order[min(max(k, 1), len(order)) - 1]]
    return {t: z[t] for t in order if p[t] >= least}


def _one(**only: str) -> Callable[[dict[int, float], RowSampling, int], dict[int, float]]:
    """A single truncation of `kept`, of logits that the temperature has left alone or divided."""

    def step(z: dict[int, float], s: RowSampling, position: int) -> dict[int, float]:
        x = np.full(1 + max(z), -np.inf)
        x[list(z)] = list(z.values())
        alone = {to: getattr(s, name) for to, name in only.items()}
        return kept(x, RowSampling(seed=s.seed, **alone), position)

    return step


STEPS = {
    "temperature": _tempered,
    "top_n_sigma": _sigma,
    "top_k": _one(top_k="top_k"),
    "typical_p": _one(typical_p="typical_p"),
    "top_p": _one(top_p="top_p"),
    "min_p": _one(min_p="min_p"),
    "xtc": _one(xtc_probability="xtc_probability", xtc_threshold="xtc_threshold"),
}
