"""The tokens of one step: decodes first, one token each, then prefill chunks with what is left; and
which prompts may be computed in part at the same time.

A prompt is partial from its first chunk until its last. Without bounds a long prompt shares the
step with whatever comes behind it; with them a few finish early instead of many late, and long ones
leave room for short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.base.config.resolved import SchedulerSpec
from headrace.core.request import Request
from headrace.core.scheduler.prefill_budget import PrefillBudgetModel


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

    def spend_decodes(self, count: int, *, now: float) -> None:
        """`count` rows decode."""
        assert count <= self.left, (count, self.left)
        self.left -= count
        self._allowance = self.prefill_budget.allowance(count, now=now)

    def spend_resumed(self, tokens: int) -> None:
        """A row that decodes runs a chunk of tokens."""
        assert 0 < tokens <= self.left, (tokens, self.left)
        self.left -= tokens

    @property
    def prefill_left(self) -> int:
        """Tokens the next prefill chunk may have."""
        return min(self.left, self._allowance - self.prefill_tokens)

    def spend_prefill(self, tokens: int) -> None:
        """A prefill chunk joins."""
        assert 0 < tokens <= self.prefill_left, (tokens, self.prefill_left)
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

    def chunk(self, request: Request, tokens: int) -> int:
        """At most so many of `tokens` in one step."""
        if self._threshold is None or not self.is_long(request):
            return tokens
        return min(tokens, self._threshold)

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
