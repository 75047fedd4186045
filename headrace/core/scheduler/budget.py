"""The tokens of one step: decodes first, one token each, then prefill chunks with what is left."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.base.config.resolved import SchedulerSpec
from headrace.core.scheduler.pace import Pace


@dataclass(eq=False)
class StepBudget:
    """The budget of one step.

    Once the step holds `inter_prefill_budget` prefill tokens no further prefill joins it; the first always may, and may
    use the whole budget (ENG-01). Without `chunked` a prompt runs in one step or waits for the next. `pace` bounds the
    prefill tokens beside rows that decode.
    """

    spec: SchedulerSpec
    pace: Pace
    left: int = field(init=False)
    prefill_tokens: int = field(init=False, default=0)
    _allowance: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self._allowance = self.spec.max_step_tokens

    def spend_decodes(self, count: int) -> None:
        """`count` rows decode."""
        assert count <= self.left, (count, self.left)
        self.left -= count
        self._allowance = self.pace.allowance(count)

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
