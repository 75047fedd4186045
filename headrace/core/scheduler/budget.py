"""The tokens of one step: decodes first, one token each, then prefill chunks with what is left; how
many prefill tokens may join rows that decode, so that prompts do not stall running streams; and
which prompts may be computed in part at the same time.

The prefill tokens beside decodes are measured, not configured: what a step of decodes alone takes,
and what a prefill token adds to it. The allowance is what lengthens a step to `max_slowdown` times
the first. A prompt is so spread over many steps, which on large models costs less in all: a step of
few decodes waits for memory, and some prefill beside it is nearly free.

Prefill never starves (at least one block joins every step but the probes), and a step without
decodes is not bounded at all.

A prompt is partial from its first chunk until its last. Without bounds a long prompt shares the
step with whatever comes behind it; with them a few finish early instead of many late, and long ones
leave room for short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.base.config.resolved import SchedulerSpec
from headrace.core.request import Request

PROBE_STEPS = (
    32  # of so many mixed steps one is left to the decodes, so that their time stays known
)
FORGET = 0.9  # share of its weight that a measurement keeps at the next one
OUTLIER = 3.0  # a step this many times as long as expected was held up by something else
FIRST_SHARE = 8  # before anything is measured: this part of the step's budget


class RecentMean:
    """Seconds per unit, the newest measurements weighing most."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def add(self, seconds: float, units: float) -> None:
        """A measurement; one that is far off counts no more than the bound of what is credible."""
        if self._units:
            seconds = min(seconds, OUTLIER * self.value * units)
        self._seconds = FORGET * self._seconds + seconds
        self._units = FORGET * self._units + units

    @property
    def value(self) -> float:
        """Seconds per unit; 0 while nothing is known."""
        return self._seconds / self._units if self._units else 0.0


class PrefillBudgetModel:
    """Learns from every finished step. `max_slowdown`: how many times as long as decodes alone a
    step with prompts may take; without it prefill is never bounded."""

    def __init__(self, max_slowdown: float | None, *, max_tokens: int, block_tokens: int) -> None:
        assert max_slowdown is None or max_slowdown > 1.0, max_slowdown
        self._max_slowdown = max_slowdown
        self._max_tokens = max_tokens
        self._least = block_tokens
        self._decode_step = RecentMean()
        self._prefill_token = RecentMean()
        self._mixed_steps = 0
        self._finished_at = 0.0
        self.reserved = 0

    def allowance(self, decodes: int) -> int:
        """Prefill tokens that may join a step with so many rows that decode."""
        if self._max_slowdown is None or not decodes:
            return self._max_tokens
        if self._mixed_steps >= PROBE_STEPS:
            return 0
        decode_s, token_s = self._decode_step.value, self._prefill_token.value
        if decode_s <= 0.0 or token_s <= 0.0:
            return max(self._least, self._max_tokens // FIRST_SHARE)
        tokens = (self._max_slowdown - 1.0) * decode_s / token_s
        return self._rounded(min(tokens, self._max_tokens))

    def _rounded(self, tokens: float) -> int:
        """Down to whole blocks and to an eighth of its power of two, so that few sizes of steps
        occur: each size is recorded once as a graph."""
        unit = max(self._least, (1 << int(tokens).bit_length()) // 8)
        return max(self._least, int(tokens) // unit * unit)

    @property
    def decode_step_s(self) -> float:
        """Seconds of a step of decodes alone; 0 while nothing is known."""
        return self._decode_step.value

    @property
    def prefill_token_s(self) -> float:
        """Seconds that a prefill token takes; 0 while nothing is known."""
        return self._prefill_token.value

    def expected_s(self, decodes: int, prefill_tokens: int) -> float:
        """Seconds that a step is expected to take, by what was measured; 0 while nothing is."""
        decode_s = self._decode_step.value if decodes else 0.0
        return decode_s + prefill_tokens * self._prefill_token.value

    def observe(
        self, submitted_at: float, now: float, *, decodes: int, prefill_tokens: int
    ) -> float:
        """A step is done; for its seconds. Steps run one after another: it began when it was
        submitted, or when the one before ended."""
        seconds = now - max(submitted_at, self._finished_at)
        self._finished_at = now
        if not prefill_tokens:
            self._mixed_steps = 0
            self._decode_step.add(seconds, 1.0)
        elif not decodes:
            self._prefill_token.add(seconds, prefill_tokens)
        else:
            self._mixed_steps += 1
            added = seconds - self._decode_step.value
            self._prefill_token.add(max(added, 0.0), prefill_tokens)
        return seconds


@dataclass(eq=False)
class StepBudget:
    """The budget of one step.

    Once the step holds `inter_prefill_budget` prefill tokens no further prefill joins it; the first
    always may, and may use the whole budget. Without `chunked` a prompt runs in one step or waits
    for the next. `prefill_budget` bounds the prefill tokens beside rows that decode.
    """

    spec: SchedulerSpec
    prefill_budget: PrefillBudgetModel
    left: int = field(init=False)
    prefill_tokens: int = field(init=False, default=0)
    _allowance: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self._allowance = self.spec.max_step_tokens

    def for_decodes(self, resumes: bool) -> int:
        """Tokens that rows which decode may take: one is left to those that resume, and a chunk to
        a prompt that the step before had too few for."""
        kept, self.prefill_budget.reserved = max(resumes, self.prefill_budget.reserved), 0
        return self.left - kept

    def affords(self, request: Request, start: int) -> bool:
        """Whether the step has tokens for the least chunk from `start` on; else decodes leave them
        to it in the next."""
        least = request.least_chunk(start)
        if least <= self.left:
            return True
        self.prefill_budget.reserved = max(self.prefill_budget.reserved, least)
        request.reason = f"waits for a step with {least} tokens left, which see each other"
        return False

    def spend_decodes(self, count: int) -> None:
        """`count` rows decode."""
        assert count <= self.left, (count, self.left)
        self.left -= count
        self._allowance = self.prefill_budget.allowance(count)

    def spend_resumed(self, tokens: int) -> None:
        """A row that decodes runs a chunk of tokens."""
        assert 0 < tokens <= self.left, (tokens, self.left)
        self.left -= tokens

    @property
    def prefill_left(self) -> int:
        """Tokens the next prefill chunk may have."""
        return min(self.left, self._allowance - self.prefill_tokens)

    def spend_prefill(self, tokens: int) -> None:
        """A prefill chunk joins; one that may not be cut may be longer than `prefill_left`."""
        assert 0 < tokens <= self.left, (tokens, self.left)
        self.left -= tokens
        self.prefill_tokens += tokens

    @property
    def prefill_may_join(self) -> bool:
        """Whether one more prefill chunk may join the step."""
        if self.prefill_left <= 0:
            return False
        bound = self.spec.inter_prefill_budget
        return bound is None or self.prefill_tokens == 0 or self.prefill_tokens < bound

    def holds(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens may begin in this step."""
        return self.spec.chunked or tokens <= self.prefill_left


class PartialPrefillLimits:
    """The bounds of one scheduler; each of them may be absent."""

    def __init__(self, spec: SchedulerSpec) -> None:
        self._most = spec.max_partial_prefills
        self._most_long = spec.max_long_partial_prefills
        self._threshold = spec.long_prefill_threshold

    def is_long(self, request: Request) -> bool:
        """Whether the request has more tokens than the threshold."""
        return self._threshold is not None and request.num_tokens > self._threshold

    def chunk(self, request: Request, start: int, tokens: int) -> int:
        """At most so many of `tokens` from `start` on in one step, if these may be cut."""
        if self._threshold is not None and self.is_long(request):
            tokens = min(tokens, self._threshold)
        return max(tokens, request.least_chunk(start))

    def refusal(self, request: Request, prefilling: Sequence[Request]) -> str | None:
        """Why the request may not begin beside those that are partial; None: it may."""
        if self._most is not None and len(prefilling) >= self._most:
            return f"partial prefills: {len(prefilling)} under way (max_partial_prefills)"
        if self._most_long is None or not self.is_long(request):
            return None
        num_long = sum(map(self.is_long, prefilling))
        if num_long < self._most_long:
            return None
        return f"partial prefills: {num_long} long ones under way (max_long_partial_prefills)"
